"""Messages of a run's processes on their way to the terminal: warnings, records, prints, errors.

    sampler: Listener ─▶ JudgedBatch.messages ─▶ trial: MessageLog ─▶ files ─▶ TrialEar: terminal

The files lie in the trial's folder: its current activity, and messages.jsonl, a row a message:

    {"iteration": 3, "speaker": "sampler 1", "text": "...", "is_warning": true}

A warning stands there once, however many samplers give it. All of it is passed on as well, so that
it stands in Ray's own logs.

Errors are shortened to their reason and place. Importing `rllib_llm` hides warnings of libraries
that users cannot act on, in scripts and in Ray's workers alike; `RLLIB_LLM_VERBOSE=1`, which
`rllib -v` sets, shows them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import site
import sys
import sysconfig
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from rllib_llm.shared.errors import Problems
from rllib_llm.shared.storage import BestEffort, new_lines, replace_text

VERBOSE = "RLLIB_LLM_VERBOSE"


def is_verbose() -> bool:
    """Whether all that libraries say is to be shown."""
    return os.environ.get(VERBOSE, "0") not in ("", "0")


PACKAGE = str(Path(__file__).resolve().parent.parent)


def is_library(file: str) -> bool:
    """True for a file of this package, of an installed one or of Python itself."""
    places = (PACKAGE, sysconfig.get_path("stdlib"), *site.getsitepackages(), "site-packages")
    return file.startswith("<") or any(place in file for place in places)


def told(error: BaseException) -> str:
    """An exception as text: its class and words, or the words alone if it is of this package; of an
    `ExceptionGroup` those of its first."""
    if any(kind.__name__ == "BaseExceptionGroup" for kind in type(error).__mro__):
        return told(error.exceptions[0])  # type: ignore[attr-defined]  # Python 3.10 has none
    try:
        text = str(error).encode(errors="backslashreplace").decode()  # of half characters
    except Exception:  # noqa: BLE001  (of a user's class)
        text = "(its text cannot be read)"
    kind = "" if _is_own(error) else type(error).__name__
    return ": ".join(filter(None, (kind, text)))


def _is_own(error: BaseException) -> bool:
    return type(error).__module__.startswith("rllib_llm")


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]


def raised(error: BaseException) -> str:
    """The exception and its place in one line: "KeyError: 'a', raised in my_rewards.py:6 (boom)".

    The place is the innermost one outside of libraries; without one, the innermost of all. An
    exception of this package explains itself, without a place.
    """
    what = " ".join(told(error).split())
    if _is_own(error) or error.__traceback__ is None:
        return what
    frames = _users_frames(error) or traceback.extract_tb(error.__traceback__)
    file, line = Path(frames[-1].filename).name, frames[-1].lineno
    return f"{what}, raised in {file}:{line} ({frames[-1].name})"


@contextlib.contextmanager
def blamed_on(
    name: str, value: Any, rule: str, kind: type[Problems] = Problems,
    remedy: str = "Correct its code",
) -> Iterator[None]:  # fmt: skip
    """Runs a user's code, which the setting `name` gave, and turns what it raises into an error of
    `kind` that says so, and what must hold: `rule`. Errors of this package explain themselves."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if _is_own(error):
            raise
        raise kind(name, rule, raised(error), remedy, value) from error


def raise_plainly(error: ValueError) -> NoReturn:
    """Raise the exception that is being handled again; `Problems`, which explain themselves,
    without the frames of libraries, unless everything is to be shown."""
    if is_verbose() or not isinstance(error, Problems):
        raise error
    raise error.with_traceback(None) from error.__cause__


def short_traceback(error: BaseException) -> str:
    """The traceback as text; of `Problems` the user's own frames alone."""
    if not isinstance(error, Problems):
        return "".join(traceback.format_exception(error))
    parts = traceback.format_exception_only(error)
    if (cause := error.__cause__) is not None:
        frames = traceback.format_list(_users_frames(cause))
        parts = [*frames, *traceback.format_exception_only(cause), "\nso:\n\n", *parts]
    return "".join(parts)


