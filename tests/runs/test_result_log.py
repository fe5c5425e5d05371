"""Results of trials that are started again. Tune's own loggers fail these tests: with a stale copy
they write rows 1 and 4, with rows computed anew 1, 2, 3, 2, 3."""

from __future__ import annotations

import csv
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.fs
import pytest

from rllib_llm.runs.callbacks import CsvAtEnd, ResultLog
from rllib_llm.runs.results import read_json_lines
from rllib_llm.shared.run_layout import RESULTS
from rllib_llm.shared.storage import keep_json_rows


class Folder:
    """As much of a checkpoint and of Tune's `StorageContext` as the logger reads."""

    def __init__(self, path: Path) -> None:
        self.path = self.trial_fs_path = str(path)
        self.storage_filesystem = pyarrow.fs.LocalFileSystem()


class Trial:
    """As much of Tune's `Trial` as a logger reads: one of the run in `run`, begun by a process
    whose temporary folder is `staging`."""

    def __init__(self, run: Path, staging: Path, name: str = "t0") -> None:
        self.config = {"lr": 1.0}
        self.storage = Folder(run / name)
        self.local_path = str(staging / name)
        self.checkpoint: Folder | None = None
        self.init_local_path()

    def init_local_path(self) -> None:
        Path(self.local_path).mkdir(parents=True, exist_ok=True)

    def sync(self) -> None:
        """Copy the temporary folder to the run's, as Tune does now and then."""
        shutil.copytree(self.local_path, self.storage.trial_fs_path, dirs_exist_ok=True)


class Log(ResultLog):
    """The logger as one process has it, in short."""

    def start(self, trial: Trial, checkpoint: Path | None = None) -> None:
        trial.checkpoint = None if checkpoint is None else Folder(checkpoint)
        self.on_trial_start(0, [trial], trial)

    def fail(self, trial: Trial) -> None:
        self.on_trial_recover(trial)

    def report(self, trial: Trial, *iterations: int, **more: float) -> None:
        for iteration in iterations:
            result = {"training_iteration": iteration, "config": trial.config, **more}
            self.on_trial_result(0, [trial], trial, result)


@pytest.fixture
def begun(tmp_path) -> Callable[..., Trial]:
    def begin(process: int = 0) -> Trial:
        return Trial(tmp_path / "run", tmp_path / f"staging{process}")

    return begin


def read(trial: Trial) -> list[int]:
    """The iterations in its result.json."""
    rows = read_json_lines(Path(trial.storage.trial_fs_path) / RESULTS)
    return [row["training_iteration"] for row in rows]


def test_a_stale_copy_does_not_replace_newer_rows(begun):
    log, trial = Log(), begun()
    log.start(trial)
    log.report(trial, 1)
    trial.sync()
    log.report(trial, 2, 3)
    log.start(trial, Path(trial.storage.trial_fs_path) / "checkpoint_000000")  # after a pause
    log.report(trial, 4)
    trial.sync()
    assert read(trial) == [1, 2, 3, 4]


def test_rows_after_the_checkpoint_are_replaced(begun):
    log, trial = Log(), begun()
    log.start(trial)
    log.report(trial, 1, 2, 3)
    log.start(trial, Path(trial.storage.trial_fs_path) / "checkpoint_000000")
    log.report(trial, 2, score=0.5)
    log.report(trial, 3)
    trial.sync()
    assert read(trial) == [1, 2, 3]
    assert read_json_lines(Path(trial.storage.trial_fs_path) / RESULTS)[1]["score"] == 0.5


def test_a_trial_without_a_checkpoint_begins_anew(begun):
    log, trial = Log(), begun()
    log.start(trial)
    log.report(trial, 1, 2)
    log.start(trial)
    log.report(trial, 1)
    assert read(trial) == [1]


