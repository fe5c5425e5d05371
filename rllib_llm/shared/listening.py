"""What a process that nobody watches has to say: warnings, log records and prints, kept to be told.

    sampler: Listener ─▶ JudgedBatch.messages ─▶ trial: MessageLog ─▶ messages.log ─▶ terminal

All of it is passed on as well, so that it stands in Ray's own logs as before.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from rllib_llm.shared.tracebacks import PACKAGE, is_library

MAX_MESSAGES = 1000  # kept until they are taken; the first go


@dataclass(frozen=True)
class Message:
    """What was said by whom: a warning to the user, or something printed on the way."""

    speaker: str
    text: str
    is_warning: bool = False


class Listener:
    """Notes what is said in its `with` blocks, which may follow one another but not nest.

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
        """What was noted since the last call."""
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
    """Standard output whose lines are noted, too."""

    def __init__(self, stdout: TextIO, listener: Listener) -> None:
        self._stdout, self._listener = stdout, listener
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._listener.note(line)
        return self._stdout.write(text)

    def end_line(self) -> None:
        """Note what has no end of line yet."""
        self._listener.note(self._line)
        self._line = ""

    def __getattr__(self, name: str) -> Any:  # fileno, encoding, isatty, flush
        return getattr(self._stdout, name)