def failure_text(name: str, error: BaseException, folder: str | Path | None = None) -> str:
    """The error that ended a trial of the stage `name`, and the frames of the user's code; without
    those, of errors that are not this package's, the innermost. `error`: Ray's. `folder`: of the
    trial."""
    message, frames = last_error(str(error))
    if is_own := message.startswith("rllib_llm."):  # a constructor's: Ray gives its text alone
        message = message.partition(": ")[2]
    if isinstance(cause := getattr(error, "cause", None), BaseException):  # what the trial raised
        message, is_own = told(cause), _is_own(cause)
    own = [frame for frame in frames if not is_library(frame.split('"')[1])]
    places = own or ([] if is_own else frames)
    lines = [f"{name}: {message}", *(f"  {place}" for place in places[-2:])]
    return "\n".join([*lines, f"The whole error: {folder}/error.txt"] if folder else lines)


def last_error(text: str) -> tuple[str, list[str]]:
    """The message of the last exception in a text of Ray's, and the frames of its tracebacks; of a
    process that died, which has none, Ray's explanation."""
    lines = text.strip().splitlines()
    at = [i for i, line in enumerate(lines) if line.lstrip().startswith('File "')]
    if not at:
        return " ".join(line for line in lines if not line.startswith((" ", "\t"))), []
    message = itertools.dropwhile(lambda line: line.startswith("    "), lines[at[-1] + 1 :])
    return "\n".join(message), [lines[i].strip() for i in at]


# Kernels that were built for other machines, enums of PyTorch's own, arguments that RLlib passes to
# itself, and how long a trial's set-up took.
LOGGERS = (
    "torchao", "torch.utils._pytree", "bitsandbytes", "ray._common.deprecation",
    "ray.rllib.utils.deprecation", "ray.tune.trainable.trainable", "ray.tune.utils.util",
)  # fmt: skip
TUNE_CALLBACKS, PROGRESS = "RAY_TUNE_CALLBACKS", "rllib_llm.runs.live_table.TunerProgress"


def quiet_libraries() -> None:
    """Let those `LOGGERS` pass errors only to which nobody has given a level."""
    if is_verbose():
        return
    for logger in map(logging.getLogger, LOGGERS):
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)
    logging.getLogger("ray.tune.execution.tune_controller").addFilter(short_failure)
    # Tune prints every setting and every result in tables of its new output engine, which cannot be
    # switched off. The other one, which RLlib's own examples choose, can be.
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    callbacks = [name for name in os.environ.get(TUNE_CALLBACKS, "").split(",") if name]
    os.environ[TUNE_CALLBACKS] = ",".join(dict.fromkeys([*callbacks, PROGRESS]))


