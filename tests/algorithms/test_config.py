"""Settings: each wrong one is refused with value, rule, reason and remedy; none gets lost."""

from __future__ import annotations

import inspect
import re
import traceback

import pytest
import yaml
from ray import tune
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_llm.algorithms.ppo_ptx import PPOPtxConfig
from rllib_llm.algorithms.registry import ALGORITHMS, get_algorithm_class
from rllib_llm.algorithms.reinforce_pp import ReinforcePPConfig
from rllib_llm.algorithms.rlhf_config import RLHFConfig
from rllib_llm.algorithms.sft import SFTConfig
from rllib_llm.algorithms.supervised import Supervised, SupervisedConfig
from rllib_llm.config.schema import allowed_keys
from rllib_llm.data.texts import TextSource
from rllib_llm.learners.supervised_learners import SFTLearner
from rllib_llm.modules.rl_modules import CausalLMModule
from rllib_llm.rollouts.env_runner import RLHFEnvRunner
from rllib_llm.shared.errors import Problems
from rllib_llm.shared.messages import VERBOSE
from rllib_llm.shared.setting import Section, Settings, setting
from tests.algorithms import tiny_runs as tiny

CONFIGS = {
    "ppo": tiny.ppo,
    "grpo": tiny.grpo,
    "rloo": tiny.rloo,
    "sft": tiny.sft,
    "reward_model": tiny.reward_model,
    "reinforce_pp": lambda **settings: tiny._rlhf(ReinforcePPConfig(), **settings),
}

ON_ONE_GPU = {"weights_transport": "cuda_ipc", "num_env_runners": 1, "num_learners": 1,
              "num_gpus_per_learner": 0.5, "num_gpus_per_env_runner": 0.25}  # fmt: skip

