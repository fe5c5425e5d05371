"""Tune's result.json and progress.csv, each written once, where everybody reads it: in the trial's
folder. Tune's own loggers write to a temporary folder, which is copied there now and then, and copy
an older state back when a trial starts again: rows are lost. Rows computed anew they write twice.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback
from ray.tune.result import EXPR_PROGRESS_FILE, EXPR_RESULT_FILE, TRAINING_ITERATION

from rllib_llm.algorithms.json_rows import keep_json_rows, whole_lines


class ResultJson(JsonLoggerCallback):
    """Writes result.json: one row per iteration, also where a trial was started again, here or by
    another process. The run's storage must be a folder.
    """

    def log_trial_start(self, trial: Any) -> None:
        self.log_trial_end(trial)  # its file is opened by the first result, which says what to keep
        trial.init_local_path()
        self.update_config(trial, trial.config)

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        if trial not in self._trial_files:
            file = _file_of(trial, EXPR_RESULT_FILE)
            keep_json_rows(file, TRAINING_ITERATION, _first_to_replace(trial, result))
            self._trial_files[trial] = file.open("at", encoding="utf-8")
        super().log_trial_result(iteration, trial, result)


class ProgressCsv(CSVLoggerCallback):
    """Writes progress.csv as `ResultJson` its file; later rows keep to the columns of the first."""

    def log_trial_start(self, trial: Any) -> None:
        self.log_trial_end(trial)

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        if trial not in self._trial_files:
            file = _file_of(trial, EXPR_PROGRESS_FILE)
            columns = keep_csv_rows(file, _first_to_replace(trial, result))
            lines = file.open("at", encoding="utf-8", newline="")
            self._trial_files[trial] = lines
            self._trial_continue[trial] = bool(columns)
            self._trial_csv[trial] = csv.DictWriter(lines, columns) if columns else None
        super().log_trial_result(iteration, trial, result)


def keep_csv_rows(file: Path, first: int | None) -> list[str]:
    """Cut rows of iteration `first` and later from the end of a CSV file as `keep_json_rows`.

    Returns:
        The columns of its header, none where the file is missing or empty.
    """
    if not file.is_file():
        return []
    text = b"".join(whole_lines(file)).decode()
    header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    if not header:
        file.unlink()
        return []
    place = header.index(TRAINING_ITERATION)
    while first is not None and rows and int(rows[-1][place]) >= first:
        rows.pop()
    new = file.with_suffix(".new")
    with new.open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines).writerows([header, *rows])
    new.replace(file)
    return header


def _first_to_replace(trial: Any, result: dict[str, Any]) -> int | None:
    """The iteration from which on a started trial's earlier rows are computed anew, by its first
    result. None where it goes on from the checkpoint of another trial of its run, as population-
    based training makes it: its own rows are its past, whatever their iterations."""
    own = Path(trial.storage.trial_fs_path)
    if trial.checkpoint is not None:
        source = Path(trial.checkpoint.path).parent
        if source != own and source.parent == own.parent:
            return None
    return result[TRAINING_ITERATION]


def _file_of(trial: Any, name: str) -> Path:
    folder = Path(trial.storage.trial_fs_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name
