"""Tune's result.json and progress.csv, each written once, where everybody reads it: in the trial's
folder. Tune's own loggers write to a temporary folder, which is copied there now and then, and copy
an older state back when a trial starts again: rows are lost. Rows computed anew they write twice.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, TextIO

from pyarrow.fs import LocalFileSystem
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, LoggerCallback
from ray.tune.result import EXPR_PROGRESS_FILE, EXPR_RESULT_FILE, TRAINING_ITERATION

from rllib_llm.storage import fetch_file
from rllib_llm.tune.json_rows import keep_json_rows, whole_lines


class _WrittenOnce(LoggerCallback):
    """Opens a trial's file at its first result, which says what of it to keep."""

    _trial_files: dict[Any, TextIO]  # Tune's own

    def __init__(self) -> None:
        super().__init__()
        self._starts = _Starts()

    def open_file(self, trial: Any, first: int | None, num_last: int) -> None:
        """Opens the file without the rows that `keep_json_rows` would cut."""
        raise NotImplementedError(f"{type(self).__name__} must define open_file.")

    def log_trial_start(self, trial: Any) -> None:
        self.log_trial_end(trial)
        self._starts.begin(trial)

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        if trial not in self._trial_files:
            self.open_file(trial, *self._starts.rows_to_replace(trial, result))
        super().log_trial_result(iteration, trial, result)
        self._starts.count(trial)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._starts.fail(trial)


class ResultJson(_WrittenOnce, JsonLoggerCallback):
    """Writes result.json: one row per iteration, also where a trial was started again, here or by
    another process.
    """

    def log_trial_start(self, trial: Any) -> None:
        super().log_trial_start(trial)
        trial.init_local_path()
        self.update_config(trial, trial.config)

    def open_file(self, trial: Any, first: int | None, num_last: int) -> None:
        file = _file_of(trial, EXPR_RESULT_FILE)
        keep_json_rows(file, TRAINING_ITERATION, first, num_last)
        self._trial_files[trial] = file.open("at", encoding="utf-8")


class ProgressCsv(_WrittenOnce, CSVLoggerCallback):
    """Writes progress.csv as `ResultJson` its file; later rows keep to the columns of the first."""

    def open_file(self, trial: Any, first: int | None, num_last: int) -> None:
        file = _file_of(trial, EXPR_PROGRESS_FILE)
        columns = keep_csv_rows(file, first, num_last)
        self._trial_files[trial] = file.open("at", encoding="utf-8", newline="")
        self._trial_continue[trial] = bool(columns)
        writer = csv.DictWriter(self._trial_files[trial], columns) if columns else None
        self._trial_csv[trial] = writer


class _Starts:
    """Which rows of a trial's file its latest start computes anew.

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
        """Notes where a trial goes on from: by its first result, schedulers may have changed it."""
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


def _other_trials_checkpoint(trial: Any) -> Path | None:
    """The checkpoint that `trial` goes on from, if it is of another trial of the run."""
    if trial.checkpoint is None:
        return None
    own, path = Path(trial.storage.trial_fs_path), Path(trial.checkpoint.path)
    return path if path.parent != own and path.parent.parent == own.parent else None


def keep_csv_rows(file: Path, first: int | None, num_last: int = 0) -> list[str]:
    """Cut rows, `first` an iteration, from the end of a CSV file as `keep_json_rows`; with them
    those that do not fit the header: Tune's own logger writes such after a restart.

    Returns:
        The columns of its header, none where no row is left: the file is gone then.
    """
    if not file.is_file():
        return []
    text = b"".join(whole_lines(file)).decode()
    header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    del rows[max(0, len(rows) - num_last) :]
    while first is not None and rows and _iteration(header, rows[-1], first) >= first:
        rows.pop()
    if not rows:
        file.unlink()
        return []
    new = file.with_suffix(".new")
    with new.open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines).writerows([header, *rows])
    new.replace(file)
    return header


def _iteration(header: list[str], row: list[str], default: int) -> int:
    """The iteration of a row, `default` for one that does not fit the header."""
    found = dict(zip(header, row, strict=False)).get(TRAINING_ITERATION, "")
    return int(found) if len(row) == len(header) and found.isdigit() else default


def _file_of(trial: Any, name: str) -> Path:
    """The file in the trial's folder, or where that is not on this machine in the one that Tune
    uploads there, with what a process before this one wrote."""
    filesystem, folder = trial.storage.storage_filesystem, trial.storage.trial_fs_path
    if isinstance(filesystem, LocalFileSystem):
        Path(folder).mkdir(parents=True, exist_ok=True)
        return Path(folder) / name
    file = Path(trial.local_path) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    fetch_file(filesystem, f"{folder}/{name}", file)
    return file
