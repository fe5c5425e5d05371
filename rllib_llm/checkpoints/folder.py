"""Checkpoint folders on disk, complete or absent, with a manifest.

A folder is a checkpoint once its manifest is in it, which is written last: format version, and
size and checksum of every file. One is written into a hidden folder inside its own and moved out of
it file by file once it is complete; a move that was killed is ended by the next reader or writer.
So a kill, a full disk or a copy that ended early (Tune's own, into the trial's folder) leaves
either a checkpoint or something that `check` refuses, and the previous checkpoint as it was. Files
that no manifest lists are the user's: they are never moved, replaced or removed.

Checksums are taken from the files, so every byte that was written is read again. Whatever is large
(weights, the optimiser's moments) is new in each checkpoint: there are no unchanged files to pass
over. CPU seconds per GiB, one core: safetensors 0.4, pickled moments 1.1, Tune's copy 0.4, checksum
0.5. That is two fifths more for a checkpoint of a trial, where the disk keeps up; one every five
minutes of a model with 1 GiB of weights (3 GiB in all) takes 1.5 s for it.

Nothing is flushed to the platter: after a power cut the checksum tells, and `newest_usable` goes
further back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rllib_llm.shared.errors import Problems
from rllib_llm.shared.run_layout import CHECKPOINTS, RESULTS, RUN_RECORD, RunFolder, name_one
from rllib_llm.shared.storage import Place, folder_like, is_url, local_copy, place

# Where a checkpoint of ours holds the trained model, as an ordinary Hugging Face folder; the last
# part is RLlib's DEFAULT_MODULE_ID.
MODEL_IN_CHECKPOINT = Path("learner_group", "learner", "rl_module", "default_policy")
MANIFEST = "rllib_llm_checkpoint.json"
STAGED = f".{MANIFEST}."  # begins the names of folders in a checkpoint's from which it is moved
COMPLETE = f"{STAGED}complete"
FORMAT_VERSION = 1
CHUNK_BYTES = 16 * 1024**2
OTHERS = "Choose another; of a trial's folder the newest usable one is taken"
PRINTED = "`rllib train` prints the checkpoints and models it wrote"
# Entries of RLlib's checkpoints, whole or not.
PARTS = ("class_and_ctor_args.pkl", "metadata.json", "learner_group")


class CheckpointError(Problems):
    """A folder that is no checkpoint, or a damaged one, or one of an unknown format."""


def _wrong(folder: object, rule: str, reason: object, remedy: str = OTHERS) -> CheckpointError:
    return CheckpointError("checkpoint", rule, reason, remedy, str(folder))


def write_manifest(folder: Path, about: dict[str, Any]) -> None:
    """Turns `folder`, whose files are all written, into a checkpoint. `about`: information for
    readers."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": _crc32(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    manifest = {"format_version": FORMAT_VERSION, **about, "files": files}
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    os.replace(partial, folder / MANIFEST)


def make_readable(folder: Path) -> None:
    """Gives safetensors in `folder`, which are created private, the usual mode of new files."""
    probe = folder / f"{STAGED}mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*.safetensors"):
        path.chmod(mode)


def check(folder: str | Path) -> dict[str, Any]:
    """The manifest of the checkpoint `folder`, every file of which was read and is as written.

    Raises:
        CheckpointError: saying what is wrong with it, and what to do.
    """
    folder = Path(folder)
    _recover(folder)
    manifest = read_manifest(folder)
    for name, written in manifest["files"].items():
        file = folder / name
        num_bytes = file.stat().st_size if file.is_file() else -1
        is_whole = num_bytes == written["bytes"]
        if not is_whole or _crc32(file) != written["crc32"]:
            what = "its checksum is another" if is_whole else f"it has {num_bytes} bytes"
            what = what if file.is_file() else "it is missing"
            rule = f"be undamaged, with the {written['bytes']} bytes of {name} as written"
            raise _wrong(folder, rule, what)
    return manifest


def newest_usable(folder: str | Place) -> Path:
    """`folder` itself if it is a checkpoint, or the newest usable one of the trial it belongs to;
    of a URL a copy of it.

    Args:
        folder: a checkpoint, a trial's folder, or that of a stage or run with one trial in it
            (of a run's last stage).

    Raises:
        CheckpointError: there are several trials, or there is no usable checkpoint, saying what is
            wrong with the newest.
    """
    folder = place(folder)
    found = _checkpoints_below(folder)
    if not found and is_url(folder) and not (folder / MANIFEST).is_file() and folder.is_dir():
        raise _no_checkpoint(folder)  # before all that is there is copied
    return _first_usable(found or [folder])


def _first_usable(candidates: Sequence[Place]) -> Path:
    errors: list[CheckpointError] = []
    for candidate in candidates:
        copy = local_copy(candidate)
        try:
            check(copy)
            return copy
        except CheckpointError as error:  # about the copy
            found = [replace(problem, value=str(candidate)) for problem in error.found]
            errors.append(CheckpointError(found))
    raise errors[0]


def _checkpoints_below(folder: Place) -> list[Place]:
    """Those of a trial by its folder, or by that of its stage or run, the newest first. Of a run's
    stages the last with checkpoints is meant."""
    trials = RunFolder(folder).saved_trials()
    if len(trials) > 1:
        raise _wrong(folder, "be one trial", f"it holds {len(trials)}", name_one(trials))
    return RunFolder(trials[0]).checkpoints() if trials else []


