"""Settings that do nothing say so; those that do are silent."""

from __future__ import annotations

import warnings

import pytest

from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs


@pytest.mark.parametrize(
    "make, settings, name",
    [
        (tiny_runs.grpo, {"off_policy_weights": "mask"}, "off_policy_weights"),
        (tiny_runs.ppo, {"off_policy_upper": 5.0}, "off_policy_upper"),
        (tiny_runs.ppo, {"off_policy_level": "sequence"}, "off_policy_level"),
        (tiny_runs.ppo, {"rejection": "k3", "rejection_upper": 0.1}, "rejection"),
        (tiny_runs.ppo, {"off_policy": "bypass", "off_policy_upper": 5.0}, "off_policy_upper"),
        (tiny_runs.ppo, {"ref_kl_in": "loss", "ref_kl_unbiased": False}, "ref_kl_in"),
        (
            tiny_runs.grpo,
            {"ref_kl_estimator": "k1", "ref_kl_unbiased": False},
            "ref_kl_estimator",
        ),
        (tiny_runs.ppo, {"ref_kl_horizon": 500.0}, "ref_kl_horizon"),
        (tiny_runs.ppo, {"ref_kl_coeff": 0.0, "ref_kl_target": 6.0}, "ref_kl_target"),
        (tiny_runs.ppo, {"ref_kl_unbiased": False}, "ref_kl_unbiased"),
        (tiny_runs.grpo, {"ref_kl_coeff": 0.0, "ref_kl_unbiased": False}, "ref_kl_unbiased"),
        (tiny_runs.ppo, {"critic_model": "m.f"}, "critic_model"),
        (tiny_runs.grpo, {"vf_loss_coeff": 1.0}, "vf_loss_coeff"),
        (tiny_runs.grpo, {"lambda_": 0.9}, "lambda_"),
        (tiny_runs.rloo, {"scale_by_std": False}, "scale_by_std"),
        (tiny_runs.ppo, {"drop_zero_variance_groups": True}, "drop_zero_variance_groups"),
        (tiny_runs.sft, {"lr_num_updates": 10}, "lr_num_updates"),
    ],
)
def test_a_setting_without_effect_warns(make, settings, name):
    with pytest.warns(UserWarning, match=rf"^{name}=.* has no effect .*\. .+\.$"):
        make(**settings).validate()


def test_an_evaluation_s_own_config_does_not_warn_again():
    config = tiny_runs.grpo().env_runners(num_env_runners=1)
    config.streaming(max_staleness=2, schedule="free", in_flight="recompute", window=4)
    config.training(off_policy="decoupled").evaluation(evaluation_interval=2)
    config.validate()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        config.get_evaluation_config_object().validate()  # its samplers are in this process


def test_what_evaluation_alone_sets_without_effect_warns_once():
    config = tiny_runs.grpo().evaluation(
        evaluation_interval=1, evaluation_config={"lr_num_updates": 7, "temperature": 0.5}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config.validate()
        config.get_evaluation_config_object().validate()
    (told,) = [str(warning.message) for warning in caught if "no effect" in str(warning.message)]
    assert told.startswith("evaluation_config.lr_num_updates=7 has no effect with lr_schedule=")
    same = tiny_runs.grpo().evaluation(
        evaluation_interval=1, evaluation_config={"lr_num_updates": None}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.validate()


@pytest.mark.parametrize("setting", [{"pass_on": "correct"}, {"answer_pattern": "x"}])
def test_what_passes_warns_where_nobody_asks_for_pass_at(setting):
    (name,) = setting
    with pytest.warns(UserWarning, match=rf"^{name}=.* has no effect without pass_at\."):
        tiny_runs.grpo().sampling(**setting).validate()
    for asked in (
        {"pass_at": [1]},
        {"evaluation_interval": 1, "evaluation_config": {"pass_at": [1]}},
        {"evaluation_interval": 1, "eval_envs": {"hard": {"pass_at": [1]}}},
    ):
        config = tiny_runs.grpo().sampling(**setting)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            config.update_from_dict(asked).validate()


def test_shards_of_one_learner_warn():
    with pytest.warns(UserWarning, match="learner_strategy='fsdp' has no effect"):
        tiny_runs.ppo().learners(strategy="fsdp").validate()


@pytest.mark.parametrize(
    "make, settings",
    [
        (
            tiny_runs.ppo,
            {
                "off_policy": "decoupled",
                "off_policy_weights": "mask",
                "off_policy_upper": 5.0,
            },
        ),
        (tiny_runs.ppo, {"ref_kl_target": 6.0, "ref_kl_horizon": 500.0}),
        (tiny_runs.grpo, {"ref_kl_unbiased": False, "scale_by_std": False}),
        (tiny_runs.grpo, {"ref_kl_estimator": "k1"}),
        (tiny_runs.rloo, {"whiten_advantages": True}),
        (tiny_runs.sft, {"lr_schedule": "cosine", "lr_num_updates": 10}),
        (tiny_runs.reward_model, {}),
    ],
)
def test_a_setting_with_effect_is_silent(make, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(**settings).validate()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"quantization": "nf4"}, "quantization='nf4' must be 'none' without lora"),
        ({"quantization": "int3", "lora": {}}, "quantization='int3' must be"),
        ({"dtype": "float16"}, r"dtype='float16' must be one of \('float32', 'bfloat16'\)"),
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16' must be one of .'bf16', 'auto'"),
        ({"mixed_precision": "bf16", "dtype": "bfloat16"}, "mixed_precision='bf16' must be None"),
        ({"lora": {"rank": 3}}, "lora.rank must be a known key. Did you mean 'r'"),
    ],
)
def test_precision_and_adapters_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        tiny_runs.grpo().language_model(**settings).validate()


