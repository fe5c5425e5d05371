from __future__ import annotations

import json

from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.envs.registry import ENVIRONMENTS
from rllib_llm.envs.rlhf import COMMON_DEFAULTS, build_bandit, policy_tokenizer, with_defaults
from tests.cli.said import said

MODEL = "rllib_llm.examples.arithmetic.build_model"


def test_environments_are_listed_with_what_they_do():
    result = CliRunner().invoke(app, ["env", "list"])
    assert result.exit_code == 0
    text = said(result.output)
    assert all(name in text for name in ENVIRONMENTS)
    assert "sums with verified answers" in text
    assert "conversations with another model" in text  # Chat-v0, in the module of Conversation-v0


def test_a_good_environment_keeps_the_contract():
    arguments = ["env", "check", "rllib_llm/Arithmetic-v0", "--env-config", "{num_problems: 20}"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "rllib_llm/Arithmetic-v0 keeps the contract." in said(result.output)


def of_a_policy(env_config: dict):
    """An environment of one's own, whose prompts are token ids of the policy."""
    settings = with_defaults(env_config, COMMON_DEFAULTS)
    return build_bandit(
        settings, tokenizer=policy_tokenizer(settings), prompts=[{"prompt": "1+1="}] * 4,
        rewards=[{"function": lambda completions: [0.0] * len(completions), "name": "none"}],
    )  # fmt: skip


def test_an_environment_that_needs_the_policy_is_given_it():
    arguments = ["env", "check", f"{__name__}.of_a_policy"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "rllib env check: --model" in said(result.output)
    result = CliRunner().invoke(app, [*arguments, "--model", MODEL])
    assert result.exit_code == 0, result.output


def broken_environment(env_config: dict):
    """An Arithmetic-v0 whose rewards are of the wrong shape."""
    from rllib_llm.envs.registry import make

    env = make("rllib_llm/Arithmetic-v0", env_config)
    step = env.step
    env.step = lambda actions: (lambda o, r, *rest: (o, r[:-1], *rest))(*step(actions))
    return env


def test_a_broken_environment_is_told_what_is_wrong():
    arguments = ["env", "check", f"{__name__}.broken_environment", "-c", "{num_problems: 20}"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert "rewards" in said(result.output)


def test_an_unknown_name_is_told_with_the_nearest():
    result = CliRunner().invoke(app, ["env", "check", "rllib_llm/Arithmetc-v0"])
    assert result.exit_code == 2
    assert "rllib_llm/Arithmetic-v0" in said(result.output)


def test_all_environments_of_a_file_are_checked(tmp_path):
    """Each by the settings of its entry; the model is that which an earlier experiment makes."""
    file = tmp_path / "several.yaml"
    broken = {"env": f"{__name__}.broken_environment", "env_config": {"num_problems": 20}}
    file.write_text(json.dumps({
        "sft": {"run": "SFT", "config": {"model": MODEL, "data": [{"text": "1+1=2"}] * 64,
                                         "train_batch_size_per_learner": 4}},
        "rl": {"run": "GRPO", "config": {
            "model": "${sft.model}", "max_new_tokens": 4, "train_batch_size_per_learner": 16,
            "envs": {"sums": {"env": "rllib_llm/Arithmetic-v0"}, "wrong": broken},
        }},
    }))  # fmt: skip
    result = CliRunner().invoke(app, ["env", "check", str(file)])
    assert result.exit_code == 1, result.output
    text = said(result.output)
    assert "rl.envs.sums (rllib_llm/Arithmetic-v0) keeps the contract" in text
    assert f"rl.envs.wrong ({broken['env']}) has 1 problem" in text
