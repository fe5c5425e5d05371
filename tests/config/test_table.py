"""The table of settings: whatever it says reaches methods, YAML, help and messages."""

from __future__ import annotations

import inspect
import math
import pickle
import pydoc
import re
import types

import numpy as np
import pytest
from ray import tune

import rllib_llm
from rllib_llm.algorithms.generate import GenerateConfig
from rllib_llm.algorithms.grpo import GRPOConfig
from rllib_llm.algorithms.ppo_ptx import PPOPtx, PPOPtxConfig
from rllib_llm.algorithms.registry import ALGORITHMS, get_algorithm_class
from rllib_llm.algorithms.rlhf_config import CriticFreeConfig
from rllib_llm.algorithms.rloo import RLOOConfig
from rllib_llm.algorithms.sft import SFTConfig
from rllib_llm.config.schema import key_problems
from rllib_llm.config.sections import known_names, plain_fields, rllib_table, table
from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.plan import examined
from rllib_llm.shared.errors import KNOWN_KEY, Problems
from rllib_llm.shared.setting import IN_CONFIG
from tests.algorithms import tiny_runs as tiny

CLASSES = [type(get_algorithm_class(name).get_default_config()) for name in ALGORITHMS]


def ids(config_class: type) -> str:
    return config_class.__name__


@pytest.mark.parametrize("config_class", CLASSES, ids=ids)
def test_every_default_is_within_its_own_range(config_class):
    config = config_class()
    for row in table(config_class).values():
        if row.place == IN_CONFIG:
            assert row.problem(row.value(config)) is None


@pytest.mark.parametrize("config_class", CLASSES, ids=ids)
def test_no_setting_of_ours_is_without_a_row(config_class):
    assert not plain_fields(config_class)


@pytest.mark.parametrize("config_class", CLASSES, ids=ids)
def test_every_setting_is_an_argument_of_one_method_and_reaches_the_config(config_class):
    for section in config_class.sections:
        method = getattr(config_class, section.name)
        parameters = inspect.signature(method).parameters
        for row in section.settings:
            if row.name in config_class.ignored_settings:
                continue
            assert row.in_section in parameters, row.name
            made = getattr(config_class(), section.name)(**{row.in_section: row.default})
            assert row.value(made) == row.default


def test_help_has_real_defaults_units_and_ranges():
    text = pydoc.render_doc(PPOPtxConfig.training, renderer=pydoc.plaintext)
    assert "NotProvided" not in text
    # PPO-ptx makes four passes in mini-batches of 32; the base class one over everything.
    assert "num_epochs: int = 4" in text and "minibatch_size: int | None = 32" in text
    assert "num_epochs: int = 1" in pydoc.render_doc(GRPOConfig.training)
    assert "ptx_max_length: How much of each pretraining text is kept (at least 2 tokens)." in text
    assert "ref_kl_coeff" in text and "off_policy_weights is set." in text
    # What an algorithm does not use is not shown.
    assert "vf_clip_param" in text
    assert "vf_clip_param" not in pydoc.render_doc(GRPOConfig.training)
    assert "num_completions: int = 8" in pydoc.render_doc(GRPOConfig.sampling)


def test_the_package_lists_its_configs():
    listed = dir(rllib_llm)
    for config_class in CLASSES:
        assert ids(config_class) in listed
        assert getattr(rllib_llm, ids(config_class)) is config_class


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("beta", "ref_kl_coeff"),
        ("num_generations", "num_completions"),
        ("max_completion_length", "max_new_tokens"),
        ("learning_rate", "lr"),
        ("lr_rate", "lr"),
        ("epsilon", "clip_param"),
        ("epsilon_high", "clip_param_high"),
        ("per_device_train_batch_size", "micro_batch_size"),
        ("max_grad_norm", "grad_clip"),
        ("kl_coeff", "ref_kl_coeff"),
        ("num_sgd_iter", "num_epochs"),
        ("train_batch_size", "train_batch_size_per_learner"),
        ("reward_funcs", "reward_functions"),
    ],
)
def test_names_of_trl_and_of_rllib_s_ppo_are_told_ours(name, here):
    (found,) = key_problems(PPOPtxConfig(), {name: 1})
    assert found.name == name and re.match(f"It is (called )?{here!r} (here|now)", found.remedy)
    if name not in ("train_batch_size", "num_sgd_iter"):  # RLlib's own method takes these
        with pytest.raises(ValueError, match=rf"training\(...\)\.{name} must be a known key."):
            PPOPtxConfig().training(**{name: 1})


