from __future__ import annotations

import pytest
from ray.rllib.algorithms.callbacks import RLlibCallback
from ray.rllib.algorithms.ppo import PPO

from rllib_llm.algorithms.grpo import GRPO, GRPOConfig
from rllib_llm.algorithms.ppo_ptx import PPOPtx
from rllib_llm.algorithms.sft import SFT
from rllib_llm.config.schema import allowed_keys, checked_config
from rllib_llm.shared.errors import nearest, problems_in, suggestion
from tests.algorithms import tiny_runs as tiny


class MyCallback(RLlibCallback):
    """For a dotted path."""

MODEL = "rllib_llm.examples.arithmetic.build_model"


def ppo(**settings):
    return tiny.build_config(PPO, {"env": "CartPole-v1", **settings}, "a.config")


def test_settings_reach_the_config():
    config = ppo(lr=1e-3, train_batch_size_per_learner=64, minibatch_size=32, num_env_runners=0)
    assert (config.lr, config.train_batch_size_per_learner, config.num_env_runners) == (1e-3, 64, 0)


def test_yaml_names_that_rllib_stores_elsewhere():
    callback = f"{__name__}.MyCallback"
    settings = {"lambda": 0.5, "callbacks": callback, "model_config": {"fcnet_hiddens": [8]}}
    config = ppo(**settings)
    assert config.lambda_ == 0.5
    assert config.callbacks_class.__name__ == "MyCallback"
    assert config.model_config["fcnet_hiddens"] == [8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lrr": 1}, "a.config.lrr must be a known key. Did you mean 'lr'"),
        ({"num_workers": 2}, "num_workers must be a known key. It is 'num_env_runners' now."),
        ({"algo_class": "x"}, "algo_class must be a known key"),
        ({"_is_frozen": True}, "_is_frozen must be a known key"),
        ({"evaluation_config": {"explor": 1}}, "a.config.evaluation_config.explor must be"),
        ({"gamma": -1}, "a.config.gamma=-1 must not be -1"),
        ({"gamma": -1.0}, "a.config.gamma=-1.0 must not be -1"),
        ({"num_env_runners": -2}, "a.config.num_env_runners=-2 must be at least 0"),
        ({"lr": "fast"}, "a.config.lr='fast' must be a number"),
        ({"shuffle_batch_per_epoch": "yes"}, "must be true or false"),
        ({"callbacks": "nowhere.Thing"}, "a.config.callbacks='nowhere.Thing'"),
        ({"callbacks": f"{__name__}.Absent"}, "it has no 'Absent'"),
    ],
)
def test_what_rllib_would_take_in_silence_is_refused(settings: dict, message: str):
    with pytest.raises(ValueError) as error:
        ppo(**settings)
    assert message in str(error.value)


def test_errors_of_validate_come_through():
    with pytest.raises(ValueError, match="minibatch_size"):
        ppo(train_batch_size_per_learner=32, minibatch_size=64)


def test_our_settings_are_allowed_keys():
    keys = allowed_keys(PPOPtx.get_default_config())
    assert {"model", "ptx_coeff", "ref_kl_coeff", "max_new_tokens", "lambda", "env"} <= keys
    assert not {"num_workers", "algo_class", "_is_frozen"} & keys


def test_the_nearest_names_whatever_the_case():
    assert nearest("PTX_Coef", ["ptx_coeff", "lr", "gamma"])[0] == "ptx_coeff"
    assert nearest("a" * 300, ["a" * 300]) == [], "no name: among megabytes it would take long"
    assert suggestion("zzz", ["a", "b"]) == "Allowed: a, b."
    assert suggestion("zzz", map(str, range(99))) == "Nothing similar is known."


def test_mistakes_with_rllibs_own_algorithms_are_told_once_and_in_our_words():
    wrong = {"model": "./folder", "lr": "fast", "env": "CartPole-v1"}
    found = problems_in(tiny.build_config, PPO, wrong, "a.config")
    texts = [str(error) for error in found]
    assert len(texts) == 2, texts
    assert texts[0] == (
        "a.config.model='./folder' must be a mapping: it holds several settings of RLlib's own "
        "algorithm. Write `run: GRPO` or `run: PPOPtx`."
    )
    assert texts[1].startswith("a.config.lr='fast' must be a number: its default is")


