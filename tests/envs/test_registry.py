from __future__ import annotations

import gymnasium
import pytest
import torch
from ray.rllib.env.env_context import EnvContext
from ray.tune import register_env
from ray.tune.registry import ENV_CREATOR, _global_registry

from rllib_llm.envs import registry
from rllib_llm.envs.bandit import BanditEnv
from rllib_llm.envs.registry import env_ids, make, register_envs
from rllib_llm.shared.errors import Problems
from tests.envs.tiny_envs import word_env

ARITHMETIC = "rllib_llm/Arithmetic-v0"


def keyword_env(num_envs, model=None):
    env = word_env(num_envs=num_envs)
    env.given_model = model
    return env


class ConfigEnv:
    """What RLlib calls: the class with the settings."""

    def __init__(self, config):
        self.config = config


def test_ids():
    own = ["Agent", "Arithmetic", "Calculator", "Chat", "Conversation", "Lookup"]
    own += ["RLHF", "ReasoningGym", "Reviews", "TRL", "TwentyQuestions", "Verifiers"]
    assert env_ids() == [f"rllib_llm/{name}-v0" for name in own]


def test_one_name_in_gymnasium_in_rllib_and_here():
    register_envs()
    register_envs()  # again changes nothing
    for env_id in env_ids():
        assert env_id in gymnasium.registry and _global_registry.contains(ENV_CREATOR, env_id)
    settings = {"digits": 2, "seed": 3}
    vector = gymnasium.make_vec(ARITHMETIC, num_envs=4, **settings)
    from_rllib = _global_registry.get(ENV_CREATOR, ARITHMETIC)({**settings, "num_envs": 4})
    ours = make(ARITHMETIC, {**settings, "num_envs": 4})
    assert vector.unwrapped.spec.id == ARITHMETIC
    first = [env.reset()[0]["prompt_ids"] for env in (vector, from_rllib, ours)]
    assert len(first[0]) == 4
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], first[2])


def test_the_index_of_a_worker_changes_nothing():
    prompts = [
        make(ARITHMETIC, EnvContext({"seed": 5}, worker_index=i)).reset()[0]["prompt_ids"]
        for i in (0, 1, 2)
    ]
    assert torch.equal(prompts[0], prompts[1]) and torch.equal(prompts[0], prompts[2])


def test_dotted_paths_with_arguments():
    env = make("tests.envs.tiny_envs:make_word_env", {"num_envs": 3})
    assert isinstance(env, BanditEnv) and env.num_envs == 3
    env = make(f"{__name__}.keyword_env", {"num_envs": 3})
    assert env.num_envs == 3 and env.given_model is None
    assert make(f"{__name__}.ConfigEnv", {"a": 1}).config == {"a": 1}


def test_settings_of_the_sampler_reach_only_those_who_take_them():
    # The sampler adds these to every env_config; `keyword_env` knows the model alone.
    added = {"model": "folder", "temperature": 0.7, "seed": 1, "device": "cpu", "split": "train"}
    assert make(keyword_env, {"num_envs": 2, **added}).given_model == "folder"
    with pytest.raises(Problems, match="must be called with .* given are .'num_emvs'"):
        make(keyword_env, {"num_emvs": 2})


def test_what_is_no_creator_is_told_by_its_arguments():
    with pytest.raises(Problems, match="missing a required argument: 'completions'"):
        make("rllib_llm.examples.arithmetic.correct", {"num_envs": 2})


def test_names_of_the_users_own():
    register_env("my-own-env", lambda config: ("made", dict(config)))
    assert make("my-own-env", {"a": 1}) == ("made", {"a": 1})


