"""What a run writes beside checkpoints ends nothing where the disk is full: /dev/full refuses all
writes as a full disk does."""

from __future__ import annotations

import errno
import json
import os
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow.fs import LocalFileSystem

from rllib_llm.runs.callbacks import NoRoomError, ResultLog, append_whole, fit
from rllib_llm.runs.trial_checkpoints import KeepBestCheckpoint
from rllib_llm.shared.messages import ACTIVITY_FILE, MESSAGES_FILE, MessageLog, TrialMessage
from rllib_llm.shared.storage import BestEffort

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


def test_status_files_that_cannot_be_written_are_told_once(tmp_path):
    (tmp_path / MESSAGES_FILE).symlink_to("/dev/full")
    (tmp_path / ACTIVITY_FILE).with_suffix(".new").symlink_to("/dev/full")
    log = MessageLog(tmp_path)
    with pytest.warns(UserWarning, match="cannot be written: .*No space left") as caught:
        log.write([TrialMessage("trial", "slow", is_warning=True)], 1)
        log.doing("learning")
        log.doing("sampling")
    assert len(caught) == 1


class Trial(SimpleNamespace):
    __hash__ = object.__hash__


def test_results_that_find_no_room_end_no_run(tmp_path):
    trial = Trial(
        trial_id="a",
        config={},
        checkpoint=None,
        local_path=str(tmp_path),
        init_local_path=lambda: None,
        storage=SimpleNamespace(storage_filesystem=LocalFileSystem(), trial_fs_path=str(tmp_path)),
    )
    for name in ("params.json", "params.pkl", "result.json", "progress.csv"):
        (tmp_path / name).symlink_to("/dev/full")
    log = ResultLog()
    with pytest.warns(UserWarning, match="No space left") as caught:
        log.log_trial_start(trial)
        log.log_trial_result(1, trial, {"training_iteration": 1})
        log.log_trial_end(trial)
    assert len(caught) == 1


def test_a_row_that_does_not_fit_leaves_no_half_of_it(tmp_path):
    class Short:
        """A file that takes five bytes more."""

        def __init__(self, file):
            self.file = file

        def write(self, data):
            return self.file.write(data[:5])

        def __getattr__(self, name):
            return getattr(self.file, name)

    path = tmp_path / "result.json"
    path.write_text('{"a": 1}\n')
    with path.open("ab", buffering=0) as file:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            append_whole(Short(file), b'{"a": 2}\n')
        append_whole(file, b'{"a": 3}\n')
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 3]


def test_a_best_checkpoint_that_finds_no_room_is_told(tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoint_000001"
    checkpoint.mkdir()
    (tmp_path / "best_checkpoint.json").symlink_to("/dev/full")
    trial = SimpleNamespace(
        trial_id="a", last_result={"training_iteration": 1, "eval": {"scores": 1.0}}
    )
    place = SimpleNamespace(path=str(checkpoint), filesystem=LocalFileSystem())
    with pytest.warns(UserWarning, match="best_checkpoint cannot be written"):
        KeepBestCheckpoint().on_checkpoint(trial, place)


def test_another_error_is_no_full_disk():
    with pytest.raises(ZeroDivisionError), warnings.catch_warnings():
        warnings.simplefilter("error")
        with BestEffort("x").writing():
            raise ZeroDivisionError


def test_a_trial_s_error_that_was_cut_short_is_told_as_a_full_disk():
    """Tune reads what ended a trial from its folder, after the run."""

    class Tuner:
        def fit(self):
            return pickle.loads(b"")

    with pytest.raises(NoRoomError, match=os.strerror(errno.ENOSPC)):
        fit(Tuner(), Tuner, max_failures=0, tell=print)
