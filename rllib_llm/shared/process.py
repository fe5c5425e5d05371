"""A process's resources: cores, instruction sets, memory, time."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> float:
    """Cores of this process: those it is bound to, and no more than its control group's quota."""
    is_linux = hasattr(os, "sched_getaffinity")
    bound = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    try:  # what the control group allows
        quota, period = (cgroup / "cpu.max").read_text().split()
        return min(float(bound), math.inf if quota == "max" else int(quota) / int(period))
    except (OSError, ValueError):  # it sets no bound
        return float(bound)


def threads_for(reserved: float, cgroup: Path = CGROUP) -> int:
    """Threads for a process that Ray has given `reserved` CPUs: so many, at least one, and never
    more than the cores it may use. Threads that share a core wait for each other at barriers."""
    return max(1, min(math.floor(reserved), math.floor(usable_cores(cgroup))))


def free_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that this process may still take, of the machine's memory and of its control group's,
    where files that were read some time ago make way."""
    import psutil

    free = psutil.virtual_memory().available
    try:
        limit, used = (int((cgroup / f"memory.{of}").read_text()) for of in ("max", "current"))
    except (OSError, ValueError):  # there is no limit
        return free
    stat: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return max(0, min(free, limit - used + int(stat.get("inactive_file", 0))))


class CpuClock:
    """Seconds in which this thread was ready to run and got no core. One that waits for others'
    work is not starved. 0 where the system does not tell."""

    def __init__(self) -> None:
        self._wall, self._delay = time.monotonic(), _run_delay()

    def lap(self) -> tuple[float, float]:
        """Such seconds, and wall seconds, since the last lap or the start; starts the next one."""
        wall, delay = self._wall, self._delay
        self._wall, self._delay = time.monotonic(), _run_delay()
        return self._delay - delay, self._wall - wall


class StarvedProcesses:
    """Seconds in which processes of this machine could not work, though they wanted to.

    Seconds of the thread that waited longest: the others wait for it, and so do processes that work
    for one another. One that is stopped, or waits for an answer, wants no core, and is not starved.

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
    return _delay("/proc/thread-self/schedstat") or 0.0


def _delay(file: str | Path) -> float | None:
    """The second field of Linux's schedstat, in seconds."""
    try:
        with open(file, "rb", buffering=0) as stream:
            return int(stream.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


# Levels of instructions to which oneDNN can be held and that have no products of bfloat16.
_WITHOUT_BFLOAT16 = (
    "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI",
)  # fmt: skip


@functools.cache
def cpu_info(cpuinfo: str | Path = "/proc/cpuinfo") -> Mapping[str, str]:
    """Entries of the first processor in Linux's list: "model name", "cpu family", "flags", ...; {}
    on other systems."""
    try:
        first = Path(cpuinfo).read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    entries = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in entries}


def processor_features() -> frozenset[str]:
    """ "amx_bf16", "avx512_bf16", ...; empty where Linux does not say."""
    return frozenset((cpu_info().get("flags") or cpu_info().get("Features", "")).split())


def multiplies_bfloat16(
    features: Collection[str] | None = None, environ: Mapping[str, str] = os.environ
) -> bool:
    """Whether a processor multiplies bfloat16 itself, faster than float32; others emulate it.

    features: its features; None: this one's. environ: may hold oneDNN to less, as
        `ONEDNN_MAX_CPU_ISA` does.
    """
    if environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BFLOAT16:
        return False
    found = processor_features() if features is None else features
    return any(name.startswith(("amx_bf16", "avx512_bf16")) for name in found)


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
        """Records the time of an answer to a request of this size (prompts, for example)."""
        if seconds > self.slowest:
            self.slowest, self.slowest_size = seconds, size

    def seconds(self, size: float = 1.0) -> float | None:
        """The limit for a question of this size, or None where there is none."""
        if not isinstance(self.setting, str):  # else "auto"
            return self.setting
        if not self.slowest:
            return self.first
        return max(LEAST_SECONDS, FACTOR * self.slowest * max(1.0, size / self.slowest_size))


def forget_startup() -> None:
    """Excludes all objects that exist now from garbage collection, permanently.

    To be called once a process has started; Ray Serve does it to its replicas. What torch,
    transformers and Ray make when they are imported are half a million objects; a full collection
    looks at each of them, and for a third of a second nothing else runs.
    """
    gc.collect()
    gc.freeze()


# glibc's settings, as malloc.h numbers them: freed bytes at the heap's end beyond which they go
# back to the system, and the size from which memory is asked of it, 32 MiB at most.
_THRESHOLDS = {"trim_threshold": (-1, 2**30), "mmap_threshold": (-3, 2**25)}


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Makes this process keep up to 1 GiB of freed memory, where its malloc is glibc's and the
    environment does not say otherwise. Returns whether it does.

    Passes through a model free tensors and want others of that size. What went back to the system
    comes again page by page, filled with zeros: in a GRPO iteration of 5 M parameters in bfloat16
    30,000 pages, 3 % of its CPU time in the system (virtual machine, Intel Xeon with AMX).
    """
    tunables = environ.get("GLIBC_TUNABLES", "")
    if any(f"MALLOC_{n.upper()}_" in environ or n in tunables for n in _THRESHOLDS):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return False
    return all(set_option(option, size) for option, size in _THRESHOLDS.values())
