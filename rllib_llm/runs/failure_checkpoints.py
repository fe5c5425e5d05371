"""A Tune callback for checkpoints that a trial saved because its iteration failed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem
from ray.tune import Callback, Checkpoint
from ray.tune.result import TIME_TOTAL_S

from rllib_llm.checkpoints.folder import (
    MANIFEST,
    CheckpointError,
    checkpoints_in,
    read_manifest,
)
from rllib_llm.shared.ray_compat import training_result

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
    filesystem = trial.storage.storage_filesystem
    newest = _newest(filesystem, trial.storage.trial_fs_path)
    known = None if trial.checkpoint is None else trial.checkpoint.path
    if newest is None or newest == known or not trial.has_reported_at_least_once:
        return
    manifest = _manifest(filesystem, newest)
    # A sum of measured times: no other state of this trial has the same.
    if manifest.get(TIME_TOTAL_S) == trial.last_result.get(TIME_TOTAL_S):
        checkpoint = Checkpoint(newest, filesystem)
        trial.on_checkpoint(training_result(checkpoint, dict(trial.last_result)))


def _newest(filesystem: FileSystem, folder: str) -> str | None:
    """The path of a trial's newest checkpoint, usable or not."""
    if isinstance(filesystem, LocalFileSystem):
        found = checkpoints_in(folder)
        return str(found[0]) if found else None
    infos = filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
    names = [
        info.base_name for info in infos if info.base_name.removeprefix("checkpoint_").isdigit()
    ]
    return f"{folder}/{max(names)}" if names else None


def _manifest(filesystem: FileSystem, checkpoint: str) -> dict[str, Any]:
    """What the checkpoint says of itself; nothing where saving it was interrupted."""
    if isinstance(filesystem, LocalFileSystem):
        try:
            return read_manifest(Path(checkpoint))
        except CheckpointError:
            return {}
    file = f"{checkpoint}/{MANIFEST}"
    if filesystem.get_file_info(file).type != FileType.File:
        return {}
    with filesystem.open_input_stream(file) as stream:
        return json.loads(stream.read())
