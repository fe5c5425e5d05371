"""What a trial's processes say, in files of its folder: messages.log, and what it does just now.

    [3 sampler 1] warning: reward function 'answered' failed on 5 of 16 completions ...
    [3 sampler 1] a line that a reward function printed

The number is the iteration. A warning stands there once, however many samplers give it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pyarrow.fs import LocalFileSystem

from rllib_llm.overseer.diagnosis import PAUSED
from rllib_llm.shared.listening import Message
from rllib_llm.shared.storage import BestEffort

MESSAGES_FILE = "messages.log"
ACTIVITY_FILE = "doing_now.txt"
WARNING = "warning: "
LINE = re.compile(r"\[\d+ [^\]]+\] warning: (?P<text>.+)")
MAX_PRINTED = 200  # lines of an iteration
SAME_CHARS = 60  # that make two warnings the same, whatever numbers are in them


class MessageLog:
    """Writes the messages of a trial to its folder; see this module."""

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
        """Note what the trial does from now on, "" for nothing: for whoever waits for it."""
        file = self._folder / ACTIVITY_FILE
        with self._files.writing():
            if not activity:
                file.unlink(missing_ok=True)
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(".new")
            new.write_text(activity, encoding="utf-8")
            os.replace(new, file)


def is_paused(trial: Any) -> bool:
    """Whether a trial of Tune, whose folder is on this machine, says that it was paused."""
    storage = getattr(trial, "storage", None)
    if storage is None or not isinstance(storage.storage_filesystem, LocalFileSystem):
        return False
    said = TrialEar(Path(storage.trial_fs_path)).activity()
    return said is not None and said[0].startswith(PAUSED)


def same_key(text: str) -> str:
    """What is the same of two warnings that differ in their numbers and examples."""
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
        """What the trial does now and since when (seconds since the epoch), None where unknown."""
        try:
            return self._activity.read_text(encoding="utf-8"), self._activity.stat().st_mtime
        except FileNotFoundError:
            return None
