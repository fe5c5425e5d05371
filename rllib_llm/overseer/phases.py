"""What a process spends its time on: intervals that follow one another, so that they add up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping


class PhaseClock:
    """A process is in one phase at a time; entering one ends the one before. Any thread may ask.

    Args:
        phase: in which it begins.
        clock: gives seconds, monotonic.
    """

    def __init__(self, phase: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._phase, self._since = phase, clock()
        self._seconds: dict[str, float] = {}
        self._lap: dict[str, float] = {}

    @property
    def phase(self) -> str:
        """The phase it is in."""
        return self._phase

    @property
    def seconds_in_phase(self) -> float:
        """Since it entered the phase."""
        return self._clock() - self._since

    def enter(self, phase: str) -> float:
        """Ends the phase before, and gives the seconds it took."""
        with self._lock:
            now = self._clock()
            seconds = now - self._since
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + seconds
            self._phase, self._since = phase, now
            return seconds

    def split(self, phase: str, seconds: float, parts: Mapping[str, float]) -> None:
        """Gives shares of the last `seconds` of `phase`, which has ended, to `parts`: as long as
        they took where that fits in, else in proportion. The rest stays what it was."""
        total = sum(parts.values())
        if total <= 0:
            return
        scale = min(1.0, seconds / total)
        with self._lock:
            for name, value in parts.items():
                self._seconds[name] = self._seconds.get(name, 0.0) + value * scale
                self._seconds[phase] = self._seconds.get(phase, 0.0) - value * scale

    def seconds(self) -> dict[str, float]:
        """Seconds of every phase since the start, the present one included: together the time
        that has passed."""
        with self._lock:
            now = self._clock() - self._since
            return {**self._seconds, self._phase: self._seconds.get(self._phase, 0.0) + now}

    def lap(self) -> dict[str, float]:
        """Seconds of every phase since the last call."""
        total = self.seconds()
        lap = {name: value - self._lap.get(name, 0.0) for name, value in total.items()}
        self._lap = total
        return {name: value for name, value in lap.items() if value > 0}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """`seconds` over their sum."""
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total > 0 else {}
