"""The Tune callbacks that `rllib train` uses, for a `Tuner` in Python or in a file."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.tune import Callback, CheckpointConfig

from rllib_llm.runs.failing_trials import EndBrokenTrials, RestartHungTrials
from rllib_llm.runs.result_log import NoOtherCsv, ResultLog
from rllib_llm.runs.trial_checkpoints import (
    KeepBestCheckpoint,
    SaveOnStop,
    TimedCheckpoints,
    UseFailureCheckpoints,
)


def default_callbacks(
    *,
    checkpoint_interval_s: float | str | None = "auto",
    hung_trial_timeout_s: float | str | None = "auto",
    metric: str | None = None,
    mode: str | None = None,
    wandb_project: str | None = None,
) -> list[Callback]:
    """Return new callbacks for one `tune.RunConfig(callbacks=...)`, whose storage is a folder.

    They write each result once, however often a trial is started again; have a checkpoint saved
    every few minutes, on Ctrl-C and SIGTERM, and before an iteration that failed; keep the best
    one; restart trials that hang, and end those whose reward function has a bug.

    Args:
        checkpoint_interval_s: see `TimedCheckpoints`; None: no checkpoints by time.
        hung_trial_timeout_s: see `RestartHungTrials`; None: a silent trial is waited for.
        metric, mode: the result that `best_checkpoint` goes by; see `KeepBestCheckpoint`.
        wandb_project: a Weights & Biases project for results and tables of sampled texts.
    """
    callbacks: list[Callback] = [ResultLog(), NoOtherCsv()]
    if checkpoint_interval_s is not None:
        callbacks.append(TimedCheckpoints(checkpoint_interval_s))
    callbacks += [KeepBestCheckpoint(metric, mode), UseFailureCheckpoints(), SaveOnStop()]
    callbacks += [RestartHungTrials(hung_trial_timeout_s), EndBrokenTrials()]
    if wandb_project is not None:
        from rllib_llm.runs.wandb_logger import RESUME, WandbLogger, check_wandb

        check_wandb(None)
        callbacks.append(WandbLogger(project=wandb_project, resume=RESUME))
    return callbacks


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
    """Deletes the contents of `folder`; Tune deletes the folder itself with the next checkpoint."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
