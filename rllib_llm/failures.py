"""What ended a trial, as a person wants to read it: the sentence, and where in the user's code."""

from __future__ import annotations

import re
from pathlib import Path

from rllib_llm.dotted import DottedPathError, import_dotted
from rllib_llm.tracebacks import PACKAGE, is_library

NUM_FRAMES = 4  # of a traceback that are shown where none is the user's own
NUM_OWN_FRAMES = 2
ERROR_LINE = re.compile(r"^(?!\s)(?P<kind>[\w.]+(Error|Exception|Interrupt|Exit|Warning))\b:? ?")
FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$')
# What Ray calls the class of an actor whose constructor failed.
ACTOR_CLASS = re.compile(r"<?[\w.]*\b_modify_class\.<locals>\.Class( object at 0x[0-9a-f]+>)?")
# Ray's words for a process that ended by itself, and for a constructor that raised.
DIED, IN_CONSTRUCTOR = "The actor died", "error raised in its creation task"
COLOUR = re.compile(r"\x1b\[\d*(;\d+)*m")


def failure_text(name: str, traceback: str, folder: str | Path | None = None) -> str:
    """What ended a trial of the stage `name`, from its traceback's text: a mistake that is
    explained is one sentence, for all else the places are shown. `folder`: of the trial."""
    message, frames = last_error(traceback)
    match = ERROR_LINE.match(message)
    kind = match["kind"] if match else ""
    text = [f"{name}: {message}"]
    if _explains_itself(kind, frames):
        text = [f"{name}: {message[match.end() :] if match else message}"]
    elif frames:
        own = [frame for frame in frames if not is_library(frame["file"])]
        shown = own[-NUM_OWN_FRAMES:] or frames[-NUM_FRAMES:]
        text += [f"  raised in {place(frame)}" for frame in shown]
    return "\n".join([*text, f"The whole error: {folder}/error.txt"] if folder else text)


def last_error(traceback: str) -> tuple[str, list[re.Match[str]]]:
    """The message of the last exception in a traceback's text, and the frames before it (groups
    file, line, function)."""
    text = ACTOR_CLASS.sub("an actor", COLOUR.sub("", traceback).strip())
    lines = text.splitlines()
    # A kill, or too little memory.
    if text.startswith(DIED) and IN_CONSTRUCTOR not in lines[0]:
        return " ".join(line for line in lines if not line.startswith((" ", "\t"))), []
    starts = [index for index, line in enumerate(lines) if ERROR_LINE.match(line)]
    start = starts[-1] if starts else max(0, len(lines) - NUM_FRAMES)
    frames = [match for line in lines[:start] if (match := FRAME.match(line))]
    return "\n".join(lines[start:]), frames


def place(frame: re.Match[str]) -> str:
    """A frame as "file:line in function", the file of a library without its folder."""
    file = frame["file"].rpartition("site-packages/")[2]
    return f"{file}:{frame['line']} in {frame['function']}"


def _explains_itself(kind: str, frames: list[re.Match[str]]) -> bool:
    """Whether an exception's text says what to do: this package's own ValueErrors."""
    if kind.startswith("rllib_llm."):
        try:
            return issubclass(import_dotted(kind), ValueError)
        except DottedPathError:
            return False
    return kind == "ValueError" and bool(frames) and frames[-1]["file"].startswith(PACKAGE)
