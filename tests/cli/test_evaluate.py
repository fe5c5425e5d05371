from __future__ import annotations

import json
import logging

import pytest
from typer.testing import CliRunner

from rllib_llm.cli.evaluate import config_for_evaluation
from rllib_llm.cli.main import app
from rllib_llm.cli.session import LOGGERS
from rllib_llm.runs.results import StageResult
from rllib_llm.shared.messages import VERBOSE, is_verbose
from tests.cli.said import said
from tests.scripted_server import serving

MODEL = "rllib_llm.examples.arithmetic.build_model"
TEXTS = {"path": "rllib_llm.examples.arithmetic.sft_texts", "limit": 32}
STAGES = {
    "sft": {
        "run": "SFT",
        "stop": {"training_iteration": 2},
        "config": {"model": MODEL, "data": TEXTS, "eval_data": TEXTS, "lr": 1e-3,
                   "train_batch_size_per_learner": 16},
    },
    "ppo": {
        "run": "PPOPtx",
        "env": "rllib_llm/Arithmetic-v0",
        "stop": {"training_iteration": 2},
        "config": {"model": "${sft.model}", "train_batch_size_per_learner": 16,
                   "minibatch_size": 8, "max_new_tokens": 4, "evaluation_interval": 1,
                   "evaluation_duration": 8, "evaluation_config": {"num_logged_samples": 3},
                   "env_config": {"num_problems": 40}},
    },
}  # fmt: skip


pytestmark = pytest.mark.slow  # two stages, each a trial in a process of its own


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, ray_session):
    """SFT and PPO-ptx on sums, two iterations each, through the command line."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "x.yaml").write_text(json.dumps(STAGES), encoding="utf-8")
    arguments = ["--storage-path", str(folder), "--experiment-name", "run"]
    result = CliRunner().invoke(app, ["train", "file", str(folder / "x.yaml"), *arguments])
    assert result.exit_code == 0, result.output
    assert "Held-out prompts: completions before and after" in said(result.output)
    return folder / "run"


def test_a_policy_is_judged_on_held_out_prompts(run_folder, tmp_path):
    checkpoint = StageResult.load(run_folder / "ppo").checkpoint
    out = tmp_path / "results.json"
    result = CliRunner().invoke(
        app, ["evaluate", str(checkpoint), "--duration", "6", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    results = json.loads(out.read_text())
    assert 0.0 <= results["correct_rewards"] <= 1.0
    assert results["iteration"] == 2
    assert "scores" in said(result.output)
    assert str(checkpoint) in result.output  # in one line, to be copied


def test_pass_at_k_of_several_completions_of_each_prompt(run_folder, tmp_path):
    checkpoint = StageResult.load(run_folder / "ppo").checkpoint
    out = tmp_path / "results.json"
    arguments = ["evaluate", str(checkpoint), "--samples", "16", "--pass-at", "1,4,16"]
    further = {"eval_envs": {"two": {"env_config": {"digits": 2}}}}
    result = CliRunner().invoke(
        app,
        [*arguments, "--pass-on", "correct", "--duration", "48", "--out", str(out),
         "--config", json.dumps(further)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    results = json.loads(out.read_text())
    # Of one sample each, both are the share of right ones; more can only help, or hurt.
    assert results["pass@1"] == pytest.approx(results["pass^1"])
    assert results["pass@1"] == pytest.approx(results["correct_rewards"])
    assert results["pass^16"] <= results["pass^4"] <= results["pass@1"]
    assert results["pass@1"] <= results["pass@4"] <= results["pass@16"]
    assert results["maj@1"] == pytest.approx(results["pass@1"])
    assert results["pass^16"] <= results["maj@16"] <= results["pass@16"]
    assert results["pass@4_low"] <= results["pass@4"] <= results["pass@4_high"]
    assert 0.0 <= results["two/pass@16"] <= 1.0
    # The score may be 0.1 for form alone: it does not say what has passed.
    unclear = CliRunner().invoke(app, [*arguments, "--duration", "48"])
    assert unclear.exit_code != 0 and "Traceback" not in unclear.output
    told = said(unclear.output)
    assert "pass_on=None must be a component of the reward that is 0 or 1" in told


def test_a_server_that_does_not_answer_is_named_without_a_traceback(run_folder):
    checkpoint = StageResult.load(run_folder / "ppo").checkpoint
    with serving(lambda path, body: (500, {}, {})) as server:
        settings = {"base_url": server.base_url, "served_model": "m", "max_attempts": 1}
        overlay = {"evaluation_config": {"engine": "openai", "engine_settings": settings}}
        result = CliRunner().invoke(
            app, ["evaluate", str(checkpoint), "--config", json.dumps(overlay)]
        )
    assert result.exit_code == 1
    text = said(result.output)
    assert "evaluation failed" in text and "Traceback" not in text
    assert f"{server.base_url}/completions must answer within max_attempts=1" in text
    assert "status 500" in text and "Check the server" in text


def test_the_same_prompts_give_the_results_of_training(run_folder, tmp_path):
    stage = StageResult.load(run_folder / "ppo")
    out = tmp_path / "results.json"
    result = CliRunner().invoke(app, ["evaluate", str(stage.checkpoint), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["scores"] == stage.metrics["eval/scores"]


def test_a_supervised_stage_is_judged_by_its_held_out_loss(run_folder, tmp_path):
    checkpoint = StageResult.load(run_folder / "sft").checkpoint
    out = tmp_path / "results.json"
    result = CliRunner().invoke(app, ["evaluate", str(checkpoint), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert 0.0 < json.loads(out.read_text())["loss"] < 10.0


def test_v_shows_the_traceback_and_lets_the_libraries_speak(monkeypatch):
    monkeypatch.setenv(VERBOSE, "0")
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        result = CliRunner().invoke(app, ["evaluate", "/nowhere", "-v"])
        assert result.exit_code == 2
        assert "Traceback" in result.output and "find_checkpoint" in result.output
        assert "must be a checkpoint folder: there is none" in said(result.output)
        assert is_verbose()
        assert {logger.level for logger in loggers} == {logging.INFO}
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    quiet = CliRunner().invoke(app, ["evaluate", "/nowhere"])
    assert "Traceback" not in quiet.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "must be a checkpoint folder: there is none"),
        (["{checkpoint}", "--config", "{lrr: 1}"], "lrr must be a known key"),
        (["{sft}", "--config", "{eval_data: null}"], "must have held-out rows"),
        (["{sft}/learner_group/learner/rl_module/default_policy"], "it is a model's folder"),
        (["{sft}0"], "Did you mean '{sft}'?"),
    ],
)
def test_mistakes_are_told(run_folder, arguments: list[str], message: str):
    checkpoint = str(StageResult.load(run_folder / "ppo").checkpoint)
    sft = str(StageResult.load(run_folder / "sft").checkpoint)
    filled = [each.replace("{checkpoint}", checkpoint).replace("{sft}", sft) for each in arguments]
    result = CliRunner().invoke(app, ["evaluate", *filled])
    assert result.exit_code == 2
    assert message.replace("{sft}", sft) in said(result.output)


def test_an_evaluation_s_settings_are_laid_over_those_of_the_run(run_folder):
    checkpoint = StageResult.load(run_folder / "ppo").checkpoint
    sampled = {"explore": True, "num_completions": 4}
    config = config_for_evaluation(checkpoint, {"evaluation_config": dict(sampled)})
    assert config.evaluation_config == {"num_logged_samples": 3, **sampled}
