"""Ten iterations are five, a checkpoint, another process, and five more: bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from safetensors.torch import load_file
from typer.testing import CliRunner

from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT, check
from rllib_llm.cli.main import app
from rllib_llm.runs.results import StageResult
from rllib_llm.shared.storage import CACHE, UrlPath, local_copy
from tests.algorithms import resumed_runs as runs
from tests.algorithms import tiny_runs as tiny
from tests.s3_server import bucket

ROOT = Path(__file__).parents[2]
NUM_TUNE_ITERATIONS = 6
MAX_SECONDS = 600  # a bound on waiting, not a measure


def child_environment(**extra: str) -> dict[str, str]:
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}


@pytest.fixture(scope="module")
def uninterrupted():
    """Results, texts and weights of ten iterations of each algorithm, never saved."""
    outcomes = {}
    for name, config in runs.UNINTERRUPTED.items():
        with tiny.built(config()) as algorithm:
            results = runs.train(algorithm, runs.NUM_BEFORE + runs.NUM_AFTER)
            outcomes[name] = results, runs.texts(algorithm), tiny.weights(algorithm)
    return outcomes


@pytest.fixture(scope="module")
def halves(tmp_path_factory, ray_session):
    """Per run: results and texts of the first five iterations, here, and the folder in which
    another process left those of the other five."""
    folder = tmp_path_factory.mktemp("resumption")
    first = {}
    for name, (before, _) in runs.RUNS.items():
        with tiny.built(before()) as algorithm:
            results = runs.train(algorithm, runs.NUM_BEFORE)
            first[name] = results, runs.texts(algorithm), folder / name
            algorithm.save_to_path(folder / name / "checkpoint")
    address = ray.get_runtime_context().gcs_address
    subprocess.run(
        [sys.executable, "-m", "tests.algorithms.resumed_runs", str(folder)],
        cwd=ROOT, check=True, timeout=MAX_SECONDS, env=child_environment(RAY_ADDRESS=address),
    )  # fmt: skip
    return first


def flatten(values: Any, name: str = "") -> dict[str, float]:
    """Numbers of nested results by their path."""
    if isinstance(values, dict | list):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        return {k: v for key, part in items for k, v in flatten(part, f"{name}/{key}").items()}
    return {name: float(values)} if isinstance(values, int | float) else {}


@pytest.mark.slow  # thirteen algorithms, and a process that goes on with seven of them
@pytest.mark.parametrize("name", runs.RUNS)
def test_five_and_five_are_ten(uninterrupted, halves, name):
    whole, whole_texts, weights = uninterrupted[runs.reference_of(name)]
    results, texts, folder = halves[name]
    outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    resumed = outcome["results"]
    whole = [
        {key: result[key] for key in part} for result, part in
        zip(whole, results + resumed, strict=True)
    ]  # fmt: skip
    assert texts + outcome["texts"] == whole_texts
    if name in runs.CUT_OTHERWISE:
        assert results == whole[: runs.NUM_BEFORE]
        assert flatten({"": resumed}) == pytest.approx(
            flatten({"": whole[runs.NUM_BEFORE :]}), rel=1e-2, abs=1e-4, nan_ok=True
        )
        return
    assert results + resumed == whole
    tiny.assert_same_weights(load_file(folder / "weights.safetensors"), weights)
    # Restored once more, by the same live algorithm and its samplers.
    assert outcome["again"] == resumed[:2]


@pytest.mark.slow
def test_the_runs_cover_what_they_are_meant_to(uninterrupted):
    results, texts, _ = uninterrupted["ppo"]
    assert {row["prompt"] for row in texts} == {row["prompt"] for row in tiny.PROMPTS}
    assert len(texts) == 100
    assert 50 % len(tiny.PROMPTS) and 20 % len(tiny.PROMPTS)  # saved within an epoch
    betas = {result["effective"]["ref_kl_coeff"] for result in results}
    assert len(betas) > 5  # the adaptive coefficient moves
    assert len({json.dumps(result["eval"]) for result in results}) > 3
    assert results[-1]["weights"] == 10
    assert results[-1]["episode"] == 100


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """Outside of any node: an S3 bucket."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache of the head"))
    with bucket() as url:
        yield UrlPath(url) / "runs"


