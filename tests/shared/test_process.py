"""Cores, time limits and the collector."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rllib_llm.shared.process import (
    CpuClock,
    StarvedProcesses,
    TimeLimit,
    free_memory,
    keep_freed_memory,
    thread_delays,
    threads_for,
    usable_cores,
)


def test_a_quota_bounds_the_cores(tmp_path):
    without = usable_cores(tmp_path)
    assert without >= 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == without
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 0.5
    assert threads_for(4, tmp_path) == 1


def test_a_group_s_limit_bounds_the_memory_and_its_old_files_make_way(tmp_path):
    assert free_memory(tmp_path) > 10_000
    files = {"max": "max\n", "current": "7000\n", "stat": "anon 5000\ninactive_file 1500\n"}
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory(tmp_path) > 10_000
    (tmp_path / "memory.max").write_text("10000\n")
    assert free_memory(tmp_path) == 10_000 - 7000 + 1500
    (tmp_path / "memory.stat").unlink()
    assert free_memory(tmp_path) == 10_000 - 7000
    (tmp_path / "memory.current").write_text("20000\n")
    assert free_memory(tmp_path) == 0


@pytest.mark.parametrize(("reserved", "threads"), [(0, 1), (0.5, 1), (1, 1), (1.9, 1)])
def test_threads_are_as_many_as_ray_reserved(reserved: float, threads: int):
    assert threads_for(reserved) == threads


def test_threads_never_exceed_the_cores():
    assert threads_for(10_000) == int(usable_cores())


def test_a_clock_tells_sleep_from_work():
    clock = CpuClock()
    time.sleep(0.1)
    starved, seconds = clock.lap()
    assert 0 <= starved < 0.1
    assert seconds >= 0.1
    assert clock.lap()[1] < seconds


def test_processes_are_as_starved_as_their_thread_that_waits_longest():
    now = [100.0]
    told = {7: {7: 1.0, 8: 5.0}, 9: {9: 0.0}}  # seconds of delay by thread, of two processes
    starved = StarvedProcesses([7, 9], lambda: now[0], lambda pid: dict(told[pid]))
    now[0] += 10.0
    told[7] = {7: 1.5, 8: 9.0, 20: 3.0}  # a thread that is new tells nothing yet
    told[9] = {9: 2.0}
    assert starved.take() == 4.0  # 9 - 5, of thread 8
    now[0] += 1.0
    told[9] = {9: 8.0}  # more than has passed: of a look that took its time
    assert starved.take() == 1.0
    now[0] += 1.0
    assert starved.take() == 0.0


SPIN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
os.nice(int(sys.argv[2]))
print(flush=True)
while True:
    pass
"""


def spinning(core: int, niceness: int) -> subprocess.Popen:
    command = [sys.executable, "-c", SPIN, str(core), str(niceness)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.skipif(not thread_delays(os.getpid()), reason="the system does not tell of delays")
def test_a_process_that_gets_no_core_is_starved_and_one_that_is_stopped_is_not():
    core = min(os.sched_getaffinity(0))
    processes = [spinning(core, 19), spinning(core, 0)]
    try:
        starved = StarvedProcesses([processes[0].pid])
        time.sleep(1.0)
        # By the kernel's weights, 15 against 1024, it gets 1.4 % of the core at most.
        assert starved.take() > 0.5
        processes[0].send_signal(signal.SIGSTOP)
        while state_of(processes[0].pid) != "T":
            time.sleep(0.01)
        starved.take()
        time.sleep(0.3)
        assert starved.take() == 0.0
    finally:
        for process in processes:
            process.kill()
            process.wait()


def state_of(pid: int) -> str:
    """As the kernel has it: "T" is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_number_or_none_is_what_it_says():
    for setting in (3.0, None):
        limit = TimeLimit(setting)
        limit.record(1000.0)
        assert limit.seconds(8) == setting


def test_auto_is_ten_times_the_slowest_answer():
    limit = TimeLimit("auto")
    assert limit.seconds() == 1800.0
    limit.record(2.0, size=4)
    assert limit.seconds(4) == 120.0  # 20 s would be too strict for what a network does
    limit.record(30.0, size=4)
    limit.record(1.0, size=4)
    assert limit.seconds(4) == limit.seconds(1) == 300.0
    assert limit.seconds(8) == 600.0  # twice the prompts, when another's part is taken over


# In one process, which imports the package once: faults of memory that was freed before, and what
# the garbage collector looks at.
SCRIPT = """
import gc, resource, weakref
import numpy
from rllib_llm.shared.process import forget_startup, keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [numpy.ones(2**17) for _ in range(64)]
    del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "MALLOC_ARENA_MAX": "2"}))
faults()
print(faults())

class Cycle:
    def __init__(self):
        self.me = self

garbage, kept = weakref.ref(Cycle()), Cycle()
before = weakref.ref(kept)
forget_startup()
del kept
after = weakref.ref(Cycle())
gc.collect()
print(garbage() is None, before() is None, after() is None)
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_only_what_is_made_later_is_looked_at_again(printed):
    assert printed[2:] == ["True", "False", "True"]


def test_freed_memory_is_taken_again_without_the_system(printed):
    kept, faults = printed[:2]
    if kept == "False":
        pytest.skip("malloc is not glibc's")
    assert int(faults) < 1000  # 64 MiB have 16,384 pages, each of which came again before


def test_what_the_environment_says_of_malloc_wins():
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"})