WRONG = [
    ("ppo", {"pretrained_model": None}, "model must be a Hugging Face folder"),
    ("ppo", {"lr": -1e-3}, "lr=-0.001 must be a number of at least 0"),
    ("ppo", {"lr": [[0, 1e-3], [10, 0.0]]}, r"lr=\[.*must be .*: .*lr_schedule"),
    ("ppo", {"lr_schedule": "cubic"}, "lr_schedule='cubic' must be one of"),
    ("ppo", {"lr_schedule": "linear"}, "lr_num_updates=None must be the optimiser updates"),
    ("ppo", {"num_epochs": 0}, "num_epochs=0 must be a whole number of at least 1"),
    ("ppo", {"micro_batch_size": 2, "micro_batch_tokens": 64},
     "micro_batch_size=2 must be None while micro_batch_tokens=64"),
    ("ppo", {"minibatch_size": 13}, "minibatch_size=13 must be at most train_batch_size_per_learn"),
    ("ppo", {"critic": "none"}, "critic='none' must be 'shared' or 'separate': PPO's advantages"),
    ("ppo", {"critic": "twin"}, "critic='twin' must be one of"),
    ("ppo", {"ptx_coeff": -1.0}, "ptx_coeff=-1.0 must be a number of at least 0"),
    ("ppo", {"ptx_coeff": 0.5}, "ptx_data=None must be given with ptx_coeff=0.5"),
    ("ppo", {"temperature": 0.0},
     "temperature=0.0 must be a number above 0: logits are divided by it. To sample greedily"),
    ("ppo", {"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number of at least 1"),
    ("ppo", {"min_new_tokens": 6}, "min_new_tokens=6 must be within 0 and max_new_tokens=5"),
    ("ppo", {"top_p": 1.5},
     "top_p=1.5 must be a number above 0 and at most 1: it is a probability mass"),
    ("ppo", {"top_k": -5}, "top_k=-5 must be a whole number of at least 0"),
    ("ppo", {"stop_token_ids": 2}, "stop_token_ids=2 must be a list of token ids"),
    ("ppo", {"stop_token_ids": ["</s>"]}, "stop_token_ids=.*must be a list of token ids"),
    ("ppo", {"stop_token_ids": [2, 2]}, r"stop_token_ids=\(2, 2\) must be distinct"),
    ("ppo", {"sampling_batch_size": 0},
     "sampling_batch_size=0 must be a whole number of at least 1"),
    ("ppo", {"gamma": 1.5}, r"gamma=1.5 must be a number of at least 0 and at most 1"),
    ("ppo", {"lambda_": float("nan")}, r"lambda_=nan must be a number of at least 0 and at most 1"),
    ("ppo", {"minibatch_size": 0}, "minibatch_size=0 must be a whole number of at least 1"),
    ("ppo", {"micro_batch_tokens": 0}, "micro_batch_tokens=0 must be a whole number of at least 1"),
    ("ppo", {"weight_decay": -0.1}, "weight_decay=-0.1 must be a number of at least 0"),
    ("ppo", {"grad_clip": 0.0}, "grad_clip=0.0 must be a number above 0"),
    ("ppo", {"ptx_batch_size": 0}, "ptx_batch_size=0 must be a whole number of at least 1"),
    ("ppo", {"ptx_max_length": 1}, "ptx_max_length=1 must be a whole number of at least 2"),
    ("sft", {"max_length": 0}, "max_length=0 must be a whole number of at least 2"),
    ("reward_model", {"center_rewards_coeff": -1.0}, "center_rewards_coeff=-1.0 must be a number"),
    ("ppo", {"ref_kl_coeff": -0.1}, "ref_kl_coeff=-0.1 must be a number of at least 0"),
    ("ppo", {"ref_kl_in": "advantage"}, "ref_kl_in='advantage' must be one of"),
    ("ppo", {"ref_kl_estimator": "k4"}, "ref_kl_estimator='k4' must be"),
    ("ppo", {"policy_loss": "a2c"}, "policy_loss='a2c' must be one of"),
    ("ppo", {"loss_reduction": "sum"}, "loss_reduction='sum' must be one of"),
    ("ppo", {"off_policy_weights": "clip"}, "off_policy_weights='clip' must be one of"),
    ("ppo", {"off_policy_level": "row"}, "off_policy_level='row' must be one of"),
    ("ppo", {"clip_param": "wide"}, "clip_param='wide' must be a number of at least 0"),
    ("ppo", {"clip_param": -0.1}, "clip_param=-0.1 must be a number of at least 0"),
    ("ppo", {"lambda_": 1.5}, r"lambda_=1.5 must be a number of at least 0 and at most 1"),
    ("ppo", {"ref_kl_target": 0.0},
     "ref_kl_target=0.0 must be a number of nats per completion above 0"),
    ("ppo", {"target_kl": -1e-3}, "target_kl=-0.001 must be a number of nats per token above 0"),
    ("ppo", {"missing_eos_penalty": -1.0},
     "missing_eos_penalty=-1.0 must be a number of at least 0"),
    ("grpo", {"overlong_buffer": 6}, "overlong_buffer=6 must be in 0..max_new_tokens=5"),
    ("grpo", {"dual_clip": 1.0}, "dual_clip=1.0 must be a number above 1"),
    ("grpo", {"dual_clip": 3.0, "policy_loss": "cispo"}, "dual_clip=3.0 must be .* None with pol"),
    ("grpo", {"off_policy_upper": float("nan")},
     "off_policy_upper=nan must be a number abo"),
    ("ppo", {"num_completions": 0}, "num_completions=0 must be a whole number of at least 1"),
    ("grpo", {"num_completions": 1}, "num_completions=1 must be at least 2: the baseline is"),
    ("grpo", {"num_completions": 5},
     r"train_batch_size_per_learner=12 must be such that all learners' rows \(12\) are a multiple "
     "of num_completions=5.* Use 10"),
    ("grpo", {"critic": "shared"}, "critic='shared' must be 'none': advantages come from the grou"),
    ("rloo", {"critic": "separate"}, "critic='separate' must be 'none'"),
    ("ppo", {"weights_keep": 0},
     "weights_keep=0 must be a whole number of at least 1: receivers ask"),
    ("ppo", {"weights_transport": "nccl"}, "weights_transport='nccl' must be one of"),
    ("ppo", {"weights_transport": "no_such_package:make"}, "'nixl'\\) or a dotted path"),
    ("ppo", {"weights_transport": "tests.scripted_server:no_such_name", "num_env_runners": 1},
     "must name something in 'tests.scripted_server'"),
    ("ppo", {"weights_transport": "tests.scripted_server:__doc__", "num_env_runners": 1},
     "weights_transport='tests.scripted_server:__doc__' must be a class or a function that makes"),
    ("ppo", {"weights_transport": "tests.scripted_server:serving"},
     "num_env_runners=0 must be above 0 with weights_transport='tests.scripted_server:serving'"),
    ("ppo", {"weights_transport": "cuda_ipc"},
     "num_env_runners=0 must be above 0 with weights_transport='cuda_ipc'"),
    ("ppo", {"weights_transport": "nixl"},
     "num_env_runners=0 must be above 0 with weights_transport='nixl'"),
    ("ppo", {"weights_transport": "nixl", "num_env_runners": 1, "engine": "vllm"},
     "engine='vllm' must be 'torch' with weights_transport='nixl'"),
    ("ppo", {"weights_name": "run", "serve": {"api_keys": "k"}},
     r"serve.api_keys=... must be left out: a run's settings are written to its files"),
    ("ppo", {**ON_ONE_GPU, "num_gpus_per_learner": 0}, "num_gpus_per_learner=0 must be above 0"),
    ("ppo", {**ON_ONE_GPU, "num_gpus_per_env_runner": 0}, "num_gpus_per_env_runner=0 must be abo"),
    ("ppo", {**ON_ONE_GPU, "weights_checksum": True}, "weights_checksum=True must be False with"),
    ("ppo", {**ON_ONE_GPU, "weights_name": "run"}, "weights_name='run' must be None with"),
    ("ppo", {**ON_ONE_GPU, "num_learners": 2, "learner_strategy": "fsdp"},
     "learner_strategy='fsdp' must be 'ddp' with"),
    ("ppo", {"max_new_tokens": None}, "max_new_tokens=None must be a whole number of at least 1"),
    ("ppo", {"max_new_tokens": 4.5}, "max_new_tokens=4.5 must be a whole number of at least 1"),
    ("ppo", {"num_epochs": True}, "num_epochs=True must be a whole number of at least 1"),
    ("ppo", {"whiten_advantages": "yes"}, "whiten_advantages='yes' must be True or False"),
    ("ppo", {"entropy_coeff": [[0, 0.1], [9, 0]]},
     r"entropy_coeff=\[.*must be a number: .*schedul"),
    ("ppo", {"seed": 1.5},
     "seed=1.5 must be a whole number of at least 0 and at most 4294967295 or None: it is the"),
    ("ppo", {"num_env_runners": None},
     "num_env_runners=None must be a whole number of at least 0: it says how"),
    ("ppo", {"num_learners": 1.5}, "num_learners=1.5 must be a whole number"),
    ("ppo", {"evaluation_num_env_runners": None}, "evaluation_num_env_runners=None must be a who"),
    ("sft", {"evaluation_interval": 0.5},
     "evaluation_interval=0.5 must be a whole number of at least 0 or None"),
    ("ppo", {"evaluation_duration": "auto"}, "evaluation_duration='auto' must be a whole number"),
    ("ppo", {"explore": "no"}, "explore='no' must be True or False"),
    ("ppo", {"explore": False}, "explore=False must be True: training samples .* top_k: 1"),
    ("ppo", {"dtype": "float16"}, "dtype='float16' must be one of .*mixed_precision='bf16', or"),
    ("ppo", {"temperature": 0}, "temperature=0 must be a number above 0.*greedily, set top_k: 1"),
    ("ppo", {"adam_betas": [0.9]}, r"adam_betas=\[0.9\] must be a pair of numbers"),
    ("ppo", {"learner_timeout_s": "soon"},
     "learner_timeout_s='soon' must be a number of seconds above 0, 'auto' or None"),
    ("ppo", {"train_batch_size": 64}, "train_batch_size=64 must be left at 32.*acts on nothing in "
     "PPOPtx. It is called 'train_batch_size_per_learner' here"),
    ("grpo", {"num_envs_per_env_runner": 4}, "num_envs_per_env_runner=4 must be left at 1"),
    ("grpo", {"rollout_fragment_length": 4}, "rollout_fragment_length=4 must be left at 200"),
    ("ppo", {"shuffle_batch_per_epoch": True}, "shuffle_batch_per_epoch=True must be left at Fal"),
    ("ppo", {"evaluation_parallel_to_training": True}, "evaluation_parallel_to_training=True must"),
    ("sft", {"num_env_runners": 2}, "num_env_runners=2 must be left at 0.*acts on nothing in SFT"),
    ("rloo", {"policy_loss": "rloo", "loss_reduction": "token_mean"},
     "loss_reduction='token_mean' must be 'sequence_mean' with policy_loss='rloo'"),
    ("reinforce_pp", {"critic": "shared"},
     "critic='shared' must be 'none': .*would not be trained"),
    ("sft", {"data": None}, "data must be a data set"),
    ("sft", {"evaluation_interval": 1}, "eval_data=None must be given with evaluation_interval=1"),
    ("sft", {"loss_on": "prompt"}, "loss_on='prompt' must be one of"),
    ("reward_model", {"data": None}, "data must be a data set"),
]  # fmt: skip


@pytest.mark.parametrize("name, settings, said", WRONG)
def test_a_wrong_setting_is_refused(name, settings, said):
    config = CONFIGS[name]().update_from_dict(settings)
    if {"micro_batch_size", "micro_batch_tokens"} <= settings.keys():
        config.micro_batch_tokens = settings["micro_batch_tokens"]
    with pytest.raises(ValueError, match=said) as caught:
        config.validate()
    assert str(caught.value).endswith(".")  # the remedy is a sentence


@pytest.mark.parametrize("name", CONFIGS)
def test_the_settings_used_in_these_tests_are_right(name):
    config = CONFIGS[name]()
    config.validate()
    assert config.algo_class.get_default_config().__class__ is type(config)


def test_rows_that_python_cannot_copy_are_refused():
    """They ended in Ray's RecursionError, which names nothing."""
    deep = "x"
    for _ in range(700):
        deep = [deep]
    config = tiny.grpo().environment(env_config={"prompts": [{"prompt": "1+2=", "deep": deep}]})
    for end in (config.build_algo, lambda: tune.Tuner("GRPO", param_space=config)):
        with pytest.raises(Problems, match="^env_config.prompts must hold values that Python"):
            end()


def test_an_algorithm_is_built_by_the_arguments_of_rllib():
    """`use_copy` by place was a TypeError."""
    ours, theirs = (inspect.signature(each.build_algo) for each in (RLHFConfig, AlgorithmConfig))
    assert [*ours.parameters] == [*theirs.parameters]
    algorithm = tiny.grpo().build_algo(None, False)
    assert algorithm.config.num_completions == 3
    algorithm.stop()


def test_rlhf_needs_an_environment():
    with pytest.raises(ValueError, match=r"env must be an environment's name or class"):
        PPOPtxConfig().language_model(model=tiny.MODEL).validate()


def test_an_environment_that_nobody_registered_is_refused():
    with pytest.raises(ValueError, match="env='Nobody-v1' must be one of .*rllib_llm/RLHF-v0"):
        PPOPtxConfig().environment("Nobody-v1").language_model(model=tiny.MODEL).validate()


# What RLlib writes down in a form of its own, and what has no equality.
NOT_COMPARED = {"algo_class", "policies", "stats_cls_lookup", "observation_space", "action_space"}


def fields(config):
    return {
        name: value
        for name, value in vars(config).items()
        if not name.startswith("_") and name not in NOT_COMPARED
    }


def test_weights_may_stay_on_a_gpu_that_learner_and_samplers_share():
    tiny.ppo().update_from_dict(ON_ONE_GPU).validate()


def test_weights_may_go_directly_between_processes_without_a_gpu():
    tiny.ppo().update_from_dict({"weights_transport": "nixl", "num_env_runners": 1}).validate()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_dict_keeps_every_field(name):
    config = CONFIGS[name](weight_decay=0.1, adam_betas=(0.8, 0.9), micro_batch_size=3,
                           lr_schedule="cosine", lr_num_updates=10)  # fmt: skip
    again = type(config)().update_from_dict(config.to_dict())
    config.validate()
    again.validate()
    assert fields(again) == fields(config)
    assert again.micro_batch_tokens is None


def test_what_python_says_yaml_says():
    settings = yaml.safe_load(
        f"""
        model: {tiny.MODEL}
        env: rllib_llm/RLHF-v0
        env_config: {{reward_functions: {tiny.HERE}.num_digits, max_prompt_len: 8}}
        num_completions: 2
        top_k: 5
        max_new_tokens: 5
        train_batch_size_per_learner: 8
        micro_batch_size: 4
        minibatch_size: 4
        lambda: 0.9
        lr: 0.001
        critic: separate
        ref_kl_target: 6.0
        """
    )
    by_yaml = PPOPtxConfig().update_from_dict(settings)
    by_python = (
        PPOPtxConfig()
        .language_model(model=tiny.MODEL)
        .environment("rllib_llm/RLHF-v0",
                     env_config={"reward_functions": f"{tiny.HERE}.num_digits",
                                 "max_prompt_len": 8})
        .sampling(num_completions=2, top_k=5, max_new_tokens=5)
        .training(train_batch_size_per_learner=8, micro_batch_size=4, minibatch_size=4,
                  lambda_=0.9, lr=0.001, critic="separate", ref_kl_target=6.0)
    )  # fmt: skip
    by_yaml.validate()
    by_python.validate()
    assert fields(by_yaml) == fields(by_python)
    assert by_yaml.pretrained_model == tiny.MODEL


def test_rows_of_an_iteration_are_those_of_all_learners():
    config = tiny.grpo(train_batch_size_per_learner=6).learners(num_learners=2)
    config.validate()
    assert config.total_train_batch_size == 12
    assert config.num_prompts_per_iteration == 4
    # 5 + 5 rows are no multiple of 3, though neither learner is asked alone.
    config = tiny.grpo(train_batch_size_per_learner=5, minibatch_size=5).learners(num_learners=2)
    with pytest.raises(ValueError, match=r"rows \(10\) are a multiple of num_completions=3"):
        config.validate()


@pytest.mark.parametrize(
    "name", ["PPOPtx", "GRPO", "RLOO", "ReinforcePP", "SFT", "RewardModel", "DPO"]
)
def test_every_algorithm_is_known_by_name(name):
    assert name in ALGORITHMS
    algorithm = get_algorithm_class(name)
    assert algorithm.__name__ == name
    assert algorithm.get_default_config().algo_class is algorithm


def test_an_unknown_algorithm_is_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match="PPOPtx"):
        get_algorithm_class("PPOPTX2")


