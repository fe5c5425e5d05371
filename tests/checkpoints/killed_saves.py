"""Script: saves a checkpoint over another one, killed before the first line of checkpoint_folder.py
that this runs, then before the second, and so on. Prints what is found after each kill, as JSON.
Files of the user's, there before the first save or put there since, must be as they were.

    python killed_saves.py PATH_OF_CHECKPOINT_FOLDER_PY TARGET

The module is loaded by its path and alone, which spares importing Ray.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
from pathlib import Path

MODULE, TARGET = sys.argv[1], Path(sys.argv[2])
FILES = ("a", "sub/b")
OWN = ("train.py", "notes/today.txt", "sub/mine")  # the last two are added between the saves
NOT_KILLED = 0

spec = importlib.util.spec_from_file_location("checkpoint_folder", MODULE)
folders = importlib.util.module_from_spec(spec)
sys.modules["checkpoint_folder"] = folders
spec.loader.exec_module(folders)


def save(text: str) -> None:
    with folders.written_whole(TARGET) as folder:
        (folder / "sub").mkdir()
        for name in FILES:
            (folder / name).write_text(text, encoding="utf-8")
        folders.write_manifest(folder, {})


def put(names: tuple[str, ...]) -> None:
    for name in names:
        (TARGET / name).parent.mkdir(parents=True, exist_ok=True)
        (TARGET / name).touch()


def found() -> str:
    """The text of all files of the checkpoint, or what is wrong with it."""
    if lost := [name for name in OWN if not (TARGET / name).is_file()]:
        return f"lost {lost}"
    try:
        names = folders.check(TARGET)["files"]
    except folders.CheckpointError as error:
        return str(error)
    return " and ".join({(TARGET / name).read_text(encoding="utf-8") for name in names})


def kill_at(line_number: int):
    """A trace function that kills this process before that line of the module, counted as run."""
    num_lines = 0

    def trace(frame, event, arg):
        nonlocal num_lines
        if frame.f_code.co_filename != MODULE:
            return None
        num_lines += event == "line"
        if num_lines == line_number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def main() -> None:
    """Kills saves until one runs through."""
    afterwards, code, line_number = [], -signal.SIGKILL, 0
    while code != NOT_KILLED:
        line_number += 1
        shutil.rmtree(TARGET, ignore_errors=True)
        put(OWN[:1])
        save("old")
        put(OWN[1:])
        child = os.fork()
        if not child:
            sys.settrace(kill_at(line_number))
            save("new")
            sys.settrace(None)
            os._exit(NOT_KILLED)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        afterwards.append(found())
    print(json.dumps(afterwards))


main()
