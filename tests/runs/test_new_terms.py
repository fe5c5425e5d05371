"""Trials of a resumed run go by what is asked for now."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from ray.train._internal.checkpoint_manager import _CheckpointManager
from ray.train._internal.session import _TrainingResult
from ray.tune import Checkpoint, CheckpointConfig
from ray.tune.experiment import Trial

from rllib_llm.runs.callbacks import NewTerms


def saved(folder: Path, num: int) -> _CheckpointManager:
    """Tune's own account of `num` checkpoints in `folder`, all of which are kept."""
    manager = _CheckpointManager(CheckpointConfig())
    for number in range(num):
        path = folder / f"checkpoint_{number:06d}"
        path.mkdir(parents=True)
        (path / "weights").write_text("", encoding="utf-8")
        checkpoint = Checkpoint.from_directory(str(path))
        manager.register_checkpoint(_TrainingResult(checkpoint, {"training_iteration": number}))
    return manager


def test_stop_failures_and_checkpoints_to_keep(tmp_path):
    manager = saved(tmp_path / "t0", 4)
    trial = SimpleNamespace(
        trial_id="a",
        stopping_criterion={"training_iteration": 3},
        max_failures=0,
        run_metadata=SimpleNamespace(checkpoint_manager=manager),
        storage=SimpleNamespace(trial_fs_path=str(tmp_path / "t0")),
    )
    keep = CheckpointConfig(num_to_keep=2, checkpoint_frequency=5)
    callback = NewTerms({"training_iteration": 9}, 3, keep)
    callback.on_step_begin(0, [trial])
    assert trial.stopping_criterion == {"training_iteration": 9}
    assert trial.max_failures == 3
    assert manager.checkpoint_config == keep
    # The disk has room again before the next checkpoint is saved, and Tune does the rest with it.
    assert sorted(path.parent.name for path in tmp_path.glob("t0/*/weights")) == [
        "checkpoint_000002", "checkpoint_000003",
    ]  # fmt: skip
    path = tmp_path / "t0" / "checkpoint_000004"
    path.mkdir()
    manager.register_checkpoint(_TrainingResult(Checkpoint.from_directory(str(path)), {}))
    assert sorted(path.name for path in (tmp_path / "t0").iterdir()) == [
        "checkpoint_000003", "checkpoint_000004",
    ]  # fmt: skip

    trial.max_failures = 1  # somebody else's doing
    callback.on_step_begin(1, [trial])
    assert trial.max_failures == 1


def test_settings_that_follow_from_the_terms(tmp_path):
    settings = {"lr": 1.0, "planned_iterations": 3}
    trial = Trial("counter", config=settings, stub=True)
    trial.storage = SimpleNamespace(trial_fs_path=str(tmp_path))
    NewTerms({}, 0, CheckpointConfig(), {"planned_iterations": 9}).on_step_begin(0, [trial])
    assert trial.config == {"lr": 1.0, "planned_iterations": 9}