def test_all_unknown_keys_are_told_at_once_in_python_dicts_and_yaml():
    wrong = {"max_new_token": 5, "bet": 0.1, "lr": 1e-4, "temprature": 1.0}
    for attempt in (
        lambda: PPOPtxConfig().update_from_dict(wrong),
        lambda: tiny.build_config(PPOPtx, wrong),
        lambda: PPOPtxConfig().sampling(**{k: v for k, v in wrong.items() if k != "lr"}),
    ):
        with pytest.raises(ValueError) as error:
            attempt()
        text = str(error.value)
        assert "max_new_token must be a known key. Did you mean 'max_new_tokens'" in text
        assert "temprature must be a known key. Did you mean 'temperature'" in text
        assert "bet must be a known key" in text and len(error.value.found) == 3


def test_each_unknown_key_is_a_complaint_of_its_own_with_a_remedy_of_its_own():
    wrong = {
        "lrr": 1, "sampling": {"temprature": 1, "topp": 1}, "lora": {"rank": 4, "alfa": 3},
        "rewards": {"scal_scores": 1}, "env": "rllib_llm/RLHF-v0", "model": tiny.MODEL,
        "env_config": {"promts": [], "reference": {"modle": "x"}},
    }  # fmt: skip
    found = examined(Experiment("a", "PPOPtx", config=wrong)).problems
    assert {each.name: each.remedy for each in found if each.rule == KNOWN_KEY} == {
        "a.config.lrr": "Did you mean 'lr' or 'lora'?",
        "a.config.sampling.temprature": "Did you mean 'temperature'?",
        "a.config.sampling.topp": "Did you mean 'top_p' or 'top_k'?",
        "a.config.lora.rank": "Did you mean 'r'?",
        "a.config.lora.alfa": "Did you mean 'alpha'?",
        "a.config.rewards.scal_scores": "Did you mean 'scale_scores'?",
        "a.config.env_config.promts": "Did you mean 'prompts' or 'eval_prompts'?",
        "a.config.env_config.reference.modle": "Did you mean 'model'?",
    }


def test_a_search_space_is_for_the_tuner():
    (found,) = GRPOConfig().training(lr={"grid_search": [1e-6]}).table_problems()
    assert (found.name, found.rule) == ("lr", "be a number of at least 0")
    assert found.remedy.startswith("Give the config to ray.tune.Tuner")  # which has not drawn


def test_a_setting_of_another_section_names_its_method():
    with pytest.raises(ValueError, match=r"temperature must .* It is set in \.sampling\(\.\.\.\)"):
        PPOPtxConfig().training(temperature=0.5)
    with pytest.raises(ValueError, match=r"prompts must .*\.prompts\(data=\.\.\.\)"):
        PPOPtxConfig().training(prompts="p.jsonl")


@pytest.mark.parametrize(
    ("section", "name", "said"),
    [
        (
            "reference",
            "quantization",
            r"\.reference\(model=\{'model': ..., 'quantization': ...\}\)",
        ),
        ("rewards", "weight", r"\.rewards\(model=\{'model': ..., 'weight': ...\}\)"),
    ],
)
def test_what_belongs_into_a_model_s_mapping_is_told_so(section, name, said):
    with pytest.raises(ValueError, match=said):
        getattr(GRPOConfig(), section)(**{name: "int8"})
    with pytest.raises(ValueError, match=said):
        GRPOConfig().update_from_dict({section: {name: "int8"}})


def test_a_model_among_rllib_s_own_settings_is_told_where_it_belongs():
    with pytest.raises(ValueError, match=r"model must be a known key. .* language_model\(model="):
        GRPOConfig().training(model="some/model")


def test_tune_refuses_unknown_settings_before_a_trial_starts():
    # Tune asks every trial's class for its resources, in the driver's process.
    with pytest.raises(ValueError, match="max_new_token must be a known key"):
        PPOPtx.default_resource_request({"max_new_token": 5})


