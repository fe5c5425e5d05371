"""The Tune callbacks that `rllib train` uses, for a `Tuner` in Python or in a file: results as JSON
Lines, one row per iteration, however often a trial is started again, and what a resumed run takes
from its new start.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from pyarrow.fs import LocalFileSystem
from ray.tune import Callback, CheckpointConfig
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback
from ray.tune.result import EXPR_PROGRESS_FILE, EXPR_RESULT_FILE, TRAINING_ITERATION
from ray.tune.utils.util import SafeFallbackEncoder

from rllib_llm.overseer.oversight import STOP_RUN
from rllib_llm.runs.failing_trials import EndBrokenTrials, RestartHungTrials
from rllib_llm.runs.results import read_results
from rllib_llm.runs.trial_checkpoints import (
    KeepBestCheckpoint,
    SaveOnStop,
    TimedCheckpoints,
    UseFailureCheckpoints,
)
from rllib_llm.shared.storage import BestEffort, fetch_file, keep_json_rows


class ResultLog(JsonLoggerCallback):
    """Writes each result to result.json in the trial's folder, which Tune's `ResultGrid` reads.

    When the trial ends, progress.csv is made from it. To Tune it is a JSON logger, since Tune adds
    its own where it finds none; of that it takes only what writes params.json and params.pkl.
    `NoOtherCsv` goes with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[Any, IO[bytes]] = {}
        self._starts = _Starts()
        self._disk = BestEffort(f"{EXPR_RESULT_FILE} and {EXPR_PROGRESS_FILE}")

    def log_trial_start(self, trial: Any) -> None:
        self._close(trial)
        self._starts.begin(trial)
        with self._disk.writing():
            trial.init_local_path()
            self.update_config(trial, trial.config)

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        if result.get(STOP_RUN) and _is_known(trial, result):
            return  # stopped while it was paused: its last result once more
        with self._disk.writing():
            self._write(trial, result)

    def _write(self, trial: Any, result: dict[str, Any]) -> None:
        if trial not in self._files:  # its first result says what of the file to keep
            file = _folder_of(trial) / EXPR_RESULT_FILE
            keep_json_rows(file, TRAINING_ITERATION, *self._starts.rows_to_replace(trial, result))
            # Unbuffered: what a full disk refuses must not stand before the next row.
            self._files[trial] = file.open("ab", buffering=0)
        row = json.dumps(result, cls=SafeFallbackEncoder) + "\n"
        _append_whole(self._files[trial], row.encode())
        self._starts.count(trial)

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        self._close(trial)
        with self._disk.writing():
            write_csv(_folder_of(trial))

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._starts.fail(trial)

    def _close(self, trial: Any) -> None:
        if trial in self._files:
            self._files.pop(trial).close()


class NoOtherCsv(CSVLoggerCallback):
    """Writes nothing; prevents Tune from adding its own CSV logger. (One callback that was a logger
    of both kinds would count as one.)"""

    def log_trial_start(self, trial: Any) -> None: ...

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None: ...

    def log_trial_end(self, trial: Any, failed: bool = False) -> None: ...


class _Starts:
    """The rows of a trial's file that its latest start computes again.

    A trial that goes on from a checkpoint of its own, or from none, replaces the iterations after
    that. One that goes on from the checkpoint of another trial of its run, as population-based
    training makes it, has its own rows as its past, whatever their iterations; only where it
    failed and goes on from that checkpoint once more, the rows since then are replaced.
    """

    def __init__(self) -> None:
        self._sources: dict[Any, Path | None] = {}  # checkpoints of other trials
        self._num_rows: dict[Any, int] = {}  # logged since the trial went on from there
        self._failed: set[Any] = set()

    def begin(self, trial: Any) -> None:
        """Notes where a trial continues from, at its first result: schedulers may have changed it
        before."""
        source, before = _other_trials_checkpoint(trial), self._sources.get(trial)
        if trial not in self._failed or source != before:
            self._num_rows[trial] = 0
        self._failed.discard(trial)
        self._sources[trial] = source

    def count(self, trial: Any) -> None:
        """Notes that a row was logged."""
        self._num_rows[trial] = self._num_rows.get(trial, 0) + 1

    def fail(self, trial: Any) -> None:
        """Notes that a trial failed and will be started again."""
        self._failed.add(trial)

    def rows_to_replace(self, trial: Any, result: dict[str, Any]) -> tuple[int | None, int]:
        """`first` and `num_last` of `keep_json_rows` at the first result of a start."""
        num_rows = self._num_rows.pop(trial, 0)
        if self._sources.get(trial) is None:
            return result[TRAINING_ITERATION], 0
        return None, num_rows


def _is_known(trial: Any, result: dict[str, Any]) -> bool:
    """Whether the trial gave the result of this iteration before."""
    return (trial.last_result or {}).get(TRAINING_ITERATION) == result[TRAINING_ITERATION]


def _append_whole(file: IO[bytes], row: bytes) -> None:
    """Append the row, or nothing where it does not fit on the disk.

    Raises:
        OSError: it does not fit.
    """
    end = file.seek(0, os.SEEK_END)
    try:
        written = file.write(row)
        if written != len(row):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


def write_csv(folder: Path) -> None:
    """Make progress.csv from the result.json of a trial's folder, nested names joined by "/", the
    config left out. It has every column that some row has; the other rows are empty there."""
    rows = read_results(folder)
    if not rows:
        return
    names = dict.fromkeys(name for row in rows for name in row if not name.startswith("config/"))
    with (folder / EXPR_PROGRESS_FILE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _folder_of(trial: Any) -> Path:
    """The trial's folder; where that is not on this machine the one that Tune uploads there, with
    the results that a process before this one wrote."""
    filesystem, folder = trial.storage.storage_filesystem, trial.storage.trial_fs_path
    if isinstance(filesystem, LocalFileSystem):
        Path(folder).mkdir(parents=True, exist_ok=True)
        return Path(folder)
    staged = Path(trial.local_path)
    staged.mkdir(parents=True, exist_ok=True)
    source = f"{folder}/{EXPR_RESULT_FILE}"
    fetch_file(filesystem, source, staged / EXPR_RESULT_FILE)
    return staged


def _other_trials_checkpoint(trial: Any) -> Path | None:
    """The checkpoint of another trial of the run from which `trial` continues, if any."""
    if trial.checkpoint is None:
        return None
    own, path = Path(trial.storage.trial_fs_path), Path(trial.checkpoint.path)
    return path if path.parent != own and path.parent.parent == own.parent else None


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