def test_a_mistake_in_a_script_is_told_without_the_places_inside(monkeypatch):
    monkeypatch.delenv(VERBOSE, raising=False)
    config = tiny.grpo().sampling(temperature=0.0)
    with pytest.raises(ValueError, match="temperature=0.0 must be") as short:
        config.copy().build_algo()
    assert len(traceback.extract_tb(short.value.__traceback__)) <= 5
    monkeypatch.setenv(VERBOSE, "1")
    with pytest.raises(ValueError, match="temperature=0.0 must be") as whole:
        config.copy().build_algo()
    assert traceback.extract_tb(whole.value.__traceback__)[-1].name == "report"


def test_an_algorithm_in_other_letters_is_suggested():
    with pytest.raises(Problems) as caught:
        get_algorithm_class("grpo")
    assert caught.value.problem.remedy == "Did you mean 'GRPO' or 'PPO'?"


def test_an_algorithm_whose_module_is_not_there_is_blamed_for_it():
    with pytest.raises(Problems, match="run='no_such:Mine' .* no module 'no_such'"):
        get_algorithm_class("no_such:Mine")


def text_source(data, **settings):
    return TextSource(data, loss_on="all", **settings)


class OwnSFTConfig(SupervisedConfig):
    """A stage of its own that names its module by class, its learner by path, a plain function."""

    source_class = text_source
    module_path = CausalLMModule
    learner_path = "rllib_llm.learners.supervised_learners:SFTLearner"


