"""A checkpoint at a URL, which takes many steps to write."""

from __future__ import annotations

import pyarrow.fs
import pytest

from rllib_llm.checkpoints.algorithm import upload_checkpoint
from rllib_llm.checkpoints.folder import (
    MANIFEST,
    CheckpointError,
    check,
    newest_usable,
    write_manifest,
)
from rllib_llm.shared.storage import CACHE, UrlPath, upload
from tests.s3_server import bucket

NAME = "checkpoint_000001"


def test_a_damaged_one_is_told_by_its_url(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    made = tmp_path / "made"
    made.mkdir()
    (made / "a").write_text("1")
    write_manifest(made, {})
    with bucket() as url:
        target = UrlPath(url) / NAME
        upload(made, target)
        assert check(newest_usable(target))["files"].keys() == {"a"}
        (target / "a").unlink()
        with pytest.raises(CheckpointError) as told:
            newest_usable(target)
    assert told.value.problem.value == str(target) and "missing" in told.value.problem.reason


def test_an_upload_that_fails_leaves_no_mixture_of_two_checkpoints(tmp_path):
    bucket = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    target = tmp_path / NAME
    for number in (1, 2, 3):
        made = tmp_path / f"made{number}"
        made.mkdir()
        (made / "a").write_text(f"{number}")
        (made / "b").write_text(f"{number}")
        write_manifest(made, {})
        if number == 2:
            (target / "b").unlink()
            (target / "b").mkdir()  # no file can be written there
            with pytest.raises(OSError):
                upload_checkpoint(made, NAME, bucket)
            assert not (target / MANIFEST).exists()
            with pytest.raises(CheckpointError, match="written last"):
                check(target)
            (target / "b").rmdir()
        else:
            upload_checkpoint(made, NAME, bucket)
            assert check(target)["files"].keys() == {"a", "b"}
            assert (target / "a").read_text() == f"{number}"