@contextlib.contextmanager
def written_whole(target: str | Path) -> Iterator[Path]:
    """Gives a folder to write a checkpoint into, its manifest included; `target` becomes it when
    the context ends, and stays as it was when an exception does or the process is killed.

    Raises:
        CheckpointError: another file lies where one of the checkpoint belongs.
    """
    target = Path(target).resolve()  # of a link the folder, on whatever disk
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    _recover(target)
    for leftover in target.glob(f"{STAGED}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=STAGED, dir=target))
    try:
        yield partial
        for name in sorted(read_manifest(partial)["files"].keys() - _own_files(target)):
            above = [target / parent for parent in Path(name).parents]
            is_free = all(path.is_dir() for path in above if path.exists())
            if not is_free or (target / name).exists():
                raise _wrong(target, f"have no {name} of your own", "a checkpoint writes it",
                             "Choose another folder, or remove the file")  # fmt: skip
        os.rename(partial, target / COMPLETE)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # others have written to it meanwhile
                target.rmdir()
        raise
    _recover(target)


def _recover(target: Path) -> None:
    """Moves a complete new checkpoint in `target` to its place, or ends doing so after a kill."""
    complete = target / COMPLETE
    if not (complete / MANIFEST).is_file():
        return
    new = read_manifest(complete)["files"]
    for name in new:
        if (complete / name).is_file():  # else it was moved before the kill
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(complete / name, target / name)
    for name in _own_files(target) - set(new):
        (target / name).unlink(missing_ok=True)
    os.replace(complete / MANIFEST, target / MANIFEST)
    shutil.rmtree(complete, ignore_errors=True)


def _own_files(target: Path) -> set[str]:
    """The names of the files of the checkpoint `target`; none without a readable manifest."""
    try:
        return set(read_manifest(target)["files"])
    except CheckpointError:
        return set()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the checkpoint `folder`; its other files are not read.

    Raises:
        CheckpointError: it has none, or one of an unknown format.
    """
    if not folder.is_dir():
        raise _wrong(folder, "be a checkpoint folder", "there is none", _named_like(folder))
    file = folder / MANIFEST
    if not file.is_file():
        raise _no_checkpoint(folder)
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version, files = manifest["format_version"], manifest["files"]
        known = isinstance(files, dict)
    except (ValueError, KeyError, TypeError) as error:
        what = f"it is cut off ({error})"
        raise _wrong(folder, f"be undamaged, with a readable {MANIFEST}", what) from error
    if version != FORMAT_VERSION or not known:
        made_by = manifest.get("rllib_llm_version", "an unknown version")
        what = f"format_version={version!r} is of rllib_llm {made_by}"
        raise _wrong(folder, f"have format_version={FORMAT_VERSION}", what, "Read it with that")
    return manifest


def _no_checkpoint(folder: Place) -> CheckpointError:
    """The error of a folder without a manifest, by what it is."""
    if (folder / "config.json").is_file():
        return _wrong(folder, "be a checkpoint", "it is a model's folder", "Name the checkpoint, "
                      "trial or run that it is of")  # fmt: skip
    # Called as Tune calls checkpoints, with what is in one, or in one.
    is_called = re.fullmatch(r"(best_)?checkpoint(_\d+)?", folder.name)
    marks = (folder.parent / MANIFEST, *(folder / part for part in PARTS))
    if is_called or any(mark.exists() for mark in marks):
        return _wrong(folder, f"hold {MANIFEST}, which is written last", "it was not made by "
                      "rllib_llm, or saving it was interrupted")  # fmt: skip
    inner = RunFolder(folder).holding(CHECKPOINTS)
    what = "it holds nothing that a run has saved"
    if inner:
        what = f"it is a folder of {len(inner)} of them"
    elif _is_of_run(folder):
        what = "no checkpoint was saved in it yet, which is done every few minutes and at the end"
    rule = "be a checkpoint, or the folder of a trial, a stage or a run with one"
    return _wrong(folder, rule, what, name_one(inner) or PRINTED)


def _is_of_run(folder: Place) -> bool:
    return (folder / RUN_RECORD).is_file() or bool(RunFolder(folder).in_trials(RESULTS))


def _named_like(folder: Path) -> str:
    close = folder_like(folder, cutoff=0.5)
    return f"Did you mean {close!r}?" if close else PRINTED


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def find_model(given: str) -> str:
    """Return the Hugging Face folder in `given`; hub ids and dotted paths are returned unchanged.

    In the folder of a stage with one trial the trial is meant, in that of a run its last stage.

    Raises:
        CheckpointError: there is no model in it, it holds several trials, or no checkpoint of its
            trial is usable.
    """
    folder = place(given)
    if isinstance(folder, Path) and not folder.exists():
        is_beside_others = "/" in given and folder.parent.is_dir()
        if given.startswith((".", "/", "~")) or given.count("/") > 1 or is_beside_others:
            raise _wrong(given, "be a folder", "there is none", _named_like(folder))
        return given
    for candidate in (folder, folder / "model"):
        if (candidate / "config.json").is_file():
            return str(local_copy(candidate))
    found = _checkpoints_below(folder)
    if folder.exists() and not (found or (folder / MODEL_IN_CHECKPOINT).is_dir()):
        if _is_of_run(folder):
            raise _no_checkpoint(folder)
        inner = name_one(RunFolder(folder).holding(CHECKPOINTS))
        what = f"there is no config.json in it, nor in {MODEL_IN_CHECKPOINT} or model below it"
        remedy = inner or "Give a checkpoint of a language model"
        raise _wrong(given, "hold a model", what, remedy)
    return str(_first_usable(found or [folder]) / MODEL_IN_CHECKPOINT)
