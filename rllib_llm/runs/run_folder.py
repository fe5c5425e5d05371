"""The folder of a run: a new one for each start, or with --resume the one of the same run.

`run.json` in it says which file (or command) started the run and with which experiments. A resumed
run continues what was started: a setting that Tune keeps from the start may not differ.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import platform
import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rllib_llm.runs.experiments import KEYS, Experiment
from rllib_llm.runs.results import StageResult, flatten, read_results
from rllib_llm.shared.errors import Problem, Problems, report, require
from rllib_llm.shared.process import cpu_info
from rllib_llm.shared.run_layout import CHECKPOINTS, REPLACED, RESULTS, RUN_RECORD, RunFolder
from rllib_llm.shared.storage import Place, UrlPath, place, read_json, remove, replace_text

COMMAND_LINE = "the command line"  # the source of runs that no file describes
DEFAULT_STORAGE = "~/ray_results"
# What a resumed stage takes from the new start (see `new_terms.py`); all else is as it began.
CHANGEABLE = frozenset(
    {"stop", "max_failures", "checkpoint_config", "pass_criteria", "description", "storage_path"}
)
STAMP = r"_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?"


def storage_root(given: str | None, experiments: Iterable[Experiment]) -> Place:
    """Return the folder or URL under which runs lie: the option, the file's, or Ray's default."""
    stored = (experiment.storage_path for experiment in experiments if experiment.storage_path)
    root = place(given or next(stored, None) or DEFAULT_STORAGE)
    return root.resolve() if isinstance(root, Path) else root


def new_folder(
    root: Place, name: str, chosen: str | None, source: str, experiments: Sequence[Experiment]
) -> Place:
    """Return a new folder for a run, containing its record.

    Args:
        root: where runs lie.
        name: what the folder's name begins with.
        chosen: the folder's whole name, where the user gave one.
        source: the file that describes the run, or `COMMAND_LINE`.

    Raises:
        Problems: a run of the chosen name is there already.
    """
    stamped = f"{name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    for number in itertools.count(1):
        folder = root / (chosen or stamped + (f"_{number}" if number > 1 else ""))
        if isinstance(folder, UrlPath):
            # Object stores cannot create a file only where there is none, so that of several runs
            # that begin in one second each has a name of its own.
            folder = folder if chosen else root / f"{stamped}_{secrets.randbelow(10**12)}"
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            with contextlib.suppress(FileExistsError):  # of several that start at once, one does
                if isinstance(folder, Path):
                    (folder / RUN_RECORD).touch(exist_ok=False)
                break
        require(not chosen, "experiment_name", chosen, "be new", f"{folder} is a run",
                "Add --resume to continue it, or choose another name")  # fmt: skip
    write_record(folder, source, experiments)
    return folder


def resumed_folder(root: Place, name: str, chosen: str | None, source: str) -> Place:
    """Return the folder of the run to continue: the chosen one, else the newest of this source.

    Raises:
        Problems: there is none.
    """
    if chosen:
        folder = root / chosen
        require(folder.is_dir(), "--resume", str(folder), "name a run that is there", "",
                "Check --storage-path and --experiment-name")  # fmt: skip
        return folder

    def source_of(run: Place) -> Any:
        return read_json(run / RUN_RECORD).get("source")

    # Of `name` alone: a run of name_2 begins with name_ as well.
    of_this_name = re.compile(re.escape(name) + STAMP)
    found = sorted((path for path in root.glob("*") if of_this_name.fullmatch(path.name)), key=str)
    ours = [path for path in found if source_of(path) == source]
    if not ours:
        others = [f"{each.name} (of {source_of(each)})" for each in found[-1:]]
        if source != COMMAND_LINE:  # runs of it with names of the user's
            others = [each.name for each in root.glob("*") if source_of(each) == source] or others
        raise Problems(f"--resume: a run {name!r} of {source}", f"lie in {str(root)!r}",
                       f"other runs there: {', '.join(sorted(others))}" if others else "",
                       "Check --experiment-name and --storage-path")  # fmt: skip
    return ours[-1]


@contextlib.contextmanager
def alone_in(folder: Place) -> Iterator[None]:
    """Keeps other processes of this machine from writing to a run's folder in the block. Has no
    effect at a URL, and where the file system knows no locks.

    Raises:
        Problems: another one does.
    """
    if isinstance(folder, UrlPath):
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                rule, why = "name a run that has ended", "a process writes to it; wait for it"
                raise Problems("--resume", rule, why, value=str(folder)) from None
        yield
    finally:
        os.close(opened)  # which ends the lock


def has_saved(stage: Place) -> bool:
    """Whether a stage has a checkpoint, or a trial that has ended; without, it begins again."""
    found = RunFolder(stage)
    if StageResult.load(stage) is not None or found.in_trials(CHECKPOINTS):
        return True
    results = (read_results(file.parent) for file in found.in_trials(RESULTS))
    return any(rows and rows[-1].get("done") for rows in results)


def set_aside(stage: Place, folders: Sequence[Place]) -> str:
    """Moves folders that are to be written anew, of trials or the stage's own, to a folder of
    `replaced` in the run's. Returns where they are, a sentence; "" where they held no file.

    At a URL, where a folder cannot be moved, they are removed.
    """
    if isinstance(stage, UrlPath):
        for folder in folders:
            if folder.exists():
                remove(folder)
        return f" Removed: {', '.join(map(str, folders))}."
    beside = stage.parent / REPLACED
    number = next(n for n in itertools.count(1) if not (beside / f"{stage.name}_{n}").exists())
    target = beside / f"{stage.name}_{number}"
    moved = False
    for folder in folders:
        assert isinstance(folder, Path), "it lies in the stage's"
        if any(file.is_file() for file in folder.rglob("*")):
            moved = True
            now = target if folder == stage else target / folder.name
            now.parent.mkdir(parents=True, exist_ok=True)
            os.rename(folder, now)
        else:
            remove(folder)
    return f" Its files so far are in {str(target)!r}." if moved else ""


def continue_run(folder: Place, source: str, experiments: Sequence[Experiment]) -> None:
    """Record the experiments with which a run continues: those that have begun in `folder` are
    requested unchanged. Call it within `alone_in`.

    Raises:
        Problems: all settings that differ and would not take effect.
    """
    record = read_json(folder / RUN_RECORD)
    before = {spec["name"]: spec for spec in record.get("experiments", [])}
    now = {spec["name"]: spec for spec in as_json(experiments)}
    begun = [name for name in before if has_saved(folder / name)]
    problems = [
        Problem(name, "be among the experiments", f"it has begun in {str(folder)!r}", "Put it back")
        for name in begun
        if name not in now
    ]
    why = "a resumed experiment keeps the settings with which it began"
    anew = "Start a new run, with --restore from a checkpoint of this one if you like"
    for name in filter(now.__contains__, begun):
        was, given = (
            flatten({key: value for key, value in spec.items() if key not in CHANGEABLE})
            for spec in (before[name], now[name])
        )
        problems += [
            Problem(f"{name}.{key.replace('/', '.')}", f"be {was.get(key)!r}", why, anew,
                    given.get(key))
            for key in {**was, **given} if was.get(key) != given.get(key)
        ]  # fmt: skip
    for index, experiment in enumerate(experiments):
        later = [one.name for one in experiments[index + 1 :] if (folder / one.name).exists()]
        result = StageResult.load(folder / experiment.name) if later else None
        if result is not None and result.falls_short(experiment):
            name, why = f"{experiment.name}.stop", f"{later[0]} has begun from its result"
            problems.append(Problem(name, f"be {result.stop!r}", why, anew, experiment.stop))
    report(problems)
    write_record(folder, record.get("source", source), experiments)


def as_json(experiments: Iterable[Experiment]) -> list[dict[str, Any]]:
    """Return the experiments as plain values; an object stands as its text."""
    specs = [{key: getattr(one, key) for key in ("name", *KEYS)} for one in experiments]
    return json.loads(json.dumps(specs, default=str))


def write_record(folder: Place, source: str, experiments: Sequence[Experiment]) -> None:
    """Write the run's origin: the command, its file and the environment."""
    record = {"source": source, "experiments": as_json(experiments)}
    replace_text(folder / RUN_RECORD, json.dumps(record, indent=1))