class OwnSFT(Supervised):
    config_class = OwnSFTConfig


def test_classes_of_one_s_own_are_named_by_class_path_or_function():
    config = OwnSFT.get_default_config().language_model(model=tiny.MODEL)
    config.training(data=tiny.TEXTS).validate()
    assert config.get_default_learner_class() is SFTLearner
    assert config.get_default_rl_module_spec().module_class is CausalLMModule
    rows = config.make_source(
        tiny.TEXTS, tokenizer=config.load_tokenizer(), max_length=8, shuffle=False
    ).batch(0, 2)
    assert {len(column) for column in rows.values()} == {2}


def test_a_wrong_path_in_a_config_of_one_s_own_is_found_before_a_run():
    mine = type("Mine", (tiny.GRPOConfig,), {"learner_path": "rllib_llm.learners.nowhere.Mine"})
    config = mine().language_model(model=tiny.MODEL).environment("rllib_llm/Arithmetic-v0")
    with pytest.raises(Problems, match="Mine.learner_path='rllib_llm.learners.nowhere.Mine'"):
        config.validate()


class OwnRunner(RLHFEnvRunner):
    """A sampler of one's own."""


class OwnRunnerConfig(tiny.GRPOConfig):
    """A config whose samplers are of its own class where none is given."""

    def get_default_env_runner_class(self):
        return OwnRunner


