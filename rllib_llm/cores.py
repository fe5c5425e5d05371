"""How many cores this process may use, and whether it and others got them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
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
        return (time.process_time() - self._cpu) / max(1e-9, self.wall_seconds)

    @property
    def wall_seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._wall

    @property
    def starved_seconds(self) -> float:
        """Seconds in which this thread was ready to run and had no core; 0 where the system does
        not tell."""
        return _run_delay() - self._delay

    @property
    def starved_share(self) -> float:
        """`starved_seconds` over the wall time."""
        return self.starved_seconds / max(1e-9, self.wall_seconds)


class StarvedProcesses:
    """Seconds in which processes of this machine could not work, though they wanted to.

    Of the thread that waited longest: the others wait for it, and so do processes that work for one
    another. One that is stopped, or waits for an answer, wants no core, and is not starved.

    Args:
        pids: of the processes.
        clock: seconds that only grow.
        delays: seconds that each thread of a process has waited for a core so far.
    """

    def __init__(
        self,
        pids: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
        delays: Callable[[int], dict[int, float]] | None = None,
    ) -> None:
        self._pids, self._clock, self._delays = tuple(pids), clock, delays or thread_delays
        self._at, self._before = clock(), self._read()

    def take(self) -> float:
        """Such seconds since the last call, at most those that have passed."""
        now, after = self._clock(), self._read()
        passed, self._at = now - self._at, now
        # A thread that has started meanwhile counts from the next call on.
        waited = [after[key] - self._before[key] for key in after.keys() & self._before.keys()]
        self._before = after
        return min(passed, max(waited, default=0.0))

    def _read(self) -> dict[tuple[int, int], float]:
        return {
            (pid, thread): delay
            for pid in self._pids
            for thread, delay in self._delays(pid).items()
        }


def thread_delays(pid: int) -> dict[int, float]:
    """Seconds that each thread of a process has been ready to run and had no core; {} where the
    system does not tell."""
    found = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        delay = _delay(file)
        if delay is not None:
            found[int(file.parent.name)] = delay
    return found


def _run_delay() -> float:
    """Seconds that this thread has waited for a core."""
    return _delay(Path("/proc/thread-self/schedstat")) or 0.0


def _delay(file: Path) -> float | None:
    """The second field of Linux's schedstat, in seconds."""
    try:
        return int(file.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None
