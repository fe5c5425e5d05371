"""How many cores this process may use, and whether it got them."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> float:
    """Cores of this process: those it is bound to, and no more than its control group's quota."""
    if hasattr(os, "sched_getaffinity"):
        bound = len(os.sched_getaffinity(0))
    else:
        bound = os.cpu_count() or 1
    return min(float(bound), _quota(cgroup))


def threads_for(reserved: float, cgroup: Path = CGROUP) -> int:
    """Threads for a process that Ray has given `reserved` CPUs: so many, at least one, and never
    more than the cores it may use. Threads that share a core wait for each other at barriers."""
    return max(1, min(math.floor(reserved), math.floor(usable_cores(cgroup))))


def _quota(cgroup: Path) -> float:
    """Cores that the control group allows, infinite where it sets no bound."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota == "max" else int(quota) / int(period)


class CpuClock:
    """CPU time of this process against wall time, from `start` to `starved_share`.

    A thread that is ready to run and gets no core counts as starved; one that waits for others'
    work does not, so only stretches in which this process computes tell anything.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begins to measure anew."""
        self._wall, self._cpu, self._delay = time.monotonic(), time.process_time(), _run_delay()

    @property
    def cpu_share(self) -> float:
        """CPU seconds per wall second since the start: 1 where one thread computed all the time."""
        return (time.process_time() - self._cpu) / max(1e-9, time.monotonic() - self._wall)

    @property
    def starved_share(self) -> float:
        """Share of the wall time in which this thread was ready to run and had no core; 0 where the
        system does not tell."""
        return (_run_delay() - self._delay) / max(1e-9, time.monotonic() - self._wall)


def _run_delay() -> float:
    """Seconds that this thread has waited for a core (Linux's schedstat, second field)."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
