"""Trials that Ray's memory monitor kills are restarted like those that die in another way.

Tune does not know Ray's `OutOfMemoryError`: where the monitor kills a trial's process, `Tuner.fit`
itself raises, whatever `max_failures` says. The run is then restored, as `--resume` does it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ray.exceptions import OutOfMemoryError

USED = re.compile(r"was (?P<used>[\d.]+)GB used / (?P<total>[\d.]+)GB limit")
USER = re.compile(r"^(?P<pid>\d+)\t(?P<gigabytes>[\d.]+)\t(?P<command>.+)$", re.MULTILINE)
MAX_USERS = 3  # that are named
MAX_CHARS = 60  # of a command line
REMEDY = (
    "Lower num_env_runners, max_concurrent_trials, micro_batch_size or sampling_batch_size, use "
    "dtype='bfloat16' or lora, or close what else uses memory."
)


class KilledForMemory(RuntimeError):
    """Ray killed trials for memory more often than `max_failures` allows; the message says who used
    it and what to lower."""


def fit(
    tuner: Any,
    restored: Callable[[], Any],
    max_failures: int,
    tell: Callable[[str], None],
    saved: Callable[[], object] = lambda: None,
) -> Any:
    """Return `tuner.fit()`; where Ray kills a trial for memory, that of the run as it was saved.

    Args:
        restored: returns a Tuner that goes on from the trials' last checkpoints.
        max_failures: how often without a new checkpoint in between, -1 for always.
        saved: which checkpoints there are; where that has changed, the run has moved on.
        tell: takes a sentence on what happened.

    Raises:
        KilledForMemory: once more than `max_failures` times.
    """
    num_killed, before = 0, saved()
    while True:
        try:
            return tuner.fit()
        except RuntimeError as error:
            if not isinstance(error.__cause__, OutOfMemoryError):
                raise
            told = memory_text(str(error.__cause__))
        if (now := saved()) != before:
            num_killed, before = 0, now
        if 0 <= max_failures <= num_killed:
            raise KilledForMemory(f"{told} {REMEDY}")
        num_killed += 1
        tell(f"{told} It goes on from its last checkpoint. {REMEDY}")
        tuner = restored()


def memory_text(message: str) -> str:
    """Return what Ray says of a killed process in a sentence or two: how full the machine's memory
    was, and who used most of it."""
    used = USED.search(message)
    full = f" ({used['used']} of {used['total']} GB in use)" if used else ""
    text = f"Ray killed a trial's process because the machine's memory was full{full}."
    users = [
        f"{user['command'].strip()[:MAX_CHARS]} ({user['gigabytes']} GB, process {user['pid']})"
        for user in USER.finditer(message)
    ]
    return f"{text} Most was used by {', '.join(users[:MAX_USERS])}." if users else text