@pytest.mark.parametrize("config, runner", [
    (tiny.GRPOConfig, RLHFEnvRunner), (OwnRunnerConfig, OwnRunner),
    (lambda: tiny.GRPOConfig().env_runners(env_runner_cls=OwnRunner), OwnRunner),
])  # fmt: skip
def test_a_built_algorithm_names_the_class_of_its_samplers(config, runner):
    with tiny.built(tiny._rlhf(config()).sampling(num_completions=3)) as built:
        assert built.config.env_runner_cls is type(built.env_runner) is runner


def test_a_class_that_nobody_would_ask_for_its_module_is_refused():
    with pytest.raises(Problems, match="Mine.module_class must be called module_path: "):
        type("Mine", (tiny.GRPOConfig,), {"module_class": lambda self: CausalLMModule})


@pytest.mark.parametrize("missing, of", [
    ("learner_path", SupervisedConfig), ("learner_path", RLHFConfig),
    ("module_path", SFTConfig), ("source_class", SFTConfig), ("algo_class", RLHFConfig),
])  # fmt: skip
def test_what_a_class_of_one_s_own_lacks_is_named(missing, of):
    given = {"learner_path": SFTConfig.learner_path, "module_path": SFTConfig.module_path}
    mine = type("Mine", (of,), {**given, missing: None})
    algorithm = type("MyAlgorithm", (Supervised,), {"config_class": mine})
    config = mine(None if missing == "algo_class" else algorithm)
    config.language_model(model=tiny.MODEL)
    if of is not RLHFConfig:
        config.training(data=tiny.TEXTS)
    with pytest.raises(Problems, match=f"Mine.{missing} must be .*: .*(Set|Give)"):
        if missing == "source_class":
            config.make_source(tiny.TEXTS, tokenizer=None)
        else:
            config.build_algo()


