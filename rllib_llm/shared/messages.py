"""Messages of a run's processes on their way to the terminal: warnings, log records and prints.

    sampler: Listener ─▶ JudgedBatch.messages ─▶ trial: MessageLog ─▶ files ─▶ TrialEar: terminal

The files lie in the trial's folder: what it does just now, and messages.log:

    [3 sampler 1] warning: reward function 'answered' failed on 5 of 16 completions ...
    [3 sampler 1] a line that a reward function printed

The number is the iteration. A warning stands there once, however many samplers give it. All of it
is passed on as well, so that it stands in Ray's own logs as before.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rllib_llm.shared.storage import BestEffort
from rllib_llm.shared.tracebacks import PACKAGE, is_library

MAX_MESSAGES = 1000  # kept until they are taken; the first go


@dataclass(frozen=True)
class Message:
    """A warning to the user, or a printed line, with its origin."""

    speaker: str
    text: str
    is_warning: bool = False


class Listener:
    """Records messages in its `with` blocks, which may follow one another but not nest.

    A warning is one to the user where this package or the user's code gives it, or this package
    logs it; what other libraries warn of counts as printed.
    """

    def __init__(self, speaker: str) -> None:
        self.speaker = speaker
        self._messages: deque[Message] = deque(maxlen=MAX_MESSAGES)
        self._libraries_said: set[str] = set()
        self._handler = _Handler(self)
        self._catching: warnings.catch_warnings | None = None
        self._stdout: TextIO | None = None

    def note(self, text: str, is_warning: bool = False) -> None:
        """Keep a message."""
        if text.strip():
            self._messages.append(Message(self.speaker, text.strip(), is_warning))

    def take(self) -> list[Message]:
        """The messages recorded since the last call."""
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def __enter__(self) -> Listener:
        self._catching = warnings.catch_warnings()
        self._catching.__enter__()
        shown = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            ours = filename.startswith(PACKAGE) or not is_library(filename)
            if ours and issubclass(category, UserWarning):
                self.note(str(message), is_warning=True)
            elif str(message) not in self._libraries_said:
                self._libraries_said.add(str(message))
                self.note(str(message))
            shown(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        logging.getLogger("rllib_llm").addHandler(self._handler)
        self._stdout = sys.stdout
        sys.stdout = _Tee(self._stdout, self)  # type: ignore[assignment]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._catching is not None and self._stdout is not None
        if isinstance(sys.stdout, _Tee):  # nobody put another in its place
            sys.stdout.end_line()
        sys.stdout = self._stdout
        logging.getLogger("rllib_llm").removeHandler(self._handler)
        self._catching.__exit__(kind, error, traceback)


class _Handler(logging.Handler):
    """Notes this package's log records from warnings up."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(logging.WARNING)
        self._listener = listener

    def emit(self, record: logging.LogRecord) -> None:
        self._listener.note(record.getMessage(), is_warning=True)


class _Tee:
    """Standard output whose lines are recorded, too."""

    def __init__(self, stdout: TextIO, listener: Listener) -> None:
        self._stdout, self._listener = stdout, listener
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._listener.note(line)
        return self._stdout.write(text)

    def end_line(self) -> None:
        """Records a line that has no end yet."""
        self._listener.note(self._line)
        self._line = ""

    def __getattr__(self, name: str) -> Any:  # fileno, encoding, isatty, flush
        return getattr(self._stdout, name)


MESSAGES_FILE = "messages.log"
ACTIVITY_FILE = "doing_now.txt"
WARNING = "warning: "
LINE = re.compile(r"\[\d+ [^\]]+\] warning: (?P<text>.+)")
MAX_PRINTED = 200  # lines of an iteration
SAME_CHARS = 60  # that make two warnings the same, whatever numbers are in them


class MessageLog:
    """Writes the messages of a trial to its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told: set[str] = set()
        self._files = BestEffort(f"{MESSAGES_FILE} and {ACTIVITY_FILE}")

    def write(self, messages: Iterable[Message], iteration: int) -> None:
        """Append the messages of an iteration: of warnings those that are new, of printed lines the
        first `MAX_PRINTED`."""
        lines, num_left_out = [], 0
        for message in messages:
            head = f"[{iteration} {message.speaker}] "
            if message.is_warning:
                key = same_key(message.text)
                if key not in self._told:
                    self._told.add(key)
                    lines.append(head + WARNING + " ".join(message.text.split()))
            elif len(lines) < MAX_PRINTED:
                lines.append(head + message.text)
            else:
                num_left_out += 1
        if num_left_out:
            lines.append(f"[{iteration}] {num_left_out} further lines were printed")
        if not lines:
            return
        with self._files.writing():
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / MESSAGES_FILE).open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))

    def doing(self, activity: str) -> None:
        """Publishes the trial's current activity, "" for none."""
        file = self._folder / ACTIVITY_FILE
        with self._files.writing():
            if not activity:
                file.unlink(missing_ok=True)
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(".new")
            new.write_text(activity, encoding="utf-8")
            os.replace(new, file)


def same_key(text: str) -> str:
    """A key for warnings that differ only in numbers and examples."""
    return re.sub(r"[\d.]+", "#", " ".join(text.split()))[:SAME_CHARS]


class TrialEar:
    """Reads a trial's messages as they come, from its folder."""

    def __init__(self, folder: Path) -> None:
        self._file, self._activity = folder / MESSAGES_FILE, folder / ACTIVITY_FILE
        self._position = self._file.stat().st_size if self._file.is_file() else 0

    def new_warnings(self) -> list[str]:
        """Warnings since the last call, or since this was made."""
        if not self._file.is_file() or self._file.stat().st_size <= self._position:
            return []
        with self._file.open("rb") as file:
            file.seek(self._position)
            whole = file.read().rpartition(b"\n")[0] + b"\n"
        self._position += len(whole) if whole.strip() else 0
        lines = whole.decode("utf-8", errors="replace").splitlines()
        return [match["text"] for line in lines if (match := LINE.match(line))]

    def activity(self) -> tuple[str, float] | None:
        """The trial's activity and its start (seconds since the epoch); None if unknown."""
        try:
            return self._activity.read_text(encoding="utf-8"), self._activity.stat().st_mtime
        except FileNotFoundError:
            return None