def test_wrong_names():
    with pytest.raises(Problems, match=f"env='Arithmetic-v1' .*Did you mean '{ARITHMETIC}'"):
        make("Arithmetic-v1")
    with pytest.raises(Problems, match="Did you mean 'rllib_llm/RLHF-v0'"):
        make("RLHF")
    with pytest.raises(Problems, match="env='Pendulum-v9' must be one of .* Check the spelling"):
        make("Pendulum-v9")
    with pytest.raises(Problems, match="env=3 must be an environment's name"):
        make(3)
    with pytest.raises(Problems, match="Did you mean 'make_word_env'"):
        make("tests.envs.tiny_envs:make_wrd_env")


def test_registering_imports_no_environment():
    # Their modules load transformers' models; names must be cheap.
    assert all(isinstance(target, str) for target in registry.ENVIRONMENTS.values())


def test_a_single_environment_is_refused_with_the_call_that_works():
    register_envs()
    with pytest.raises(Problems, match=r"must be gymnasium\.make_vec\('rllib_llm/Arith"):
        gymnasium.make(ARITHMETIC)


class Single(gymnasium.Env):
    pass


@pytest.mark.parametrize("env", [Single, Single(), f"{__name__}:Single"])
def test_a_single_environment_of_ones_own_is_refused_for_samplers_alone(env):
    with pytest.raises(Problems, match=r"must be a gymnasium.vector.VectorEnv: one step"):
        registry.check_batched(env)
    registry.check_batched(word_env())
    assert registry.creator(Single)({}).metadata == gymnasium.Env.metadata  # RLlib's own take it


def test_a_name_of_gymnasiums_is_no_spelling_mistake():
    with pytest.raises(Problems, match=r"env='CartPole-v1' must be a gymnasium.vector.Vec"):
        registry.check_name("CartPole-v1")


def test_a_vectorised_environment_of_gymnasiums_is_told_how_to_register_it():
    gymnasium.register("Batched-v0", vector_entry_point=word_env)
    try:
        with pytest.raises(Problems, match="a name of ray.tune.register_env"):
            registry.check_name("Batched-v0")
    finally:
        del gymnasium.registry["Batched-v0"]


def test_a_dotted_path_becomes_a_name_that_rllib_knows():
    path = f"{__name__}:ConfigEnv"
    assert registry.register_user_env(path) and registry.register_user_env(path)
    from_rllib = _global_registry.get(ENV_CREATOR, path)
    assert from_rllib(EnvContext({"a": 1}, worker_index=1)).config == {"a": 1}
    assert make(path, {"b": 2}).config == {"b": 2}
    assert not registry.register_user_env("CartPole-v1")
    assert not registry.register_user_env("org/name")
    with pytest.raises(Problems, match="Did you mean 'ConfigEnv'"):
        registry.register_user_env(f"{__name__}:ConfgEnv")


class BrokenEnv:
    def __init__(self, config):
        raise KeyError("SERVICE")


def test_an_environment_whose_code_raises_is_told_with_its_setting():
    """It was a raw traceback."""
    register_env("broken", BrokenEnv)
    for env in ("broken", f"{__name__}:BrokenEnv", BrokenEnv):
        with pytest.raises(Problems, match="^env=.* make an environment: KeyError: 'SERV") as e:
            make(env)
        assert isinstance(e.value.__cause__, KeyError)
    with pytest.raises(Problems, match="^env_config.seed='x' must be"):
        make(ARITHMETIC, {"seed": "x"})  # of this package: it says which setting is wrong


@pytest.mark.parametrize("path", ["vowel:create", "vowel.VowelEnv"])
def test_a_path_into_a_module_that_is_not_there_says_so(path):
    with pytest.raises(ValueError, match="there is no module 'vowel'"):
        make(path)


def test_arguments_that_no_setting_gives_are_missed_before_a_run():
    def create(words, split, seed=0):
        return word_env()

    path = f"{word_env.__module__}:{word_env.__name__}"
    registry.check_arguments(path, {})
    with pytest.raises(Problems, match="missing a required argument: 'words'"):
        registry.check_arguments(create, {})
    registry.check_arguments(create, {"words": 3})  # the sampler adds `split`
