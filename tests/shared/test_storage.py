"""Places by URL, on a local server that speaks S3."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from rllib_llm.checkpoints.folder import CheckpointError, check, newest_usable, write_manifest
from rllib_llm.data.rollout_store import RolloutStore
from rllib_llm.data.rollouts import open_rollouts, query, rollout_folders
from rllib_llm.data.sources import load_rows
from rllib_llm.shared.errors import Problems
from rllib_llm.shared.storage import (
    CACHE,
    UrlPath,
    fetch_file,
    is_url,
    local_copy,
    place,
    placed,
    replace_text,
    upload,
)
from tests.data.tiny_rollouts import group, put
from tests.s3_server import bucket


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    os.environ[CACHE] = str(tmp_path_factory.mktemp("cache"))
    with bucket() as url:
        yield UrlPath(url)
    del os.environ[CACHE]


def test_a_url_path_does_what_a_path_does(root):
    folder = root / "a" / "b"
    assert (folder.name, folder.parent) == ("b", root / "a")
    assert not folder.exists()
    folder.mkdir()
    assert folder.is_dir() and not folder.is_file()
    (folder / "x.txt").write_text("äöü")
    assert (folder / "x.txt").is_file() and (folder / "x.txt").read_text() == "äöü"
    assert [path.name for path in folder.iterdir()] == ["x.txt"]
    assert list((root / "a").glob("*/x.*")) == [folder / "x.txt"]
    assert list(root.glob("**/x.txt")) == [folder / "x.txt"]
    assert list(root.glob("x.txt")) == []
    assert str((folder / "x.txt").relative_to(root / "a")) == "b/x.txt"
    assert (folder / "x.txt").is_relative_to(root / "a")
    assert pickle.loads(pickle.dumps(folder)) == folder
    assert placed(f"{folder.path}/x.txt", root / "a") == folder / "x.txt"
    (folder / "x.txt").unlink()
    (folder / "x.txt").unlink(missing_ok=True)
    assert not (folder / "x.txt").exists()


def test_paths_stay_paths(tmp_path):
    assert place(str(tmp_path)) == tmp_path and local_copy(str(tmp_path)) == tmp_path
    assert place("~") == Path.home() and placed(str(tmp_path / "x"), tmp_path) == tmp_path / "x"
    assert is_url("gs://bucket/x") and not is_url("/s3/bucket")


def test_a_folder_is_copied_once_for_each_state_of_its_files(root, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "one.txt").write_text("1")
    target = root / "copied"
    upload(tmp_path, target)
    first = local_copy(target)
    assert (first / "sub" / "one.txt").read_text() == "1"
    assert local_copy(str(target)) == first
    (target / "two.txt").write_text("2")
    second = local_copy(target)
    assert second != first and sorted(p.name for p in second.iterdir()) == ["sub", "two.txt"]
    assert local_copy(target / "two.txt").read_text() == "2"
    upload(tmp_path, target)  # takes its place
    assert not (target / "two.txt").exists()


def test_a_file_is_fetched_unless_it_is_there(root, tmp_path):
    (root / "log.json").write_text("there")
    for expected in ("there", "here"):
        fetch_file(root.filesystem, (root / "log.json").path, tmp_path / "log.json")
        assert (tmp_path / "log.json").read_text() == expected
        (tmp_path / "log.json").write_text("here")
    fetch_file(root.filesystem, (root / "none.json").path, tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def test_what_is_not_there_is_said(root):
    with pytest.raises(Problems, match="nothing lies there"):
        local_copy(root / "nowhere")
    with pytest.raises(Problems, match="a URL that pyarrow knows"):
        _ = UrlPath("nothing://x").path


def checkpoint(folder: Path, text: str, *, damaged: bool = False) -> Path:
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_text(text)
    write_manifest(folder, {"training_iteration": 1})
    if damaged:
        (folder / "weights.bin").write_text(text[:-1])
    return folder


def test_the_newest_usable_checkpoint_of_a_trial_is_fetched(root, tmp_path):
    trial = tmp_path / "run" / "trial_1"
    checkpoint(trial / "checkpoint_000000", "older")
    checkpoint(trial / "checkpoint_000001", "whole")
    checkpoint(trial / "checkpoint_000002", "broken", damaged=True)
    upload(tmp_path / "run", root / "run")
    for given in (root / "run", root / "run" / "trial_1"):
        copy = newest_usable(str(given))
        assert (copy / "weights.bin").read_text() == "whole"
        assert check(copy)["training_iteration"] == 1
    assert newest_usable(str(trial)) == trial / "checkpoint_000001"
    checkpoint(tmp_path / "run" / "trial_2" / "checkpoint_000000", "other")
    upload(tmp_path / "run", root / "run")
    with pytest.raises(CheckpointError, match="must be one trial: it holds 2"):
        newest_usable(str(root / "run"))


def test_rollouts_by_url(root):
    folder = root / "stage" / "trial" / "rollouts"
    store = RolloutStore(folder.path, filesystem=folder.filesystem)
    put(store, 1, *group(1, [0.0, 1.0]))
    state = store.state()
    put(store, 2, *group(2, [0.5]))
    store.stop()
    restored = RolloutStore(folder.path, filesystem=folder.filesystem)
    restored.set_state(state)
    put(restored, 2, *group(7, [0.25]))
    restored.stop()
    assert rollout_folders(str(root / "stage")) == [folder]
    found = query(open_rollouts([folder]), where="score < 0.5").to_pylist()
    assert [(row["iteration"], row["position"]) for row in found] == [(1, 1), (2, 7)]
    best = load_rows({"path": str(folder), "best_of_group": 1})
    assert [row["score"] for row in best] == [1.0, 0.25]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "record.json"
    replace_text(file, "one")
    with pytest.raises(UnicodeEncodeError):
        replace_text(file, "\ud800")  # fails while it is written
    assert file.read_text() == "one"
    elsewhere = UrlPath(f"file://{tmp_path}") / "at_a_url.json"
    replace_text(elsewhere, "one")
    elsewhere.filesystem.create_dir(str(tmp_path / ".at_a_url.json.new"))  # cannot be written
    with pytest.raises(OSError):
        replace_text(elsewhere, "two")
    assert elsewhere.read_text() == "one"