def test_sections_in_yaml_and_python_say_the_same():
    nested = {
        "language_model": {"model": tiny.MODEL},
        "prompts": {"data": "p.jsonl", "max_prompt_len": 8},
        "rewards": {"functions": "m.f", "model": "org/rm", "score_clip": 5.0},
        "reference": {"model": {"quantization": "int8"}, "kl_coeff": 0.1},
        "sampling": {"max_new_tokens": 5},
        "training": {"lr": 1e-3, "ref_kl_target": 6.0},
        "weights": {"keep": 3},
        "learners": {"num_learners": 2, "strategy": "fsdp"},
    }
    by_yaml = PPOPtxConfig().update_from_dict(nested)
    by_python = PPOPtxConfig()
    for section, settings in nested.items():
        getattr(by_python, section)(**settings)
    flat = PPOPtxConfig().update_from_dict({
        "model": tiny.MODEL, "env": "rllib_llm/RLHF-v0", "ref_kl_coeff": 0.1, "lr": 1e-3,
        "env_config": {"prompts": "p.jsonl", "max_prompt_len": 8, "reward_functions": "m.f",
                       "reward_model": "org/rm", "reference": {"quantization": "int8"}},
        "score_clip": 5.0, "max_new_tokens": 5, "ref_kl_target": 6.0, "weights_keep": 3,
        "num_learners": 2, "learner_strategy": "fsdp",
    })  # fmt: skip
    assert by_yaml.to_dict() == by_python.to_dict() == flat.to_dict()
    with pytest.raises(ValueError, match="lr=0.1 is given as well"):
        PPOPtxConfig().update_from_dict({"lr": 0.1, "training": {"lr": 0.2}})
    with pytest.raises(ValueError, match="sampling.temprature must be a known key. Did you"):
        PPOPtxConfig().update_from_dict({"sampling": {"temprature": 0.2}})


@pytest.mark.parametrize(
    ("section", "settings"),
    [("language_model", {"modell": tiny.MODEL}), ("rewards", {"functons": ["m.f"]}),
     ("prompts", {"dta": "p.jsonl"})],
)  # fmt: skip
def test_what_a_misspelt_key_would_have_set_is_not_missed_as_well(section, settings):
    given = {
        "language_model": {"model": tiny.MODEL}, "prompts": {"data": tiny.PROMPTS},
        "rewards": {"functions": f"{tiny.HERE}.num_digits"}, "max_new_tokens": 5,
        section: settings,
    }  # fmt: skip
    found = examined(Experiment("a", "PPOPtx", config=given)).problems
    assert [each.name for each in found] == [f"a.config.{section}.{name}" for name in settings]


def test_an_environment_that_was_named_stays():
    config = PPOPtxConfig().environment("rllib_llm/Reviews-v0").prompts(eval_fraction=0.1)
    assert (config.env, config.env_config) == ("rllib_llm/Reviews-v0", {"eval_fraction": 0.1})


def test_a_batch_smaller_than_the_default_mini_batch_needs_nothing_else():
    config = tiny.ppo(train_batch_size_per_learner=16, minibatch_size=32)
    config.validate()
    assert (config.minibatch_size, PPOPtxConfig().minibatch_size) == (16, 32)


def test_the_loss_of_whole_completions_is_their_mean():
    assert RLOOConfig().loss_reduction == "token_mean"
    assert RLOOConfig().training(policy_loss="rloo").loss_reduction == "sequence_mean"
    assert RLOOConfig().update_from_dict({"policy_loss": "rloo"}).loss_reduction == "sequence_mean"
    chosen = RLOOConfig().training(policy_loss="rloo", loss_reduction="dr_grpo")
    assert chosen.loss_reduction == "dr_grpo"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policy_loss": "gspo"}, "clip_param=0.2 must be smaller .*3e-4.*4e-4"),
        ({"policy_loss": "cispo"}, "clip_param=0.2 must be 1 .*clip_param_high"),
    ],
)
def test_ppo_s_clip_range_under_losses_with_others_warns(settings, said):
    with pytest.warns(UserWarning, match=said):
        tiny.grpo(**settings).validate()


def test_a_config_is_copied_frozen_searched_and_pickled_as_rllib_s():
    config = tiny.ppo(ref_kl_coeff=0.2)
    frozen = config.copy(copy_frozen=True)
    with pytest.raises(AttributeError, match="frozen"):
        frozen.training(lr=1.0)
    assert frozen.copy(copy_frozen=False).training(lr=1.0).lr == 1.0
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()
    again = PPOPtxConfig.from_state(config.get_state())
    assert again.to_dict() == {**config.to_dict(), "class": PPOPtxConfig}  # as RLlib leaves it
    assert PPOPtxConfig().update_from_dict(again.to_dict()).ref_kl_coeff == 0.2
    space = config.training(lr=tune.loguniform(1e-6, 1e-4)).sampling(top_k=tune.choice([0, 5]))
    assert space.to_dict()["lr"].lower == 1e-6


