"""A run whose disk fills up while it saves, with any of its files cut short then, goes on to its
end with `--resume`, or says that it cannot. It is never said to have ended before, and never begins
anew without a word."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import ray
import yaml
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.runs.results import StageResult, read_results
from tests.cli.said import said
from tests.runs.tiny_trainables import COUNTER

END = 6


@pytest.fixture
def run(tmp_path, ray_session):
    def run_file(no_room_at: int, *arguments: str):
        file = tmp_path / "x.yaml"
        experiment = {
            "run": COUNTER, "stop": {"training_iteration": END},
            "config": {"no_room_at": no_room_at},
            "checkpoint_config": {"checkpoint_frequency": 1},
        }  # fmt: skip
        file.write_text(yaml.safe_dump({"a": experiment}), encoding="utf-8")
        # Ray gathers what runs write by their names and the second in which they begin.
        session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
        shutil.rmtree(session / "artifacts", ignore_errors=True)
        where = ["--storage-path", str(tmp_path), "--experiment-name", "run"]
        return CliRunner().invoke(app, ["train", "file", str(file), *where, *arguments])

    return run_file


def cut_short(rng: random.Random, file: Path) -> str:
    whole = file.read_bytes()
    kept = rng.choice([0, len(whole) // 2, max(0, len(whole) - 1)])
    file.write_bytes(whole[:kept])
    return f"{file.name} has {kept} of {len(whole)} bytes"


def newer_start(rng: random.Random, stage: Path) -> str:
    """As of a start that found the disk still full: copies of the state, cut short."""
    done = []
    for pattern in ("experiment_state-*.json", "basic-variant-state-*", "callback-states-*"):
        for file in list(stage.glob(pattern)):
            prefix, suffix = pattern.partition("*")[0], file.suffix
            copy = file.with_name(f"{prefix}2099-01-01_00-00-00{suffix}")
            copy.write_bytes(file.read_bytes())
            done.append(cut_short(rng, copy))
    return f"a later start: {done}"


def damage(rng: random.Random, stage: Path) -> list[str]:
    """What is cut short, of the files that Tune writes when a run fails."""
    (trial,) = stage.glob("Counter_*")
    done = []
    if rng.random() < 0.5:
        done.append(newer_start(rng, stage))
    files = [
        *stage.glob("callback-states-*"), *stage.glob("basic-variant-state-*"),
        *stage.glob("experiment_state-*"), stage / "report.html", stage / "environment.json",
        *(trial / name for name in ("error.pkl", "error.txt", "result.json", "progress.csv",
                                    "params.json", "params.pkl", "samples.jsonl")),
    ]  # fmt: skip
    files = [file for file in files if file.is_file()]
    return done + [cut_short(rng, file) for file in rng.sample(files, rng.randint(0, 2))]


@pytest.mark.slow  # runs of trials in processes of their own
@pytest.mark.parametrize("seed", range(8))
def test_a_run_goes_on_after_a_full_disk_or_says_why_not(run, tmp_path, seed):
    rng = random.Random(seed)
    no_room_at = rng.randint(2, END - 1)
    failed = run(no_room_at)
    assert failed.exit_code == 1 and "No space left on device" in said(failed.output)
    done = damage(rng, tmp_path / "run" / "a")
    resumed = run(no_room_at, "--resume")
    told = f"{done}: {resumed.output} {resumed.exception!r}"
    stage = StageResult.load(tmp_path / "run" / "a")
    if resumed.exit_code:
        assert resumed.exit_code == 1 and stage is None, told
        assert "a full disk may have cut it short" in said(resumed.output), told
        return
    assert f"a goes on from iteration {no_room_at - 1}" in said(resumed.output), told
    assert stage.metrics["training_iteration"] == END, told
    assert len(list(stage.folder.glob("Counter_*"))) == 1, told
    if not any("result.json" in each for each in done):
        rows = [row["training_iteration"] for row in read_results(stage.best_trial_folder)]
        assert rows == list(range(1, END + 1)), told
