"""An iteration that fails before anything is learnt in it leaves a checkpoint of the one before."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rllib_llm.checkpoints.folder import check
from rllib_llm.cli.main import app
from rllib_llm.runs.results import StageResult
from rllib_llm.shared.run_layout import RunFolder
from tests.algorithms import tiny_runs as tiny
from tests.cli.said import said

pytestmark = pytest.mark.usefixtures("ray_session")
NUM_ITERATIONS = 5
FAILS_AT = 4


class Judge:
    """`tiny.num_digits`, which fails from a call on as long as a file is there; another process
    that starts meanwhile finds it failing."""

    def __init__(self, file: str, first: int):
        self.file, self.first, self.num_calls = Path(file), first, 0

    def __call__(self, completions):
        self.num_calls += 1
        if self.file.exists() and (self.num_calls >= self.first or self.file.read_text()):
            self.file.write_text("since then")
            raise ValueError("the judge is out")
        return tiny.num_digits(completions)


@pytest.fixture
def experiment(tmp_path):
    """A file with one GRPO stage whose judge fails in iteration 4, and nothing set that saves."""
    (tmp_path / "out").touch()
    judge = {"function": "tests.algorithms.test_failed_iterations.Judge", "name": "digits",
             "kwargs": {"file": str(tmp_path / "out"), "first": FAILS_AT}}  # fmt: skip
    settings = {
        "model": tiny.MODEL, "train_batch_size_per_learner": 12, "minibatch_size": 6,
        "num_epochs": 2, "lr": 1e-3, "num_completions": 3, "max_new_tokens": 5,
        "log_samples_every": 0,
        "env_config": {"prompts": tiny.PROMPTS, "eval_prompts": tiny.EVAL_PROMPTS,
                       "reward_functions": [judge], "max_prompt_len": 8},
    }  # fmt: skip
    stage = {"run": "GRPO", "env": "rllib_llm/RLHF-v0", "config": settings,
             "stop": {"training_iteration": NUM_ITERATIONS}}  # fmt: skip
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps({"a": stage}), encoding="utf-8")
    return ["train", "file", str(file), "--storage-path", str(tmp_path), "--experiment-name", "run"]


@pytest.mark.slow  # a run, and one that goes on with it
@pytest.mark.parametrize("max_failures", [0, 3])
def test_a_run_goes_on_from_the_iteration_before(experiment, tmp_path, max_failures):
    result = CliRunner().invoke(app, [*experiment, "--set", f"max_failures={max_failures}"])
    assert result.exit_code == 1
    text = said(result.output)
    assert "the judge is out" in text
    assert f"This goes on from iteration {FAILS_AT - 1} of a:" in text
    (trial,) = (tmp_path / "run" / "a").glob("GRPO_*")
    (saved,) = RunFolder(
        trial
    ).checkpoints()  # started again from it, it failed again with nothing new
    assert check(saved)["training_iteration"] == FAILS_AT - 1

    (tmp_path / "out").unlink()
    result = CliRunner().invoke(app, [*experiment, "--resume"])
    assert result.exit_code == 0, result.output
    stage = StageResult.load(tmp_path / "run" / "a")
    last = json.loads((trial / "result.json").read_text(encoding="utf-8").splitlines()[-1])
    assert last["training_iteration"] == NUM_ITERATIONS
    assert last["iterations_since_restore"] == NUM_ITERATIONS - FAILS_AT + 1
    assert stage.best_trial_folder == trial

    with tiny.built(tiny.grpo()) as algorithm:
        whole = tiny.train(algorithm, NUM_ITERATIONS)[-1]
    for name in ("objective", "policy", "loss", "val", "lr", "episode"):
        assert last[name] == json.loads(json.dumps(whole[name], default=float)), name


class Broken:
    """A learner group or pools of which nothing can be had."""

    def __getattr__(self, name):
        raise RuntimeError("broken")

    def __getitem__(self, key):
        raise RuntimeError("broken")


@pytest.mark.parametrize(("part", "saved"), [("_pools", [1]), ("learner_group", [])])
def test_what_is_half_learnt_is_not_saved(monkeypatch, part, saved):
    found = []
    with tiny.built(tiny.grpo()) as algorithm, monkeypatch.context() as patch:
        tiny.train(algorithm, 1)
        patch.setattr(algorithm, "save", lambda: found.append(algorithm.iteration))
        patch.setattr(algorithm, "_storage", SimpleNamespace(persist_artifacts=None))
        patch.setattr(algorithm, part, Broken())
        with pytest.raises(RuntimeError, match="broken"):
            algorithm.train()
    assert found == saved
