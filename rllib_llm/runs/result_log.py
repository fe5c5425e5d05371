"""A trial's results as JSON Lines: one row per iteration, however often it is started again."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import os
from pathlib import Path
from typing import IO, Any

from pyarrow.fs import LocalFileSystem
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback
from ray.tune.result import EXPR_PROGRESS_FILE, EXPR_RESULT_FILE, TRAINING_ITERATION
from ray.tune.utils.util import SafeFallbackEncoder

from rllib_llm.overseer.oversight import STOP_RUN
from rllib_llm.runs.trial_logs import read_results
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
