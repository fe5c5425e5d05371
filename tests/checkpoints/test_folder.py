"""A checkpoint is there as a whole or not at all, whenever the process that saves it is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rllib_llm.checkpoints import folder as folders
from rllib_llm.checkpoints.folder import COMPLETE, MANIFEST, CheckpointError
from rllib_llm.shared.errors import Problems


def save(target: Path, text: str = "new", iteration: int = 3) -> Path:
    with folders.written_whole(target) as folder:
        (folder / "sub").mkdir()
        for name in ("a", "sub/b"):
            (folder / name).write_text(text, encoding="utf-8")
        folders.write_manifest(folder, {"iteration": iteration})
    return target


def edit_manifest(folder: Path, **changes) -> None:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    (folder / MANIFEST).write_text(json.dumps({**manifest, **changes}), encoding="utf-8")


def test_the_manifest_lists_every_file(tmp_path):
    manifest = folders.check(save(tmp_path / "c", "new"))
    assert manifest["format_version"] == 1
    assert manifest["iteration"] == 3
    # `printf new | gzip -c | tail -c8 | head -c4 | od -tx4`
    assert manifest["files"] == {name: {"bytes": 3, "crc32": 0x6BE34445} for name in ("a", "sub/b")}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_kill_at_any_line_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    script = Path(__file__).with_name("killed_saves.py")
    out = subprocess.run(
        [sys.executable, str(script), folders.__file__, str(tmp_path / "c")],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    afterwards = json.loads(out.stdout)
    assert set(afterwards) == {"old", "new"}
    assert afterwards == sorted(afterwards, reverse=True)  # old until a point, then new
    assert len(afterwards) > 30  # lines that were killed at
    left = {str(path.relative_to(tmp_path / "c")) for path in (tmp_path / "c").rglob("*")}
    own = {"train.py", "notes", "notes/today.txt", "sub/mine"}
    assert left == {"a", "sub", "sub/b", MANIFEST, *own}  # the last save cleared up


def test_an_exception_leaves_the_old_checkpoint(tmp_path):
    target = save(tmp_path / "c", "old")
    with pytest.raises(OSError, match="full"), folders.written_whole(target) as folder:
        (folder / "a").write_text("ne", encoding="utf-8")
        raise OSError("full")
    folders.check(target)
    assert (target / "a").read_text(encoding="utf-8") == "old"
    assert {path.name for path in target.iterdir()} == {"a", "sub", MANIFEST}


def test_a_given_empty_folder_is_filled_or_left_empty(tmp_path):
    with pytest.raises(OSError, match="full"), folders.written_whole(tmp_path) as folder:
        (folder / "a").write_text("ne", encoding="utf-8")
        (folder / "sub").mkdir()
        raise OSError("full")
    assert not any(tmp_path.iterdir())
    folders.check(save(tmp_path))


def test_a_checkpoint_goes_where_a_link_leads_and_into_the_folder_one_is_in(tmp_path, monkeypatch):
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "large_disk")
    save(tmp_path / "linked")
    assert (tmp_path / "linked").is_symlink() and (tmp_path / "large_disk" / "a").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save(Path("."))
    assert (tmp_path / "here" / "a").is_file()


def test_what_others_put_beside_a_checkpoint_is_kept(tmp_path):
    target = save(tmp_path / "c", "old")
    (target / "notes.txt").write_text("mine", encoding="utf-8")
    (target / "sub" / "b.txt").write_text("mine too", encoding="utf-8")
    save(target, "new")
    assert (target / "a").read_text(encoding="utf-8") == "new"
    assert (target / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert (target / "sub" / "b.txt").read_text(encoding="utf-8") == "mine too"
    folders.check(target)


def test_two_saves_into_a_folder_of_ones_own_leave_its_files(tmp_path, monkeypatch):
    """The second deleted them: the first had listed them as the checkpoint's."""
    own = {"train.py": "import ray", "data/prompts.jsonl": "{}", ".mode": "mine"}
    for name, text in own.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for text in ("old", "new"):
        save(Path("."), text)
        assert folders.check(".")["files"].keys() == {"a", "sub/b"}
        folders.make_readable(Path("."))
        assert {name: Path(name).read_text() for name in own} == own
    assert Path("train.py").stat().st_mode & 0o777 == 0o755
    assert Path("a").read_text() == "new"


