"""Values that would fail hours later, or act on nothing, are refused before anything starts."""

from __future__ import annotations

import math
import re

import pytest

from rllib_llm.algorithms.grpo import GRPO, GRPOConfig
from rllib_llm.conversations.tool_calls import SYNTAXES
from rllib_llm.shared.errors import Problems, problems_in
from tests.algorithms import tiny_runs as tiny

SAMPLED = {"explore": True, "num_completions": 4}


@pytest.mark.parametrize("settings, words", [
    ({"lr": math.inf}, "lr=inf must be finite"),
    ({"lr": math.nan}, "lr=nan must be a number of at least 0"),
    ({"adam_epsilon": None}, "adam_epsilon=None must be a number above 0"),
    ({"adam_betas": (0.9, 1.5)}, r"adam_betas=\(0.9, 1.5\) must be two numbers in \[0, 1\)"),
    ({"adam_betas": (-0.1, 0.9)}, r"must be two numbers in \[0, 1\)"),
    ({"lr_schedule": "linear", "lr_num_updates": -5}, "lr_num_updates=-5 must be a whole number"),
    ({"lr_schedule": "cosine", "lr_num_updates": 5, "lr_num_warmup_updates": 100},
     "lr_num_updates=5 must be above lr_num_warmup_updates=100"),
])  # fmt: skip
def test_an_optimiser_that_would_not_learn_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        tiny.grpo(**settings).validate()


def test_a_warm_up_without_decay_needs_no_end():
    tiny.grpo(lr_num_warmup_updates=100).validate()
    tiny.grpo(lr_schedule="linear", lr_num_updates=101, lr_num_warmup_updates=100).validate()


@pytest.mark.parametrize("pass_at, held_out, count", [
    ([0, 4], SAMPLED, 4),
    ([-2], SAMPLED, 4),
    ([16], SAMPLED, 4),
    ([4], {"explore": True}, 3),  # of training, 3 completions
    ([2], {}, 1),  # greedy completions are all alike
    ([2], None, 1),
])  # fmt: skip
def test_pass_at_wants_as_many_completions(pass_at, held_out, count):
    config = tiny.grpo().evaluation(evaluation_interval=1, evaluation_config=held_out)
    config.sampling(pass_at=pass_at)
    rule = f"numbers from 1 to {count}" if count > 1 else "1 alone"
    with pytest.raises(ValueError, match=f"pass_at=.* must be {rule}: "):
        config.validate()


def test_pass_at_of_a_further_environment_is_checked():
    config = tiny.grpo().evaluation(evaluation_interval=1, evaluation_config=SAMPLED)
    config.sampling(pass_at=[1, 4])
    config.validate()
    config.sampling(eval_envs={"hard": {"pass_at": [8]}})
    with pytest.raises(ValueError, match=r"eval_envs.hard.pass_at=\[8\] must be numbers from 1"):
        config.validate()
    config.sampling(eval_envs={"hard": {"pass_at": [8], "sampling": {"num_completions": 8}}})
    config.validate()


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"answer_pattern='\(' must be a regular expression: "):
        tiny.grpo().sampling(answer_pattern="(").validate()


ENV_ROWS = [
    ("max_prompt_len", "many", "a whole number of at least 1"),
    ("max_prompt_len", 0, "a whole number of at least 1"),
    ("eval_fraction", 2.0, "a number of at least 0 and at most 1"),
    ("prompt_overflow", "cut", "one of"),
]


@pytest.mark.parametrize("name, value, words", ENV_ROWS)
def test_settings_of_the_environment_are_checked_as_all_are(name, value, words):
    config = tiny.grpo()
    assert config.env.startswith("rllib_llm/")
    config.env_config = {**config.env_config, name: value}
    with pytest.raises(ValueError, match=f"env_config.{name}={value!r} must be {words}"):
        config.validate()
    overlaid = tiny.grpo().evaluation(evaluation_config={"env_config": {name: value}})
    with pytest.raises(ValueError, match=f"env_config.{name}={value!r} must be {words}"):
        overlaid.validate()


@pytest.mark.parametrize("rows, env", [
    ({"prompts": ["a"], "reward_functions": [len]}, "rllib_llm/RLHF-v0"),
    ({"prompts": ["a"], "reward_functions": [len], "max_turns": 2}, "rllib_llm/Conversation-v0"),
])  # fmt: skip
def test_prompts_and_rewards_name_their_environment_in_env_config_too(rows, env):
    config = GRPOConfig().language_model(model=tiny.MODEL).environment(env_config=rows)
    config.validate()
    assert config.env == env


def test_an_environment_of_ones_own_has_settings_of_its_own():
    config = tiny.grpo().environment(f"{__name__}.MyEnv", env_config={"max_prompt_len": "many"})
    config.validate()


