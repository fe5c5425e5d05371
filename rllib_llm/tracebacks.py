"""Tracebacks in a line or two: what was raised, and where in the user's own code."""

from __future__ import annotations

import site
import sysconfig
import traceback
from pathlib import Path

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
