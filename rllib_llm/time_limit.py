"""How long an answer may take before the process that owes it counts as hung."""

from __future__ import annotations

from dataclasses import dataclass

FACTOR = 10.0  # times the slowest answer so far
LEAST_SECONDS = 120.0  # a judge behind a network, a machine that swaps
FIRST_SECONDS = 1800.0  # nothing is known yet: kernels are compiled, caches filled


@dataclass
class TimeLimit:
    """Seconds that an answer may take, learnt from the answers that came.

    `setting`: a number of seconds, None (no limit), or "auto": ten times the slowest answer so far,
    in proportion where more is asked for, and at least two minutes; `first` for the first.
    """

    setting: float | str | None = "auto"
    slowest: float = 0.0  # seconds
    slowest_size: float = 1.0  # what that answer was asked for
    first: float = FIRST_SECONDS  # of "auto", before there was an answer

    def record(self, seconds: float, size: float = 1.0) -> None:
        """Takes note of an answer to a question of this size (prompts, say)."""
        if seconds > self.slowest:
            self.slowest, self.slowest_size = seconds, size

    def seconds(self, size: float = 1.0) -> float | None:
        """The limit for a question of this size, or None where there is none."""
        if not isinstance(self.setting, str):  # else "auto"
            return self.setting
        if not self.slowest:
            return self.first
        return max(LEAST_SECONDS, FACTOR * self.slowest * max(1.0, size / self.slowest_size))
