"""A checkpoint at a URL, which takes many steps to write."""

from __future__ import annotations

import pyarrow.fs
import pytest

from rllib_llm.checkpoints.algorithm import upload_checkpoint
from rllib_llm.checkpoints.folder import MANIFEST, CheckpointError, check, write_manifest

NAME = "checkpoint_000001"


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