@pytest.mark.parametrize("name, value", [
    ("env_runner_health_probe_timeout_s", 5.0),
    ("env_runner_restore_timeout_s", 5.0),
    ("algorithm_config_overrides_per_module", {"default_policy": {"lr": 1.0}}),
    ("_torch_lr_scheduler_classes", [object]),
    ("_torch_grad_scaler_class", object),
])  # fmt: skip
def test_settings_that_act_on_nothing_are_refused(name, value):
    config = tiny.grpo()
    setattr(config, name, value)
    with pytest.raises(ValueError, match=f"{name}=.* must be left at .* acts on nothing in GRPO"):
        config.validate()
    with pytest.raises(ValueError, match=name):
        tiny.build_config(GRPO, {"model": tiny.MODEL, "env": "rllib_llm/RLHF-v0", name: value})


def test_a_conversations_settings_are_a_section_and_name_their_environment():
    config = GRPOConfig().language_model(model=tiny.MODEL).conversation(max_turns=3)
    assert config.env == "rllib_llm/Conversation-v0" and config.env_config == {"max_turns": 3}
    settings = {
        "model": tiny.MODEL, "conversation": {"tool_errors": "invalid"},
        "prompts": {"data": "tasks.jsonl"},
    }  # fmt: skip
    config = tiny.build_config(GRPO, settings)
    assert config.env == "rllib_llm/Conversation-v0"
    assert config.env_config == {"tool_errors": "invalid", "prompts": "tasks.jsonl"}
    with pytest.raises(ValueError, match="conversation.tool_syntax='perl' must be one of"):
        tiny.build_config(GRPO, settings | {"conversation": {"tool_syntax": "perl"}})
    for syntax in SYNTAXES:  # five of ten that conversations read were refused in a file
        tiny.build_config(GRPO, settings | {"conversation": {"tool_syntax": syntax}})


@pytest.mark.parametrize("config, wrong, said", [
    (tiny.GRPOConfig, {"num_completions": 0}, "Write 8, its default."),  # RLHF's is 1
    (tiny.RLOOConfig, {"num_completions": 0}, "Write 4, its default."),
    (tiny.SFTConfig, {"adam_epsilon": 0}, "Write 1e-08, its default."),  # RLHF's is 1e-5
    (tiny.DPOConfig, {"adam_epsilon": 0}, "Write 1e-08, its default."),
    (tiny.GRPOConfig, {"adam_epsilon": 0}, "Write 1e-05, its default."),
    (tiny.PPOPtxConfig, {"vf_clip_param": 0}, "Write 0.2, its default, or None."),
    (tiny.GRPOConfig, {"target_kl": 0}, "Leave it out."),
    (tiny.GRPOConfig, {"log_samples_every": -2}, "Write 10, or 0 for none."),
    (tiny.SFTConfig, {"max_length": 1}, "Write 256, or the tokens of your longest text."),
    (tiny.GRPOConfig, {"micro_batch_tokens": 0}, "Write 16384, or None with micro_batch_size."),
    (tiny.GRPOConfig, {"clip_param_high": -1.0},
     "Write 0.28 as DAPO does, or None for clip_param."),
    (tiny.GRPOConfig, {"clip_param": -1.5},
     ": it is the ε of [1 - ε, 1 + ε], to which ratios are clipped. Write 0.2, its default."),
])  # fmt: skip
def test_a_remedy_says_what_to_write_by_the_algorithm_s_own_default(config, wrong, said):
    made = config().language_model(model=tiny.MODEL).update_from_dict(wrong)
    with pytest.raises(Problems) as error:
        made.validate()
    assert str(error.value.problem).endswith(said)


OVERLAYS = [
    ({"env_config": 5}, "env_config=5 must be a mapping: .*`env_config: {prompts: ...}`"),
    ({"prompts": 5}, "prompts=5 must be a mapping: .*`prompts: {data: ...}`"),
    ({"prompts": {"data": "x"}, "env_config": 5}, "env_config=5 must be a mapping"),
    ({"sampling": {"temperatur": 1}}, "sampling.temperatur must be a known key"),
    ({"temperature": -3}, "temperature=-3 must be a number above 0"),
    ({"env_config": {"max_prompt_len": 0}}, "env_config.max_prompt_len=0 must be a whole number"),
    (
        {"prompts": {"max_prompt_len": 3}, "env_config": {"max_prompt_len": 4}},
        "env_config.max_prompt_len=4 must be the only one",
    ),
]


@pytest.mark.parametrize("overlay, words", OVERLAYS)
def test_what_evaluation_has_otherwise_is_checked_and_its_whole_path_is_told(overlay, words):
    config = tiny.grpo().evaluation(evaluation_interval=1)
    config.sampling(eval_envs={"math": overlay})
    with pytest.raises(ValueError, match=r"^eval_envs\.math\." + words):
        config.validate()
    config = tiny.grpo().evaluation(evaluation_interval=1, evaluation_config=overlay)
    found = problems_in(config.validate)
    (said,) = map(str, found)  # once
    assert re.match(r"evaluation_config\." + words, said)