@pytest.fixture
def experiment(tmp_path, storage):
    """A file with one GRPO stage, saved every second iteration."""
    settings = {
        "model": tiny.MODEL, "train_batch_size_per_learner": 12, "minibatch_size": 6,
        "num_epochs": 2, "lr": 1e-3, "num_completions": 3, "max_new_tokens": 5,
        "log_samples_every": 0,
        "env_config": {"prompts": tiny.PROMPTS, "eval_prompts": tiny.EVAL_PROMPTS,
                       "reward_functions": "tests.algorithms.resumed_runs.gated_digits",
                       "max_prompt_len": 8},
    }  # fmt: skip
    stage = {
        "run": "GRPO", "env": "rllib_llm/RLHF-v0", "config": settings,
        "stop": {"training_iteration": NUM_TUNE_ITERATIONS},
        "checkpoint_config": {"checkpoint_frequency": 2},
    }  # fmt: skip
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps({"a": stage}), encoding="utf-8")
    return ["train", "file", str(file), "--storage-path", str(storage), "--experiment-name", "run"]


def kill_after_a_noted_checkpoint(arguments: list[str], folder: UrlPath) -> None:
    """Runs `rllib` in another process whose judge stops in iteration 5, and kills it once Tune has
    noted a checkpoint. Its own Ray, of which it is the head, dies with it."""
    command = [sys.executable, "-m", "rllib_llm.cli.main", *arguments]
    environment = child_environment(**{runs.GATE: "4"})
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        try:
            deadline = time.monotonic() + MAX_SECONDS
            while not has_noted(folder, "checkpoint_000001"):
                assert process.poll() is None, "it ended before it was killed"
                assert time.monotonic() < deadline, "no checkpoint was noted"
                time.sleep(0.2)
        finally:
            process.kill()


def has_noted(folder: UrlPath, checkpoint: str) -> bool:
    """Whether Tune's record of an experiment names the checkpoint; parts of it are pickled."""
    texts = [file.read_text() for file in folder.glob("experiment_state-*.json")]
    return any(name in text for text in texts for name in (checkpoint, checkpoint.encode().hex()))


@pytest.mark.slow  # a run in a process of its own, killed and gone on with
def test_a_run_whose_head_is_lost_goes_on_from_external_storage(
    experiment, storage, tmp_path, monkeypatch, ray_session
):
    kill_after_a_noted_checkpoint(experiment, storage / "run" / "a")
    assert not (storage / "run" / "a" / "stage.json").is_file()
    monkeypatch.setenv(CACHE, str(tmp_path / "cache of another"))  # nothing of the head is left

    result = CliRunner().invoke(app, [*experiment, "--resume"])

    assert result.exit_code == 0, result.output
    stage = StageResult.load(storage / "run" / "a")
    lines = (stage.best_trial_folder / "result.json").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["training_iteration"] == NUM_TUNE_ITERATIONS
    assert last["iterations_since_restore"] == 2  # it went on from the fourth
    config = tiny.grpo()
    judge = {"reward_functions": "tests.algorithms.resumed_runs.gated_digits"}
    with tiny.built(config.environment(env_config={**config.env_config, **judge})) as algorithm:
        whole = tiny.train(algorithm, NUM_TUNE_ITERATIONS)[-1]
        exported = algorithm.export_model(tmp_path / "whole")
    assert {name: last[name] for name in whole} == json.loads(json.dumps(whole, default=float))
    checkpoint = local_copy(stage.checkpoint)
    check(checkpoint)
    tiny.assert_same_weights(
        load_file(checkpoint / MODEL_IN_CHECKPOINT / "model.safetensors"),
        load_file(exported / "model.safetensors"),
    )