def test_a_subclass_may_add_settings_without_rows_and_with_its_own_method():
    class MineConfig(CriticFreeConfig):
        def __init__(self, algo_class=None):
            super().__init__(algo_class=algo_class)
            self.power = 2.0

        def training(self, *, power=None, **kwargs):
            super().training(**kwargs)
            if power is not None:
                self.power = power
            return self

    config = MineConfig().training(power=3.0, lr=1e-4).update_from_dict({"power": 4.0})
    assert (config.power, config.lr) == (4.0, 1e-4)
    assert "power" in known_names(MineConfig)
    with pytest.raises(ValueError, match="powr must be a known key. Did you mean 'power'"):
        MineConfig().update_from_dict({"powr": 1})


def test_generate_is_a_config_like_the_others():
    config = GenerateConfig().language_model(model=tiny.MODEL).sampling(opening_tokens=4)
    config.validate()
    assert (config.max_new_tokens, config.to_dict()["opening_tokens"]) == (128, 4)
    with pytest.raises(ValueError, match="temprature must .* Did you mean 'temperature'"):
        GenerateConfig().sampling(temprature=1.0)
    with pytest.raises(ValueError, match="lr=0.1 must be left at"):
        GenerateConfig().language_model(model=tiny.MODEL).update_from_dict({"lr": 0.1}).validate()


def test_data_of_a_stage_without_samplers():
    with pytest.raises(ValueError, match="train_dataset must .* It is called 'data' here"):
        SFTConfig().training(train_dataset="x")
    assert not {"num_env_runners", "env", "temperature"} & known_names(SFTConfig)


def test_a_value_without_a_name_is_the_one_that_everybody_means():
    def judge(completions):
        return [0.0 for _ in completions]

    config = GRPOConfig().language_model("org/model").prompts(["1+1="]).rewards(judge)
    assert config.given_model() == "org/model"
    assert config.env_config == {"prompts": ["1+1="], "reward_functions": judge}
    with pytest.raises(TypeError, match=r"one value without a name, which is 'model'"):
        GRPOConfig().language_model("a", "b")
    with pytest.raises(TypeError, match=r"which is 'data'"):
        GRPOConfig().prompts(["a"], data=["b"])


def test_an_attribute_that_nobody_reads_is_told():
    config = tiny.grpo()
    config.num_generations = 16
    told = "GRPOConfig.num_generations must be a known key.*'num_completions'"
    with pytest.warns(UserWarning, match=told):
        config.validate()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("lr", [1, 1e-5, np.float32(0.5)], [True, "1e-5", math.nan, math.inf, None]),
        ("max_new_tokens", [1, np.int64(3)], [0, 1.0, True, "5"]),
        ("scale_scores", [True, np.bool_(True)], [1, "yes", None]),
        ("adam_betas", [(0.9, 0.99), [0.9, 0.99]], [[0.9], np.ones(2), {0.9, 0.99}, "ab"]),
        ("stop_token_ids", [None, [1], (1, 2)], [[True], [1.5], {1}, 1]),
        ("engine_settings", [None, {}, types.MappingProxyType({"a": 1})], [[], "a"]),
        ("learner_timeout_s", ["auto", None, 5], ["soon", 0, -1.0, True]),
        ("policy_loss", ["gspo"], ["GSPO", None, 1]),
    ],
)
def test_a_value_is_checked_strictly_and_its_error_has_fields(name, right, wrong):
    row = table(PPOPtxConfig)[name]
    for value in right:
        assert row.problem(value) is None
    for value in wrong:
        found = row.problem(value)
        assert (found.name, found.value is value) == (name, True)
        assert found.rule.startswith("be ") and found.reason and found.remedy


def test_settings_among_the_arguments_of_a_config_are_told_their_place():
    with pytest.raises(ValueError, match=r"learning_rate must .* called 'lr' here."):
        GRPOConfig(learning_rate=1e-5)
    with pytest.raises(ValueError, match=r"num_completions must be a known key"):
        GRPOConfig(num_completions=4)
    assert GRPOConfig(algo_class=None).copy().lr == GRPOConfig().lr


