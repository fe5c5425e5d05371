"""result.json and progress.csv of trials that are started again. Tune's own loggers fail them: with
a stale copy they write rows 1 and 4, with rows computed anew 1, 2, 3, 2, 3."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.fs
import pytest

from rllib_llm.tune.json_rows import keep_json_rows
from rllib_llm.tune.result_files import ProgressCsv, ResultJson, keep_csv_rows
from rllib_llm.tune.trial_logs import RESULTS, read_json_lines


class Folder:
    """As much of a checkpoint and of Tune's `StorageContext` as the loggers read."""

    def __init__(self, path: Path) -> None:
        self.path = self.trial_fs_path = str(path)
        self.storage_filesystem = pyarrow.fs.LocalFileSystem()


class Trial:
    """As much of Tune's `Trial` as its loggers read: one of the run in `run`, begun by a process
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


class Loggers:
    """Both loggers, as one process has them."""

    def __init__(self) -> None:
        self.all = [ResultJson(), ProgressCsv()]

    def start(self, trial: Trial, checkpoint: Path | None = None) -> None:
        trial.checkpoint = None if checkpoint is None else Folder(checkpoint)
        for logger in self.all:
            logger.on_trial_start(0, [trial], trial)

    def fail(self, trial: Trial) -> None:
        for logger in self.all:
            logger.on_trial_recover(0, [trial], trial)

    def report(self, trial: Trial, *iterations: int, **more: float) -> None:
        for iteration in iterations:
            result = {"training_iteration": iteration, "config": trial.config, **more}
            for logger in self.all:
                logger.on_trial_result(0, [trial], trial, result)


@pytest.fixture
def begun(tmp_path) -> Callable[..., Trial]:
    def begin(process: int = 0) -> Trial:
        return Trial(tmp_path / "run", tmp_path / f"staging{process}")

    return begin


def read(trial: Trial) -> list[int]:
    """The iterations in both files, which are the same ones."""
    folder = Path(trial.storage.trial_fs_path)
    rows = [row["training_iteration"] for row in read_json_lines(folder / RESULTS)]
    with (folder / "progress.csv").open(encoding="utf-8") as lines:
        assert [int(row["training_iteration"]) for row in csv.DictReader(lines)] == rows
    return rows


def test_a_stale_copy_does_not_replace_newer_rows(begun):
    loggers, trial = Loggers(), begun()
    loggers.start(trial)
    loggers.report(trial, 1)
    trial.sync()
    loggers.report(trial, 2, 3)
    loggers.start(trial, Path(trial.storage.trial_fs_path) / "checkpoint_000000")  # after a pause
    loggers.report(trial, 4)
    trial.sync()
    assert read(trial) == [1, 2, 3, 4]


def test_rows_after_the_checkpoint_are_replaced(begun):
    loggers, trial = Loggers(), begun()
    loggers.start(trial)
    loggers.report(trial, 1, 2, 3)
    loggers.start(trial, Path(trial.storage.trial_fs_path) / "checkpoint_000000")
    loggers.report(trial, 2, score=0.5)
    loggers.report(trial, 3)
    trial.sync()
    assert read(trial) == [1, 2, 3]
    assert read_json_lines(Path(trial.storage.trial_fs_path) / RESULTS)[1]["score"] == 0.5


def test_a_trial_without_a_checkpoint_begins_anew(begun):
    loggers, trial = Loggers(), begun()
    loggers.start(trial)
    loggers.report(trial, 1, 2)
    loggers.start(trial)
    loggers.report(trial, 1)
    assert read(trial) == [1]


def test_another_process_goes_on_where_a_killed_one_was(begun):
    loggers, trial = Loggers(), begun(0)
    loggers.start(trial)
    loggers.report(trial, 1, 2, 3, score=0.5)
    folder = Path(trial.storage.trial_fs_path)
    for name in (RESULTS, "progress.csv"):
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write((folder / name).read_text(encoding="utf-8").splitlines()[-1][:9])
    loggers, trial = Loggers(), begun(1)
    loggers.start(trial, folder / "checkpoint_000000")
    loggers.report(trial, 3, 4, another=1.0, score=0.7)
    trial.sync()
    assert read(trial) == [1, 2, 3, 4]
    with (folder / "progress.csv").open(encoding="utf-8") as lines:
        assert [row["score"] for row in csv.DictReader(lines)] == ["0.5", "0.5", "0.7", "0.7"]


def test_a_trial_that_goes_on_from_another_keeps_its_past(begun, tmp_path):
    loggers, trial = Loggers(), begun()
    loggers.start(trial)
    loggers.report(trial, 1, 2, 3)
    loggers.start(trial, tmp_path / "run" / "t1" / "checkpoint_000004")
    loggers.report(trial, 2, 3)
    assert read(trial) == [1, 2, 3, 2, 3]
    loggers.start(trial, Path(trial.storage.trial_fs_path) / "checkpoint_000000")
    loggers.report(trial, 3)
    assert read(trial) == [1, 2, 3, 2, 3]


def test_what_a_scheduler_decides_by_a_result_is_no_start(begun, tmp_path):
    """Tune asks it before it tells the loggers of that result."""
    loggers, trial = Loggers(), begun()
    loggers.start(trial)
    loggers.report(trial, 1, 2, 3)
    loggers.start(trial, Path(trial.storage.trial_fs_path) / "checkpoint_000000")
    trial.checkpoint = Folder(tmp_path / "run" / "t1" / "checkpoint_000004")
    loggers.report(trial, 2)
    assert read(trial) == [1, 2]


def test_a_trial_that_went_on_from_another_may_fail(begun, tmp_path):
    loggers, trial = Loggers(), begun()
    source = tmp_path / "run" / "t1" / "checkpoint_000004"
    loggers.start(trial)
    loggers.report(trial, 1, 2, 3)
    loggers.start(trial, source)
    loggers.report(trial, 2, 3)
    for _ in range(2):  # the second time before its first result
        loggers.fail(trial)
        loggers.start(trial, source)
    loggers.report(trial, 2)
    assert read(trial) == [1, 2, 3, 2]
    loggers.start(trial, source)  # the scheduler's doing, again
    loggers.report(trial, 2)
    assert read(trial) == [1, 2, 3, 2, 2]


def test_rows_that_do_not_fit_the_header_are_cut(begun, tmp_path):
    """As Tune's own logger leaves them where a restarted trial's first result has fewer columns."""
    file = tmp_path / "file"
    file.write_text("date,eval,training_iteration\nx,3,1\nx,,2\nx,2\nx,3\n", encoding="utf-8")
    assert keep_csv_rows(file, 3) == ["date", "eval", "training_iteration"]
    assert file.read_text(encoding="utf-8").split() == ["date,eval,training_iteration", "x,3,1",
                                                        "x,,2"]  # fmt: skip
    text = 'text,training_iteration\r\n"a\nb",1\r\n"a\n'  # killed within a text of two lines
    file.write_bytes(text.encode())
    assert keep_csv_rows(file, 2) == ["text", "training_iteration"]
    assert file.read_bytes().decode() == 'text,training_iteration\r\n"a\nb",1\r\n'


def test_a_trial_begun_anew_has_the_columns_of_its_results(begun):
    loggers, trial = Loggers(), begun()
    loggers.start(trial)
    loggers.report(trial, 1)
    loggers.start(trial)
    loggers.report(trial, 1, another=0.25)
    with (Path(trial.storage.trial_fs_path) / "progress.csv").open(encoding="utf-8") as lines:
        assert [row["another"] for row in csv.DictReader(lines)] == ["0.25"]


def test_files_without_a_whole_row_are_begun_anew(tmp_path):
    file = tmp_path / "file"
    keep_json_rows(file, "a", 1)
    assert keep_csv_rows(file, 1) == []
    assert not file.exists()
    file.write_text("training_ite", encoding="utf-8")
    keep_json_rows(file, "a", 1)
    assert file.read_bytes() == b""
    file.write_text("training_ite", encoding="utf-8")
    assert keep_csv_rows(file, None) == []
    assert not file.exists()