def test_another_process_goes_on_where_a_killed_one_was(begun):
    log, trial = Log(), begun(0)
    log.start(trial)
    log.report(trial, 1, 2, 3, score=0.5)
    folder = Path(trial.storage.trial_fs_path)
    with (folder / RESULTS).open("a", encoding="utf-8") as file:
        file.write((folder / RESULTS).read_text(encoding="utf-8").splitlines()[-1][:9])
    log, trial = Log(), begun(1)
    log.start(trial, folder / "checkpoint_000000")
    log.report(trial, 3, 4, another=1.0, score=0.7)
    trial.sync()
    assert read(trial) == [1, 2, 3, 4]
    assert [row["score"] for row in read_json_lines(folder / RESULTS)] == [0.5, 0.5, 0.7, 0.7]


def test_a_trial_that_goes_on_from_another_keeps_its_past(begun, tmp_path):
    log, trial = Log(), begun()
    log.start(trial)
    log.report(trial, 1, 2, 3)
    log.start(trial, tmp_path / "run" / "t1" / "checkpoint_000004")
    log.report(trial, 2, 3)
    assert read(trial) == [1, 2, 3, 2, 3]
    log.start(trial, Path(trial.storage.trial_fs_path) / "checkpoint_000000")
    log.report(trial, 3)
    assert read(trial) == [1, 2, 3, 2, 3]


def test_what_a_scheduler_decides_by_a_result_is_no_start(begun, tmp_path):
    """Tune asks it before it tells the loggers of that result."""
    log, trial = Log(), begun()
    log.start(trial)
    log.report(trial, 1, 2, 3)
    log.start(trial, Path(trial.storage.trial_fs_path) / "checkpoint_000000")
    trial.checkpoint = Folder(tmp_path / "run" / "t1" / "checkpoint_000004")
    log.report(trial, 2)
    assert read(trial) == [1, 2]


def test_a_trial_that_went_on_from_another_may_fail(begun, tmp_path):
    log, trial = Log(), begun()
    source = tmp_path / "run" / "t1" / "checkpoint_000004"
    log.start(trial)
    log.report(trial, 1, 2, 3)
    log.start(trial, source)
    log.report(trial, 2, 3)
    for _ in range(2):  # the second time before its first result
        log.fail(trial)
        log.start(trial, source)
    log.report(trial, 2)
    assert read(trial) == [1, 2, 3, 2]
    log.start(trial, source)  # the scheduler's doing, again
    log.report(trial, 2)
    assert read(trial) == [1, 2, 3, 2, 2]


def test_the_csv_of_a_trial_that_ended_has_every_column(begun):
    log, trial = Log(), begun()
    folder = Path(trial.storage.trial_fs_path)
    log.start(trial)
    log.on_trial_error(0, [trial], trial)
    assert not (folder / "progress.csv").exists()  # there was no result
    log.report(trial, 1, text="a\nb")
    log.report(trial, 2, eval={"scores": float("nan")})
    CsvAtEnd().on_trial_complete(0, [trial], trial)
    with (folder / "progress.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows == [
        {"training_iteration": "1", "text": "a\nb", "eval/scores": ""},
        {"training_iteration": "2", "text": "", "eval/scores": "nan"},
    ]


def test_the_settings_of_a_trial_lie_beside_its_results(begun):
    """As Tune's own logger writes them, in the folder that Tune copies to the trial's."""
    log, trial = Log(), begun()
    log.start(trial)
    trial.sync()
    folder = Path(trial.storage.trial_fs_path)
    assert json.loads((folder / "params.json").read_text(encoding="utf-8")) == {"lr": 1.0}
    assert pickle.loads((folder / "params.pkl").read_bytes()) == {"lr": 1.0}


def test_a_file_without_a_whole_row_is_begun_anew(tmp_path):
    file = tmp_path / "file"
    keep_json_rows(file, "a", 1)
    assert not file.exists()
    file.write_text("training_ite", encoding="utf-8")
    keep_json_rows(file, "a", 1)
    assert file.read_bytes() == b""


def test_the_result_that_a_stopped_pause_repeats_stands_once(begun):
    trial, log = begun(), Log()
    trial.last_result = {}
    log.start(trial)
    log.report(trial, 1, 2)
    trial.last_result = {"training_iteration": 2}
    log.report(trial, 2, stop_run=True)
    assert read(trial) == [1, 2]