def check_writable(root: Place) -> None:
    """Check that runs can be written under `root`; at a URL it is made.

    Raises:
        Problems: they cannot.
    """
    remedy = "Choose another with --storage-path, or check permissions and credentials"
    try:
        if isinstance(root, UrlPath):
            root.mkdir()
            return
        existing = next(path for path in (root, *root.parents) if path.exists())
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        rule = "be a folder or URL that can be written to"
        raise Problems("storage_path", rule, why, remedy, str(root)) from error


ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("rllib-llm", "ray", "torch", "transformers", "peft", "bitsandbytes", "torchao", "vllm")
SECONDS_TO_ANSWER = 5.0


def describe_environment(folder: Path | None = None) -> dict[str, str]:
    """Versions, processor, GPUs and the commit of the code in `folder` (by default the present
    one)."""
    import torch

    is_cuda = torch.cuda.is_available()
    gpus = map(torch.cuda.get_device_name, range(torch.cuda.device_count() if is_cuda else 0))
    found = {
        "begun": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "Python": platform.python_version(),
        "system": platform.platform(),
        "processor": cpu_info().get("model name") or platform.processor(),
        "cores": str(os.cpu_count() or "?"), "GPUs": ", ".join(gpus) or "none",
    }  # fmt: skip
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    # The commit, "+" behind it where files were changed since.
    asked = ["git", "-C", str(folder or Path.cwd()), "describe", "--always", "--dirty=+"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # outside of a repository
        done = subprocess.run(
            [*asked, "--abbrev=12"], capture_output=True, text=True, timeout=SECONDS_TO_ANSWER,
            check=True,
        )  # fmt: skip
        found["commit"] = done.stdout.strip()
    return found


def write_environment(folder: Place) -> None:
    """Notes it in `folder`, unless it was noted before: a resumed run keeps its beginning."""
    file = folder / ENVIRONMENT_FILE
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(describe_environment(), indent=1))

