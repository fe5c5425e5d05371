"""A Tune callback for resumed runs: what is asked for now holds, not what was asked for then."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.tune import Callback, CheckpointConfig


class NewTerms(Callback):
    """Gives every trial the stop criteria, the number of failures, the checkpoints to keep and the
    settings that follow from them of this start; a trial that `Tuner.restore` brings back has those
    of the first.

    Checkpoints beyond the number to keep are deleted at once: a full disk may be why it is lower.
    """

    def __init__(
        self,
        stop: Mapping[str, Any],
        max_failures: int,
        checkpoint_config: CheckpointConfig,
        settings: Mapping[str, Any] | None = None,
    ):
        self._stop = dict(stop)
        self._max_failures = max_failures
        self._checkpoint_config = checkpoint_config
        self._settings = dict(settings or {})
        self._given: set[str] = set()  # trial ids

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        for trial in trials:
            if trial.trial_id not in self._given:
                self._given.add(trial.trial_id)
                trial.stopping_criterion = dict(self._stop)
                trial.max_failures = self._max_failures
                if self._settings:
                    trial.set_config({**trial.config, **self._settings})
                self._keep(trial)

    def _keep(self, trial: Any) -> None:
        manager = trial.run_metadata.checkpoint_manager
        before = list(manager.best_checkpoint_results)
        for field in dataclasses.fields(self._checkpoint_config):
            value = getattr(self._checkpoint_config, field.name)
            setattr(manager.checkpoint_config, field.name, value)
        kept = [*manager.best_checkpoint_results, manager.latest_checkpoint_result]
        paths = {result.checkpoint.path for result in kept if result is not None}
        own = Path(trial.storage.trial_fs_path)
        for result in before:
            path = Path(result.checkpoint.path)
            if result.checkpoint.path not in paths and path.parent == own and path.is_dir():
                _empty(path)


def _empty(folder: Path) -> None:
    """Deletes what is in `folder`, which Tune itself deletes with the next checkpoint."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
