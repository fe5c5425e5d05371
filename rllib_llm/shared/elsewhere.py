"""Calls to other processes and services that may be slow, dead or unreachable: retries, waits and
outages.

    who asks ─▶ what runs elsewhere, with a deadline ─┬─▶ answer
                                                      ├─▶ TimeoutError  it is there, and was late
                                                      └─▶ Away          it can answer nobody now

Sandboxed processes, servers of tools, judges and rewards keep to it. What is away is asked again
after growing pauses, and its `Outage` says so. The caller makes a row that is not valid of
`Away`, never a score: nobody whose words are judged has done it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

TOLD_EVERY_S = 60.0


class Away(RuntimeError):
    """A remote service or process is unavailable now."""


class OutageError(Away):
    """It has been away longer than it is waited for."""


def backoff_seconds(
    attempt: int, uniform: Callable[[float, float], float], first: float = 0.05, longest: float = 5
) -> float:
    """min(longest, first * 2^attempt) * U(0.5, 1.5): many that failed together do not return
    together."""
    return min(longest, first * 2 ** min(attempt, 32)) * uniform(0.5, 1.5)


class Outage:
    """The duration of an outage over all callers, on one clock.

    Args:
        name: of what is asked.
        longest_s: that it is waited for; 0: it is not.
        meanwhile: what happens while it is away, a sentence, where that is to be told at once.
    """

    def __init__(self, name: str, longest_s: float = math.inf, meanwhile: str = "") -> None:
        self._name, self._longest_s, self._meanwhile = name, longest_s, meanwhile
        self._lock = threading.Lock()
        self._since: float | None = None
        self._told: float | None = None  # when it was last said

    def waits(self, reason: str) -> bool:
        """Notes an attempt that found it away; False where it is not waited for any longer."""
        if not self._longest_s:
            return False
        now = time.monotonic()
        with self._lock:
            self._since = now if self._since is None else self._since
            away = now - self._since
            is_first = self._told is None and bool(self._meanwhile)
            tells = is_first or now - (self._told or self._since) >= TOLD_EVERY_S
            if tells:
                self._told = now
        if tells and away < self._longest_s:
            then = self._meanwhile or f"It is waited for up to {self._longest_s:.0f} s."
            how_long = "went away" if is_first else f"has been away for {away:.0f} s"
            logger.warning("%s %s (%s). %s", self._name, how_long, reason, then)
        return away < self._longest_s

    def give_up(self, reason: str) -> None:
        """Raises OutageError where it was waited for."""
        if self._longest_s:
            raise OutageError(
                f"{self._name} must come back within outage_s={self._longest_s:g}: it was away "
                f"all that time (an outage; the last attempt gave {reason}). Start the server "
                "again and resume the run, or raise outage_s."
            )

    def end(self) -> None:
        """Notes that it has answered."""
        with self._lock:
            since, told, self._since, self._told = self._since, self._told, None, None
        if since is not None and told is not None:
            logger.warning("%s is back after %.0f s.", self._name, time.monotonic() - since)