def test_an_algorithm_of_other_configs_is_refused():
    config = type("Mine", (SupervisedConfig,), {})(OwnSFT).language_model(model=tiny.MODEL)
    with pytest.raises(Problems, match="Mine.algo_class=.*OwnSFT.*not of OwnSFTConfig: .*Set"):
        config.build_algo()


def test_an_algorithm_without_a_config_class_says_so():
    with pytest.raises(Problems, match="Mine.config_class must be a subclass of Lang"):
        type("Mine", (Supervised,), {}).get_default_config()


def test_names_of_peers_may_be_a_tuple():
    class Own(Settings):
        beta: float = setting(0.1, "a weight", also=("kl_beta", "b"), trl="beta")

    row = Section.of("training", Own).settings[0]
    assert row.also == ("kl_beta", "b") and row.trl == ("beta",)


@pytest.mark.parametrize("name", ["KTO", "IPO", "SimPO", "Dr.GRPO", "GSPO", "CISPO", "DAPO"])
def test_a_variant_is_told_as_the_settings_that_it_is(name):
    with pytest.raises(ValueError, match="Write `run: ") as raised:
        get_algorithm_class(name)
    lines = re.findall(r"`([^`]+)`", raised.value.problem.remedy)
    run, *settings = [yaml.safe_load(line) for line in lines]
    given = {key: value for each in settings for key, value in each.items()}
    assert allowed_keys(get_algorithm_class(run["run"]).get_default_config()) >= given.keys()
