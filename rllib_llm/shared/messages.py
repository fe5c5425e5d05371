"""Messages of a run's processes on their way to the terminal: warnings, records, prints, errors.

    sampler: Listener ─▶ JudgedBatch.messages ─▶ trial: MessageLog ─▶ files ─▶ TrialEar: terminal

The files lie in the trial's folder: what it does just now, and messages.log:

    [3 sampler 1] warning: reward function 'answered' failed on completions, ...
    [3 sampler 1] a line that a reward function printed

The number is the iteration. A warning stands there once, however many samplers give it. All of it
is passed on as well, so that it stands in Ray's own logs as before.

Errors are shortened to their reason and place. Importing `rllib_llm` hides warnings of libraries
that users cannot act on, in scripts and in Ray's workers alike; `RLLIB_LLM_VERBOSE=1`, which
`rllib -v` sets, shows them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import site
import sys
import sysconfig
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
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
    if _is_own(error):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_own(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "rllib_llm"


def raised(error: BaseException) -> str:
    """The exception and its place in one line: "KeyError: 'a', raised in my_rewards.py:6 (boom)".

    The place is the innermost one outside of libraries; without one, the innermost of all. An
    exception of this package explains itself, without a place.
    """
    what = " ".join(told(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    if _is_own(error) or not frames:
        return what
    own = [frame for frame in frames if not is_library(frame.filename)]
    frame = (own or list(frames))[-1]
    return f"{what}, raised in {Path(frame.filename).name}:{frame.lineno} ({frame.name})"


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
        raise kind(
            name=name, value=value, rule=rule, reason=raised(error), remedy=remedy
        ) from error


def explains_itself(error: BaseException) -> bool:
    """Whether an exception's text explains the problem and the remedy, so that its place in this
    package need not be shown: true for its own ValueErrors."""
    if not isinstance(error, ValueError):
        return False
    if _is_own(error):
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
    """Whether an exception's text explains what to do: that of this package's own classes, and of
    ValueErrors that it raises."""
    if kind.startswith("rllib_llm."):
        return True
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
            of_package = filename.startswith(PACKAGE)
            ours = of_package or not is_library(filename)
            if ours and issubclass(category, UserWarning):
                self.note(str(message), is_warning=True)
            elif str(message) not in self._libraries_said:
                self._libraries_said.add(str(message))
                self.note(str(message))
            # This package's own source line would explain nothing.
            shown(message, category, filename, lineno, file, "" if of_package else line)

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
            file = self._folder / MESSAGES_FILE
            # A text may have half a character.
            with file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write("".join(f"{line}\n" for line in lines))

    def doing(self, activity: str) -> None:
        """Publishes the trial's current activity, "" for none."""
        file = self._folder / ACTIVITY_FILE
        with self._files.writing():
            if not activity:
                file.unlink(missing_ok=True)
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_text(file, activity)


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
        lines, self._position = new_lines(self._file, self._position)
        return [match["text"] for line in lines if (match := LINE.match(line))]

    def activity(self) -> tuple[str, float] | None:
        """The trial's activity and its start (seconds since the epoch); None if unknown."""
        try:
            return self._activity.read_text(encoding="utf-8"), self._activity.stat().st_mtime
        except FileNotFoundError:
            return None
