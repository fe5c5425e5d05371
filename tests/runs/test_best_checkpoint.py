"""The best checkpoint of a trial by held-out results stays, whichever ones Tune deletes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow.fs
import pytest
from ray.tune.result import SHOULD_CHECKPOINT

from rllib_llm.runs.trial_checkpoints import BEST_CHECKPOINT, KeepBestCheckpoint


class Trial:
    """Saves checkpoints as Tune does, of which it keeps the newest alone."""

    filesystem: pyarrow.fs.FileSystem = pyarrow.fs.LocalFileSystem()

    def __init__(self, folder: Path, callback: KeepBestCheckpoint) -> None:
        self.folder, self.callback, self.number = folder, callback, 0
        self.last_result: dict = {}
        self.trial_id = "a"

    def save(self, **result) -> None:
        self.number += 1
        for old in self.folder.glob("checkpoint_*"):
            shutil.rmtree(old)
        path = self.folder / f"checkpoint_{self.number:06d}"
        (path / "sub").mkdir(parents=True)
        (path / "sub" / "weights").write_text(str(self.number), encoding="utf-8")
        self.last_result = {"training_iteration": 10 * self.number, **result}
        checkpoint = SimpleNamespace(path=str(path), filesystem=self.filesystem)
        self.callback.on_checkpoint(self, checkpoint)

    def best(self) -> int | None:
        file = self.folder / BEST_CHECKPOINT / "sub" / "weights"
        return int(file.read_text(encoding="utf-8")) if file.is_file() else None


@pytest.fixture
def trial(tmp_path):
    return Trial(tmp_path, KeepBestCheckpoint())


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("scores", [1.0, 3.0, 2.0, 3.0], 2),  # of two that are alike the first
        ("loss", [1.0, 0.5, 0.7], 2),
        ("accuracy", [float("nan"), 0.5, 0.7], 3),
    ],
)
def test_the_best_held_out_result_stays(trial, name, values, best):
    for value in values:
        trial.save(eval={name: value})
    assert trial.best() == best
    record = json.loads((trial.folder / "best_checkpoint.json").read_text(encoding="utf-8"))
    assert record["metric"] == f"eval/{name}" and record["value"] == values[best - 1]
    assert record["checkpoint"] == f"checkpoint_{best:06d}"
    assert record["training_iteration"] == 10 * best


def test_without_held_out_results_there_is_none(trial):
    trial.save(objective={"scores": 1.0})
    assert trial.best() is None


def test_a_resumed_run_knows_the_best_of_before(trial):
    trial.save(eval={"scores": 2.0})
    trial.callback = KeepBestCheckpoint()
    trial.save(eval={"scores": 1.0})
    assert trial.best() == 1


def test_another_result_may_decide(tmp_path):
    trial = Trial(tmp_path, KeepBestCheckpoint("objective/kl", "min"))
    trial.save(eval={"scores": 1.0}, objective={"kl": 2.0})
    trial.save(eval={"scores": 0.0}, objective={"kl": 1.0})
    assert trial.best() == 2


def test_the_best_stays_where_storage_is_no_disk(trial):
    trial.filesystem = pyarrow.fs.SubTreeFileSystem("/", pyarrow.fs.LocalFileSystem())
    for value in (1.0, 3.0, 2.0):
        trial.save(eval={"scores": value})
        assert trial.best() == min(trial.number, 2)
    record = json.loads((trial.folder / "best_checkpoint.json").read_text(encoding="utf-8"))
    assert record["value"] == 3.0 and record["checkpoint"] == "checkpoint_000002"


def test_a_checkpoint_counts_only_with_what_was_measured_on_it(trial):
    # Saved in iterations 10, 20 and 30; evaluated after 10 and 30.
    trial.save(eval={"scores": 1.0, "iteration": 10})
    trial.save(eval={"scores": 5.0, "iteration": 19})  # of other weights
    assert trial.best() == 1
    trial.save(eval={"scores": 2.0, "iteration": 30})
    assert trial.best() == 3


def test_weights_that_are_the_best_so_far_are_saved(trial):
    def asked(number: int, score: float, measured: int) -> bool:
        result = {"training_iteration": number, "eval": {"scores": score, "iteration": measured}}
        trial.callback.on_trial_result(trial, result)
        return SHOULD_CHECKPOINT in result

    assert asked(1, 1.0, 1)
    assert asked(1, 1.0, 1)  # by a trial that died while it saved
    trial.save(eval={"scores": 1.0, "iteration": 10})
    assert not asked(11, 1.0, 10)  # the same evaluation
    assert not asked(12, 0.5, 12)
    assert asked(13, 2.0, 13)


def test_a_record_whose_checkpoint_was_lost_counts_no_more(trial):
    """A process died between taking the old one away and putting the new one there."""
    trial.save(eval={"scores": 3.0})
    shutil.rmtree(trial.folder / BEST_CHECKPOINT)
    trial.save(eval={"scores": 2.0})
    assert trial.best() == 2


def test_a_held_out_result_under_its_short_name_counts_once(tmp_path):
    """A trial that starts from a checkpoint of iteration 10 repeats what was measured there."""
    trial = Trial(tmp_path, KeepBestCheckpoint("held_out_reward", "max"))
    trial.save(held_out_reward=5.0, eval={"scores": 5.0, "iteration": 0})
    assert trial.best() is None
    trial.save(held_out_reward=3.0, eval={"scores": 3.0, "iteration": 20})
    assert trial.best() == 2
