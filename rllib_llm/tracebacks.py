"""Tracebacks in a line or two: what was raised, and where in the user's own code."""

from __future__ import annotations

import site
import sysconfig
import traceback
from pathlib import Path
from typing import NoReturn

from rllib_llm.verbosity import is_verbose

PACKAGE = str(Path(__file__).resolve().parent)


def is_library(file: str) -> bool:
    """True for a file of this package, of an installed one or of Python itself."""
    places = (PACKAGE, sysconfig.get_path("stdlib"), *site.getsitepackages(), "site-packages")
    return file.startswith("<") or any(place in file for place in places)


def raised(error: BaseException) -> str:
    """What was raised and where, in one line: "KeyError: 'a', raised in my_rewards.py:6 (boom)".

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
    """Whether the text of an exception says what is wrong and what to do, so that the places in
    this package add nothing: its own ValueErrors."""
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
