"""Functions in processes with deadlines: what hangs, dies or raises costs its own call."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from rllib_llm.envs.judges.rewards import Invalid, RewardSum
from rllib_llm.envs.judges.worker_pool import Verifier, WorkerError, WorkerPool
from tests.envs.judges.test_judge_server import rows

FILE = str(Path(__file__).with_name("worker_functions.py"))


@pytest.fixture(scope="module")
def misbehaving():
    pool = WorkerPool(f"{FILE}:misbehave", num_workers=1, deadline_s=1.0)
    yield pool
    pool.close()


def calls(*completions):
    return [{"completion": completion} for completion in completions]


def test_results_come_in_the_order_of_the_calls():
    pool = WorkerPool(f"{FILE}:length", num_workers=2)
    texts = ["a" * n for n in (3, 1, 2, 5, 4)]
    assert pool.map(calls(*texts)) == [3, 1, 2, 5, 4]
    assert pool.map([{"completion": "ab", "factor": 3}]) == [6]
    assert pool.map([]) == []
    pool.close()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("hang", "it did not end within deadline_s=1"),
        ("die", "its process ended with exit code 3"),
        ("eat", "MemoryError"),  # 8 GiB of the 4 that a worker has
        ("raise", "KeyError: 'no such thing'"),
    ],
)
def test_what_goes_wrong_costs_its_own_call(misbehaving, bad, reason):
    first, failed, last, skipped = misbehaving.map(calls("1", bad, "2", "skip"))
    assert (first, last, skipped) == (1.0, 2.0, None)
    assert isinstance(failed, Invalid) and reason in failed.reason


def test_deadlines_hold_off_the_main_thread(misbehaving):
    """Where SIGALRM cannot be used at all."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(misbehaving.map(calls("hang", "3"))))
    thread.start()
    thread.join(60)
    assert isinstance(found[0], Invalid) and found[1] == 3.0


def test_a_worker_outlives_its_parent_by_one_call_at_most():
    pool = WorkerPool(f"{FILE}:misbehave", num_workers=1, deadline_s=0.5)
    assert pool.map(calls("1")) == [1.0]
    process = pool._workers.queue[0]._process
    process.stdin.write(b'{"completion": "hang"}\n')  # nobody waits for it
    process.stdin.flush()
    assert process.wait(timeout=60) == -14  # SIGALRM
    assert isinstance(pool.map(calls("2"))[0], Invalid)
    assert pool.map(calls("2")) == [2.0]
    pool.close()


def test_closing_ends_the_processes():
    pool = WorkerPool(f"{FILE}:misbehave", num_workers=1)
    pool.map(calls("1"))
    pid = pool._workers.queue[0]._process.pid
    pool.close()
    time.sleep(0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_function_that_is_not_there_is_named():
    pool = WorkerPool("no_such_module:check", num_workers=1)
    with pytest.raises(WorkerError, match="'no_such_module:check' must be importable .*no_such_mo"):
        pool.map(calls("1"))
    assert pool._workers.queue[0]._process is None
    with pytest.raises(WorkerError):  # at once: a batch is asked about row by row then
        pool.map(calls("1"))
    with pytest.raises(ValueError, match="deadline_s=0 must be above 0"):
        WorkerPool("a:b", deadline_s=0)


def test_a_verifier_is_a_reward_function():
    verifier = Verifier(f"{FILE}:misbehave", num_workers=1, deadline_s=1.0)
    with pytest.warns(UserWarning, match="KeyError: 'no such thing'"):
        judged = RewardSum(verifier)(rows(["1", "raise", "0.5", "skip"]))
    assert judged.valid.tolist() == [True, False, True, False]
    assert judged.scores.tolist() == [1.0, 0.0, 0.5, 0.0]
    assert judged.reasons[1] == "Verifier: KeyError: 'no such thing'"
    with pytest.raises(ValueError, match=r"there is no \['answer'\]"):
        Verifier(f"{FILE}:length", columns=["answer"])(["a"])