@pytest.mark.parametrize("name", ["entropy_coeff", "rejection_lower", "rejection_upper"])
def test_minus_one_is_refused_with_its_reason_and_a_value_that_means_the_same(name):
    """RLlib drops -1 where a config is stored or handed over; its neighbour is kept."""
    with pytest.raises(Problems) as error:
        tiny.build_config(PPOPtx, {"model": str(tiny.MODEL), name: -1.0}, "ppo.config")
    assert (error.value.problem.name, error.value.problem.value) == (f"ppo.config.{name}", -1.0)
    assert "RLlib takes -1 as 'not given'" in error.value.problem.reason
    remedy = re.search(r"-1\.\d+", error.value.problem.remedy)
    row = table(PPOPtxConfig)[name]
    assert row.problem(float(remedy[0])) is None and row.problem(-1.5) is None


@pytest.mark.parametrize(
    "name", ["temperature", "gamma", "lr", "ref_kl_coeff", "missing_eos_penalty"]
)
def test_minus_one_is_out_of_range_where_no_negative_value_has_a_meaning(name):
    error = table(PPOPtxConfig)[name].problem(-1)
    assert error.rule == table(PPOPtxConfig)[name].problem(-2).rule
    assert "RLlib" not in error.reason


def test_a_misspelt_choice_is_told_the_nearest():
    assert table(PPOPtxConfig)["schedule"].problem("fre").remedy == "Did you mean 'free'?"
    assert table(PPOPtxConfig)["schedule"].problem("fast").remedy == "Write 'lockstep', its default"


def test_false_is_told_how_a_setting_is_left_out():
    for name in ("tools", "reference", "reward_model"):
        error = table(PPOPtxConfig)[name].problem(False)
        assert error.remedy == "Leave it out"
        assert error.rule.endswith("or None")


def test_callbacks_are_functions_or_several_of_them():
    error = rllib_table(PPOPtxConfig)["callbacks_on_train_result"].problem(3)
    assert error.rule == "be a function (in YAML its dotted path), a list, a tuple or None"
    assert table(PPOPtxConfig)["adam_betas"].problem(3).rule == "be a pair of numbers"


@pytest.mark.parametrize("config, name, said", [
    (GRPOConfig, "sample", "Did you mean 'oversample' or 'sampling' or 'num_completions'?"),
    (GRPOConfig, "learning_rate", "It is called 'lr' here."),
    (GRPOConfig, "bulid_algo", "Did you mean 'build_algo'?"),
    (GRPOConfig, "num_workers", "It is 'num_env_runners' now."),
    (SFTConfig, "sampling",
     "It is for PPOPtx, GRPO, RLOO, ReinforcePP, Distillation and Generate: leave"),
    (SFTConfig, "wandb",
     "Its sections are language_model, training, learners, fault_tolerance, experts, framework, "),
])  # fmt: skip
def test_an_attribute_that_is_not_there_is_told_with_what_resembles_it(config, name, said):
    with pytest.raises(AttributeError) as error:
        getattr(config(), name)
    start = f"{config.__name__} has no attribute {name!r}. "
    assert str(error.value).startswith(start + said)
    assert not hasattr(config(), name)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: GRPOConfig({"lr": 1}),
            r"takes no settings. Write GRPOConfig\(\).update_from_dict",
        ),
        (lambda: GRPOConfig.environment("a"), r"write GRPOConfig\(\).environment\(...\)"),
        (lambda: GRPOConfig.environment(env="a"), r"write GRPOConfig\(\).environment\(...\)"),
        (
            lambda: GRPOConfig().train(),
            r"Make the algorithm first: config.build_algo\(\).train\(\)",
        ),
        (lambda: GRPOConfig().fit(), r"ray.tune.Tuner\(NAME, param_space=config\).fit\(\)"),
    ],
)
def test_a_call_of_something_else_than_a_config_is_told_what_to_write(call, said):
    with pytest.raises((Problems, TypeError, AttributeError), match=said):
        call()


@pytest.mark.parametrize("space", [tune.choice([1e-5, 1e-4]), tune.grid_search([1e-5, 1e-4])])
def test_a_search_space_in_one_algorithm_is_told_who_takes_it(space):
    config = GRPOConfig().language_model(model="a.b").training(lr=space)
    with pytest.raises(Problems, match="ray.tune.Tuner, which draws") as raised:
        config.validate()
    assert " at 0x" not in str(raised.value)