def test_a_section_that_is_no_mapping_is_told_as_one():
    with pytest.raises(ValueError, match="rewards='my.close' must be a mapping: it is a section"):
        tiny.build_config(PPOPtx, {"rewards": "my.close"}, "a.config")


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"lr": "fast"}, "and `{grid_search: [...]}` tries several."),
        ({"clip_param": "wide"}, "Write 0.2, its default."),
        ({"train_batch_size_per_learner": 0, "minibatch_size": 16}, "Write 64, its default."),
        ({"attn_implementation": "flash_attention"}, "Did you mean 'flash_attention_2'?"),
        ({"micro_batch_tokens": "all"}, "Write 16384, or None with micro_batch_size."),
        ({"evaluation_config": "greedy"}, "Write {explore: true}."),
        ({"num_env_runners": "two"}, "Write 0, its default."),
        ({"model": {"path": "./my"}}, "Write the folder, hub id or path itself."),
        (
            {"eval_envs": {"math": "sums.csv"}, "evaluation_interval": 1},
            "Write `math: {env_config: {prompts: ...}}`.",
        ),
        ({"rewards": ["my.function"]}, "Write `rewards: {functions: ...}`."),
        ({"num_rollout_workers": 2}, "It is 'num_env_runners' now."),
        ({"evaluation_num_workers": 1}, "It is 'evaluation_num_env_runners' now."),
        ({"ptx_coeff": 0.1}, "It is for PPOPtx alone: leave it out."),
        ({"label_smoothing": 0.1}, "It is for DPO alone: leave it out."),
        ({"reward": {"functions": []}}, "'rewards' or 'reward_functions' or 'score_clip'?"),
        (
            {"max_tokens": 9},
            "that of a whole conversation is written `conversation: {max_tokens: ...}`.",
        ),
        ({"warmup_ratio": 0.1}, "write that share of all that the run takes."),
        ({"filters": ["reward_spred"]}, "Did you mean 'reward_spread'?"),
        (
            {"filters": ["reward_spread"], "num_completions": 1},
            "Set num_completions: 8, say, or leave the filter out.",
        ),
        ({"generate_function": "my_code.py:answer"}, "Write 'my_code:answer'."),
        ({"prompts": {"data": 5}}, "Write `data: prompts.jsonl`."),
        ({"policies": ["a"]}, "One policy is trained; leave it out."),
        ({"learner_class": f"{__name__}.MyCallback"}, "Leave it out."),
        ({"env_runner_cls": f"{__name__}.MyCallback"}, "Leave it out."),
        ({"callbacks": f"{__name__}.ppo"}, "Write a class derived from RLlibCallback."),
    ],
)
def test_a_mistake_is_told_once_with_what_to_write(settings: dict, remedy: str):
    usual = {"model": MODEL, "env": "rllib_llm/Arithmetic-v0"}
    found = problems_in(tiny.build_config, GRPO, {**usual, **settings}, "a.config")
    (error,) = map(str, found)
    assert error.endswith(remedy)


def test_settings_of_other_algorithms_are_told_with_those_that_have_them():
    with pytest.raises(ValueError, match="rewards must .* It is for PPOPtx, GRPO, .* and "):
        tiny.build_config(SFT, {"rewards": {"functions": ["my.function"]}})
    with pytest.raises(ValueError, match="prompts must .* It trains on .* write `data: FILE`"):
        tiny.build_config(SFT, {"prompts": {"data": "pairs.csv"}})
    said = "prompts must be a known key: RLlib's own algorithm trains no language model. Write"
    mixed = {"prompts": {"data": "sums.csv"}, "model": "some/folder", "ref_kl_coeff": 0.1}
    found = problems_in(ppo, **mixed)
    (error,) = map(str, found)
    assert said in error


def test_a_function_that_generates_is_named_in_yaml():
    config = tiny.build_config(
        GRPO,
        {
            "model": "rllib_llm.examples.arithmetic.build_model",
            "env": "rllib_llm/Arithmetic-v0",
            "num_completions": 4,
            "generate_function": f"{__name__}.ppo",
        },
    )
    assert config.generate_function == f"{__name__}.ppo"


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda: GRPOConfig("gpt2"), r"write GRPOConfig\(\).language_model\(model='gpt2'\)"),
        (
            lambda: GRPOConfig().training(1e-5),
            r"training\(\) takes settings by name: write training\(lr=...\)",
        ),
        (lambda: GRPOConfig().environment("a", {}), r"write environment\(env=...\)"),
        (
            lambda: tiny.grpo().multi_agent(policies={"a"}).validate(),
            "policies=.* must be left out: .* One policy is trained",
        ),
        (
            lambda: tiny.grpo().training(model={"fcnet_hiddens": [3]}).validate(),
            "model=.* must be left out: .* The network is a language model",
        ),
    ],
)
def test_mistakes_in_python_name_what_to_write(mistake, said):
    with pytest.raises((ValueError, TypeError), match=said):
        mistake()


def test_an_environment_beside_the_config_of_rows_is_told_as_one():
    _, found = checked_config(SFT, {"env": "rllib_llm/RLHF-v0"}, beside=["env"])
    assert (found[0].name, found[0].remedy) == ("env", "SFT has no environment: leave it out.")