def short_failure(record: logging.LogRecord) -> bool:
    """A log filter that replaces, in Tune's log of a failed trial of ours, the frames of Ray and
    this package by a short explanation; the trial's error.txt has the whole."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and "rllib_llm" in str(error):
        record.msg, record.args = failure_text(record.getMessage(), error), None
        record.exc_info = record.exc_text = None
    return True


@dataclass(frozen=True)
class TrialMessage:
    """A warning to the user, or a printed line, with its origin."""

    speaker: str
    text: str
    is_warning: bool = False


class Listener(logging.Handler):
    """Records messages in its `with` blocks, which may follow one another but not nest.

    A warning is one to the user where this package or the user's code gives it, or this package
    logs it; what other libraries warn of counts as printed.
    """

    def __init__(self, speaker: str) -> None:
        super().__init__(logging.WARNING)
        self.speaker = speaker
        self._messages: deque[TrialMessage] = deque(maxlen=1000)  # the first go
        self._libraries_said: set[str] = set()
        self._block = contextlib.ExitStack()

    def note(self, text: str, is_warning: bool = False) -> None:
        """Keep a message."""
        if text.strip():
            self._messages.append(TrialMessage(self.speaker, text.strip(), is_warning))

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a log record of this package."""
        self.note(record.getMessage(), is_warning=True)

    def take(self) -> list[TrialMessage]:
        """The messages recorded since the last call."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def __enter__(self) -> Listener:
        self._block.enter_context(warnings.catch_warnings())
        shown = warnings.showwarning

        def show(message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
            of_package, text = filename.startswith(PACKAGE), str(message)
            ours = of_package or not is_library(filename)
            if ours and issubclass(category, UserWarning):
                self.note(text, is_warning=True)
            elif text not in self._libraries_said:
                self._libraries_said.add(text)
                self.note(text)
            # This package's own source line would explain nothing.
            shown(message, category, filename, lineno, more[0], "" if of_package else more[1])

        warnings.showwarning = show  # type: ignore[assignment]
        logger, tee = logging.getLogger("rllib_llm"), _Tee(sys.stdout, self)
        logger.addHandler(self)
        self._block.callback(logger.removeHandler, self)
        self._block.enter_context(contextlib.redirect_stdout(tee))  # type: ignore[type-var]
        self._block.callback(tee.end_line)
        return self

    def __exit__(self, *exception: object) -> None:
        self._block.close()


class _Tee:
    """Standard output whose lines are recorded, too."""

    def __init__(self, stdout: TextIO, listener: Listener) -> None:
        self._stdout, self._listener, self._line = stdout, listener, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._listener.note(line)
        return self._stdout.write(text)

    def end_line(self) -> None:
        """Records a line that has no end yet."""
        self._listener.note(self._line)

    def __getattr__(self, name: str) -> Any:  # fileno, encoding, isatty, flush
        return getattr(self._stdout, name)


MESSAGES_FILE = "messages.jsonl"
ACTIVITY_FILE = "doing_now.txt"
MAX_PRINTED = 200  # lines of an iteration


class MessageLog:
    """Writes the messages of a trial to its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: set[str] = set()
        self._files = BestEffort(f"{MESSAGES_FILE} and {ACTIVITY_FILE}")

    def write(self, messages: Iterable[TrialMessage], iteration: int) -> None:
        """Append the messages of an iteration: of warnings those that are new, of printed lines the
        first `MAX_PRINTED`."""
        kept, num_printed = [], 0
        for message in messages:
            if not message.is_warning:
                num_printed += 1
                kept += [message] if num_printed <= MAX_PRINTED else []
            elif (key := same_key(message.text)) not in self._written:
                self._written.add(key)
                kept.append(message)
        if (num_more := num_printed - MAX_PRINTED) > 0:
            kept.append(TrialMessage("trial", f"{num_more} further lines were printed"))
        if not kept:
            return
        rows = [{"iteration": iteration, **dataclasses.asdict(each)} for each in kept]
        with self._files.writing():
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / MESSAGES_FILE).open("a", encoding="utf-8") as stream:
                stream.write("".join(f"{json.dumps(row)}\n" for row in rows))

    def doing(self, activity: str) -> None:
        """Publishes the trial's current activity, "" for none."""
        file = self._folder / ACTIVITY_FILE
        with self._files.writing():
            if activity:
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_text(file, activity)
            else:
                file.unlink(missing_ok=True)


def same_key(text: str) -> str:
    """A key for warnings that differ only in numbers and in what follows 60 characters."""
    return "".join(c for c in " ".join(text.split()) if not c.isdigit())[:60]


class TrialEar:
    """Reads a trial's messages as they come, from its folder."""

    def __init__(self, folder: Path) -> None:
        self._file, self._activity = folder / MESSAGES_FILE, folder / ACTIVITY_FILE
        self._position = self._file.stat().st_size if self._file.is_file() else 0

    def new_warnings(self) -> list[str]:
        """Warnings since the last call, or since this was made."""
        lines, self._position = new_lines(self._file, self._position)
        rows: list[dict[str, Any]] = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # a row that a full disk cut off
                rows.append(json.loads(line))
        texts = (row["text"].encode(errors="backslashreplace") for row in rows if row["is_warning"])
        return [" ".join(text.decode().split()) for text in texts]

    def activity(self) -> tuple[str, float] | None:
        """The trial's activity and its start (seconds since the epoch); None if unknown."""
        try:
            return self._activity.read_text(encoding="utf-8"), self._activity.stat().st_mtime
        except FileNotFoundError:
            return None
