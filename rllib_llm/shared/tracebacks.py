"""Short error messages, and filters for library warnings that users cannot act on.

Importing `rllib_llm` hides the latter, in scripts and in Ray's workers alike.
`RLLIB_LLM_VERBOSE=1`, which `rllib -v` sets, shows all of it. Of Tune's own settings those are kept
that the user has made: `RAY_AIR_NEW_OUTPUT=1` prints Tune's tables instead of our lines.
"""

from __future__ import annotations

import logging
import os
import re
import site
import sysconfig
import traceback
from pathlib import Path
from typing import NoReturn

from rllib_llm.shared.dotted import DottedPathError, import_dotted

VERBOSE = "RLLIB_LLM_VERBOSE"


def is_verbose() -> bool:
    """Whether all that libraries say is to be shown."""
    return os.environ.get(VERBOSE, "0") not in ("", "0")


PACKAGE = str(Path(__file__).resolve().parent.parent)


def is_library(file: str) -> bool:
    """True for a file of this package, of an installed one or of Python itself."""
    places = (PACKAGE, sysconfig.get_path("stdlib"), *site.getsitepackages(), "site-packages")
    return file.startswith("<") or any(place in file for place in places)


def raised(error: BaseException) -> str:
    """The exception and its place in one line: "KeyError: 'a', raised in my_rewards.py:6 (boom)".

    The place is the innermost one outside of libraries; without one, the innermost of all.
    """
    what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return what
    own = [frame for frame in frames if not is_library(frame.filename)]
    frame = (own or list(frames))[-1]
    return f"{what}, raised in {Path(frame.filename).name}:{frame.lineno} ({frame.name})"


def explains_itself(error: BaseException) -> bool:
    """Whether an exception's text explains the problem and the remedy, so that its place in this
    package need not be shown: true for its own ValueErrors."""
    if not isinstance(error, ValueError):
        return False
    if type(error).__module__.partition(".")[0] == "rllib_llm":
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return type(error) is ValueError and bool(frames) and frames[-1].filename.startswith(PACKAGE)


def raise_plainly(error: ValueError) -> NoReturn:
    """Raise the exception that is being handled on; one that explains itself without the places in
    libraries and here, which would bury its sentence, unless everything is to be seen."""
    if is_verbose() or not explains_itself(error):
        raise error
    raise error.with_traceback(None) from error.__cause__


def short_traceback(error: BaseException) -> str:
    """The traceback as text; of an error that explains itself the user's own places alone."""
    if not explains_itself(error):
        return "".join(traceback.format_exception(error))
    parts = []
    if error.__cause__ is not None:
        frames = traceback.extract_tb(error.__cause__.__traceback__)
        own = [frame for frame in frames if not is_library(frame.filename)]
        parts += [*traceback.format_list(own), *traceback.format_exception_only(error.__cause__)]
        parts.append("\nso:\n\n")
    parts += traceback.format_exception_only(error)
    return "".join(parts)


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
    """The error that ended a trial of the stage `name`, from its traceback's text: one sentence for
    an explained mistake, otherwise with its places. `folder`: of the trial."""
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
    """Whether an exception's text explains what to do: this package's own ValueErrors."""
    if kind.startswith("rllib_llm."):
        try:
            return issubclass(import_dotted(kind), ValueError)
        except DottedPathError:
            return False
    return kind == "ValueError" and bool(frames) and frames[-1]["file"].startswith(PACKAGE)


# Kernels that were built for other machines, enums of PyTorch's own, arguments that RLlib passes to
# itself, and how long a trial's set-up took.
LOGGERS = (
    "torchao",
    "torch.utils._pytree",
    "bitsandbytes",
    "ray._common.deprecation",
    "ray.rllib.utils.deprecation",
    "ray.tune.trainable.trainable",
    "ray.tune.utils.util",
)
FAILURES = "ray.tune.execution.tune_controller"  # logs what ended a trial
# Tune prints every setting and every result in tables of its new output engine, which asks nobody.
# The other one, which RLlib's own examples choose, can be told to be silent.
TUNE_OUTPUT = "RAY_AIR_NEW_OUTPUT"
TUNE_CALLBACKS = "RAY_TUNE_CALLBACKS"
PROGRESS = "rllib_llm.runs.live_table.TunerProgress"


def quiet_libraries() -> None:
    """Let those `LOGGERS` pass errors only to which nobody has given a level."""
    if is_verbose():
        return
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)
    logging.getLogger(FAILURES).addFilter(short_failure)
    os.environ.setdefault(TUNE_OUTPUT, "0")
    callbacks = [name for name in os.environ.get(TUNE_CALLBACKS, "").split(",") if name]
    if PROGRESS not in callbacks:
        os.environ[TUNE_CALLBACKS] = ",".join([*callbacks, PROGRESS])


def short_failure(record: logging.LogRecord) -> bool:
    """A log filter that replaces, in Tune's log of a failed trial of ours, the frames of Ray and
    this package by a short explanation; the trial's error.txt has the whole."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and "rllib_llm" in str(error):
        record.msg = failure_text(record.getMessage(), str(error))
        record.args, record.exc_info, record.exc_text = None, None, None
    return True
