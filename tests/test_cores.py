from __future__ import annotations

import threading
import time

import pytest

from rllib_llm.cores import CpuClock, threads_for, usable_cores


def test_a_quota_bounds_the_cores(tmp_path):
    without = usable_cores(tmp_path)
    assert without >= 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == without
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 0.5
    assert threads_for(4, tmp_path) == 1


@pytest.mark.parametrize(("reserved", "threads"), [(0, 1), (0.5, 1), (1, 1), (1.9, 1)])
def test_threads_are_as_many_as_ray_reserved(reserved: float, threads: int):
    assert threads_for(reserved) == threads


def test_threads_never_exceed_the_cores():
    assert threads_for(10_000) == int(usable_cores())


def test_a_clock_tells_sleep_from_work():
    clock = CpuClock()
    time.sleep(0.1)
    assert clock.cpu_share < 0.5
    assert 0 <= clock.starved_share < 1
    stop = threading.Event()
    clock.restart()
    begin = time.process_time()
    while time.process_time() - begin < 0.05:
        pass
    stop.set()
    assert clock.cpu_share > 0