@pytest.mark.parametrize("name", ["a", "sub", "sub/b/c"])
def test_a_file_of_ones_own_is_never_replaced(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match="must have no (a|sub/b) of your own: a checkpoint"):
        save(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert (tmp_path / name).read_text() == "mine"


def test_ctrl_c_while_files_are_moved_loses_none(tmp_path, monkeypatch):
    """Between setting the old ones aside and the exchange, files added since were gone."""
    target = save(tmp_path / "c", "old")
    (target / "notes.txt").write_text("mine")

    replace, left = os.replace, []

    def interrupted(source, place):
        if COMPLETE in str(source) and not left:
            raise KeyboardInterrupt
        if COMPLETE in str(source):
            left.pop()
        replace(source, place)

    for num_moved in range(3):  # of the two files and the manifest
        left = [None] * num_moved
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(folders.os, "replace", interrupted)
            save(target, f"new {num_moved}")
        assert (target / "notes.txt").read_text() == "mine"
        folders.check(target)
        now = {(target / name).read_text() for name in ("a", "sub/b")}
        assert now == {f"new {num_moved}"}


def remove(folder):
    (folder / "sub" / "b").unlink()


def cut(folder):
    (folder / "a").write_text("ne", encoding="utf-8")


def flip(folder):
    (folder / "a").write_text("nfw", encoding="utf-8")


def cut_manifest(folder):
    text = (folder / MANIFEST).read_text(encoding="utf-8")
    (folder / MANIFEST).write_text(text[:40], encoding="utf-8")


DAMAGE = {
    remove: " bytes of sub/b as written: it is missing. Choose another",
    cut: "must be undamaged, with the 3 bytes of a as written: it has 2 bytes",
    flip: "must be undamaged, with the 3 bytes of a as written: its checksum is another",
    cut_manifest: f"with a readable {MANIFEST}: it is cut off",
    lambda folder: (folder / MANIFEST).unlink(): "not made by rllib_llm, or saving it was interr",
    shutil.rmtree: "must be a checkpoint folder: there is none",
    lambda folder: edit_manifest(folder, format_version=9, rllib_llm_version="4.2"):
    "must have format_version=1: format_version=9 is of rllib_llm 4.2",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_unknown_checkpoint_is_refused_with_what_is_wrong(tmp_path, damage):
    target = save(tmp_path / "checkpoint_000000")
    damage(target)
    with pytest.raises(CheckpointError) as refused:
        folders.check(target)
    assert DAMAGE[damage] in str(refused.value)
    assert refused.value.problem.value == str(target)


def test_the_newest_usable_checkpoint_of_a_trial(tmp_path):
    trial = tmp_path / "stage" / "trial_1"
    for i in range(4):
        save(trial / f"checkpoint_{i:06d}")
    assert folders.newest_usable(trial) == trial / "checkpoint_000003"
    (trial / "checkpoint_000003" / MANIFEST).unlink()  # a copy that ended early
    flip(trial / "checkpoint_000002")
    assert folders.newest_usable(trial) == trial / "checkpoint_000001"
    assert folders.newest_usable(tmp_path / "stage") == trial / "checkpoint_000001"
    # One that is named is meant.
    with pytest.raises(CheckpointError, match="saving it was interrupted"):
        folders.newest_usable(trial / "checkpoint_000003")


def test_without_a_usable_one_the_newest_is_explained(tmp_path):
    for i in range(2):
        flip(save(tmp_path / f"checkpoint_{i:06d}"))
    with pytest.raises(CheckpointError, match="checkpoint_000001.* its checksum is another"):
        folders.newest_usable(tmp_path)
    with pytest.raises(CheckpointError, match="must hold rllib_llm_checkpoint.json"):
        folders.newest_usable(tmp_path / "checkpoint_000000" / "sub")


def test_of_several_trials_one_has_to_be_chosen(tmp_path):
    saved = save(tmp_path / "stage" / "one" / "checkpoint_000000")
    for folder in (tmp_path / "stage", tmp_path):  # a stage, and a run, of one trial
        assert folders.newest_usable(folder) == saved
    save(tmp_path / "stage" / "two" / "checkpoint_000000")
    for folder in (tmp_path / "stage", tmp_path):
        with pytest.raises(CheckpointError, match="must be one trial: it holds 2.*one, .*two"):
            folders.newest_usable(folder)


def test_of_a_run_the_last_stage_that_saved_is_meant(tmp_path):
    stages = ["sft", "grpo", "dpo"]
    record = {"experiments": [{"name": name} for name in stages]}
    (tmp_path / "run.json").write_text(json.dumps(record))
    save(tmp_path / "sft" / "one" / "checkpoint_000003")
    saved = save(tmp_path / "grpo" / "one" / "checkpoint_000000")
    (tmp_path / "dpo" / "one").mkdir(parents=True)
    assert folders.newest_usable(tmp_path) == saved
    save(tmp_path / "grpo" / "two" / "checkpoint_000000")
    with pytest.raises(CheckpointError, match="must be one trial: it holds 2.*one, .*two"):
        folders.newest_usable(tmp_path)


def test_a_folder_of_several_runs_is_told_as_such_and_names_them(tmp_path):
    """It was said to be a checkpoint whose saving had been interrupted."""
    for run in ("b", "a"):
        save(tmp_path / run / "sft" / "trial" / "checkpoint_000000")
        (tmp_path / run / "run.json").write_text("{}")
    (tmp_path / "empty" / "sft" / "trial").mkdir(parents=True)
    with pytest.raises(CheckpointError) as refused:
        folders.newest_usable(tmp_path)
    told = str(refused.value)
    assert f"checkpoint={str(tmp_path)!r} must be a checkpoint, or the folder of a trial" in told
    assert told.endswith(f"a folder of 2 of them. Name one of {tmp_path / 'a'}, {tmp_path / 'b'}.")
    with pytest.raises(Problems, match="must hold a model: .* Name one of .*a, .*b"):
        folders.find_model(str(tmp_path))


@pytest.mark.parametrize(("file", "what"), [
    ("run.json", "no checkpoint was saved in it yet"),
    ("sft/trial/result.json", "no checkpoint was saved in it yet"),
    ("trial/result.json", "no checkpoint was saved in it yet"),
    ("notes.txt", "it holds nothing that a run has saved. `rllib train` prints the checkpoints"),
])  # fmt: skip
@pytest.mark.parametrize("url", [False, True])
def test_a_folder_without_any_checkpoint_says_what_it_is(tmp_path, file, what, url):
    root = tmp_path / "results"
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text("{}")
    given = root.as_uri() if url else str(root)
    with pytest.raises(CheckpointError, match=what) as refused:
        folders.newest_usable(given)
    assert "interrupted" not in str(refused.value)
    if file != "notes.txt":  # a run that is to be served, or talked to, says so as well
        with pytest.raises(CheckpointError, match=what):
            folders.find_model(given)