def test_other_combinations_are_refused():
    quantised = tiny_runs.grpo().language_model(lora={}, quantization="int8")
    with pytest.raises(ValueError, match="learner_strategy='fsdp' must be 'ddp'"):
        quantised.learners(strategy="fsdp", num_learners=2).validate()
    with pytest.raises(ValueError, match="lora=.* must be None in this stage"):
        tiny_runs.reward_model().language_model(lora={}).validate()
    config = tiny_runs.ppo()
    config.micro_batch_size = 4
    with pytest.raises(ValueError, match="micro_batch_size=4 must be None while micro_batch_token"):
        config.validate()
    with pytest.raises(ValueError, match="grad_clip_by='norm' must be"):
        tiny_runs.sft(grad_clip_by="norm").validate()


@pytest.mark.parametrize("settings, place", [
    ({"place": "learner"}, "learner"), ({"lora": {}}, "policy"),
])  # fmt: skip
@pytest.mark.parametrize("reference", ["some.other_model", {"quantization": "int8"}])
def test_a_reference_that_nobody_asks_is_refused(settings, place, reference):
    """The learner's reference is the model that training starts from, whatever this one is."""
    config = tiny_runs.grpo().reference(model=reference, place=settings.get("place"))
    config.language_model(lora=settings.get("lora"))
    with pytest.raises(Problems, match=f"^env_config.reference=.* must be None .* {place}: "):
        config.validate()
    config.reference(place="environment").validate()
    config.reference(place=None, kl_coeff=0.0).validate()  # then it is measured only
    config.reference(kl_coeff=0.1)
    config.env = "my_package:Env"  # whose `reference` may be anything
    config.reference(place=settings.get("place")).validate()


def test_yaml_names_are_the_attributes():
    config = tiny_runs.ppo().update_from_dict(
        {
            "lora": {"r": 2},
            "quantization": "int8",
            "mixed_precision": "bf16",
            "gradient_checkpointing": True,
            "learner_strategy": "ddp",
            "reference_in": "policy",
            "micro_batch_size": 2,
        }
    )
    config.validate()
    assert config.lora == {"r": 2} and config.micro_batch_tokens is None
    assert config.reference_place == "policy"


@pytest.mark.parametrize("section, name", [
    ("learners", "learner_connector"), ("env_runners", "env_to_module_connector"),
    ("env_runners", "module_to_env_connector"),
])  # fmt: skip
def test_connectors_of_rllib_are_refused(section, name):
    config = getattr(tiny_runs.grpo(), section)(**{name: lambda *args, **kwargs: None})
    with pytest.raises(Problems) as raised:
        config.validate()
    (problem,) = raised.value.found
    assert (problem.name, problem.rule) == (name, "be left at None")


def test_the_kl_target_of_rllib_is_the_reference_s():
    with pytest.raises(Problems, match="'ref_kl_target'"):
        tiny_runs.ppo().training(kl_target=0.01)


@pytest.mark.parametrize("make", [tiny_runs.ppo, tiny_runs.sft])
def test_a_config_is_serialized_as_rllib_s(make):
    """All settings, also those that were left at their default."""
    written = make(lr=0.5).serialize()
    assert written["lr"] == 0.5 and written["callbacks"].endswith(".RLlibCallback")
    assert written["num_env_runners"] == 0
