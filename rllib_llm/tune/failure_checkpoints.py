"""A Tune callback for checkpoints that a trial saved because its iteration failed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pyarrow.fs import LocalFileSystem
from ray.tune import Callback, Checkpoint
from ray.tune.result import TIME_TOTAL_S

from rllib_llm.checkpoints.folder import CheckpointError, checkpoints_in, read_manifest
from rllib_llm.ray_compat import training_result

logger = logging.getLogger(__name__)


class UseFailureCheckpoints(Callback):
    """Tells Tune of the checkpoint that `WholeCheckpoints.train` leaves when an iteration fails, so
    that a restart, or `Tuner.restore`, goes on from there: with the error Tune hears nothing else.
    """

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        _register(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        _register(trial)


def _register(trial: Any) -> None:
    """Gives `trial` the newest checkpoint in its folder, if that is of its last result."""
    if not isinstance(trial.storage.storage_filesystem, LocalFileSystem):
        return
    found = checkpoints_in(trial.storage.trial_fs_path)
    known = None if trial.checkpoint is None else Path(trial.checkpoint.path)
    if not found or found[0] == known or not trial.has_reported_at_least_once:
        return
    try:
        manifest = read_manifest(found[0])
    except CheckpointError:
        return  # saving it was interrupted
    # A sum of measured times: no other state of this trial has the same.
    if manifest.get(TIME_TOTAL_S) == trial.last_result.get(TIME_TOTAL_S):
        checkpoint = Checkpoint.from_directory(str(found[0]))
        trial.on_checkpoint(training_result(checkpoint, dict(trial.last_result)))
