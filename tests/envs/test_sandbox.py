"""Contained processes: what goes wrong costs its own call, and changes nothing outside."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rllib_llm.envs import sandbox_program
from rllib_llm.envs.judges.remote_rewards import Verifier
from rllib_llm.envs.judges.rewards import Invalid, RewardSum
from rllib_llm.envs.sandbox import Contained, Sandbox, WorkerError, WorkerPool
from rllib_llm.shared.errors import SettingError
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
        ("hang", "no answer within deadline_s=1"),
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


def is_running(mark):
    """Whether a process has this in its command line."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark in place.read_bytes().split(b"\0"):
                return True
    return False


def begins(mark, seconds=20.0):
    """The shell has gone on before `sleep` is there: it is `setsid`, or a copy of the shell."""
    until = time.monotonic() + seconds
    while not is_running(mark) and time.monotonic() < until:
        time.sleep(0.02)
    return is_running(mark)


def ends(mark, seconds=20.0):
    until = time.monotonic() + seconds
    while is_running(mark) and time.monotonic() < until:
        time.sleep(0.02)
    return not is_running(mark)


@pytest.fixture
def mark():
    """An argument that no other process has, for `sleep`."""
    return f"{1000 + time.time_ns() % 10**6}.{os.getpid()}"


PARENT = """
import sys
from rllib_llm.envs.sandbox import WorkerPool
pool = WorkerPool(sys.argv[1], num_workers=1, deadline_s=60)
print(pool.map([{"completion": "spawn " + sys.argv[2]}]), flush=True)
pool.map([{"completion": "hang"}])
"""


@pytest.mark.parametrize("namespaces", [True, False])
def test_what_a_call_has_started_ends_with_its_worker(mark, namespaces):
    """A session of its own is no hiding place, and neither is a second fork."""
    pool = WorkerPool(f"{FILE}:misbehave", num_workers=1, deadline_s=2.0, namespaces=namespaces)
    assert pool.map(calls(f"spawn {mark}")) == [1.0]
    assert begins(mark.encode())
    assert isinstance(pool.map(calls("hang"))[0], Invalid)
    assert ends(mark.encode())
    pool.map(calls(f"spawn {mark}"))
    pool.close()
    assert ends(mark.encode())


def test_workers_end_with_whoever_started_them(mark):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"{FILE}:misbehave", mark], stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout.readline() == b"[1.0]\n"
        assert begins(mark.encode())
    finally:
        parent.kill()
        parent.wait()
    assert ends(mark.encode())


@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize(
    "attempt",
    [
        "write", "change", "network", "unix", "environment", "parent's environment",
        "kill the parent", "limit the parent", "pin the parent", "slow the parent", "slow the user",
        "shared memory",
    ],
)  # fmt: skip
def test_what_a_contained_call_cannot_do(tmp_path, monkeypatch, attempt, namespaces):
    monkeypatch.setenv("MY_SECRET", "hush")
    pool = WorkerPool(f"{FILE}:attempt", num_workers=1, namespaces=namespaces)
    target = tmp_path / "made"
    if attempt == "change":
        target.write_text("mine")
        before = target.stat()
    call = {"completion": attempt, "target": str(target), "pid": os.getpid()}
    assert pool.map([call]) == ["refused"]
    pool.close()
    if attempt == "change":
        assert target.stat() == before and target.read_text() == "mine"
    else:
        assert not target.exists()


def test_no_capabilities_come_back_in_a_namespace_within():
    """Without namespaces a call may make some where the sampler may: the kernel's own choice."""
    pool = WorkerPool(f"{FILE}:attempt", num_workers=1)
    assert pool.map([{"completion": "capabilities", "target": "", "pid": 0}]) == ["refused"]
    pool.close()


def test_what_a_sandbox_is_given_it_may_use(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hush")
    pool = WorkerPool(
        f"{FILE}:attempt", num_workers=1, network=True, environment=["MY_SECRET"],
        writable=[str(tmp_path)],
    )  # fmt: skip
    done = [
        {"completion": name, "target": str(tmp_path / "made"), "pid": 0}
        for name in ("write", "network", "environment")
    ]
    assert pool.map(done) == ["done"] * 3
    pool.close()


def test_an_isolated_call_changes_nothing_for_the_next():
    shared = WorkerPool(f"{FILE}:remember", num_workers=1)
    apart = WorkerPool(f"{FILE}:remember", num_workers=1, isolated=True)
    assert shared.map(calls("a", "b")) == [["a"], ["a", "b"]]
    assert apart.map(calls("a", "b")) == [["a"], ["b"]]
    died = apart.map(calls("die", "c"))
    assert isinstance(died[0], Invalid) and died[1] == ["c"]
    shared.close()
    apart.close()


@pytest.mark.parametrize("namespaces", [True, False])
def test_no_call_answers_for_another(namespaces):
    """A copy of the worker has a pipe of its own alone, and knows no word of the next call's."""
    pool = WorkerPool(f"{FILE}:say", num_workers=1, isolated=True, namespaces=namespaces)
    for _ in range(3):
        found = pool.map(calls("forge", "a", "forge", "b"))
        assert found[1::2] == ["a", "b"], found
    pool.close()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b'{"value": 1}', "no answer to what was asked"),  # without the word
        (b'WORD {"value": 1}\n{"value": 2}', "no answer to what was asked"),
        (b"WORD [1]", "neither value nor error"),
        (b"WORD {}", "neither value nor error"),
        (b'WORD {"value": NaN}', "NaN is not finite"),
        (b'WORD {"value": 1e999}', "1e999 is not finite"),
        (b"WORD " + b"[" * 200_000, "too deep"),
        (b"x" * 2**25, "more than 16777216 bytes"),
    ],
)
def test_what_cannot_be_an_answer_ends_the_worker(monkeypatch, said, reason):
    monkeypatch.setattr("secrets.token_hex", lambda size: "WORD")
    pool = WorkerPool(f"{FILE}:length", num_workers=1)
    assert pool.map(calls("ab")) == [2]
    worker = pool._workers.queue[0]
    reading, writing = os.pipe()
    real, worker.process.stdout = worker.process.stdout, os.fdopen(reading, "rb")
    thread = threading.Thread(target=_written, args=(writing, said + b"\n"))
    thread.start()
    (found,) = pool.map(calls("ab"))
    assert isinstance(found, Invalid) and reason in found.reason
    assert pool._workers.queue == [None]  # and the next call has a new one
    thread.join(20)
    real.close()
    assert pool.map(calls("abc")) == [3]
    pool.close()


def _written(fd, text):
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "wb") as file:
        file.write(text)


def test_what_a_function_returns_is_finite_and_has_an_end():
    pool = WorkerPool(f"{FILE}:say", num_workers=1)
    found = pool.map(calls("nan", "a", "infinite", "b", "long", "c", "deep"))
    assert found[1::2] == ["a", "b", "c"]
    assert all(isinstance(each, Invalid) for each in found[:6:2])
    pool.close()


def test_what_an_isolated_call_has_started_ends_with_the_call(mark):
    """Also where there are no namespaces: a daemon's parent is the worker then."""
    pool = WorkerPool(f"{FILE}:misbehave", num_workers=1, isolated=True, namespaces=False)
    assert pool.map(calls(f"spawn {mark}", "1")) == [1.0, 1.0]
    assert not begins(mark.encode(), seconds=1.0)
    pool.close()


def test_a_folder_goes_with_whoever_made_it():
    """A sampler that is killed removes nothing."""
    code = (
        "import os, sys; from rllib_llm.envs.sandbox import *\n"
        "made = Contained(Sandbox(), {'mode': 'calls', 'function': sys.argv[1], 'isolated': 0},"
        " is_asked=True)\n"
        "os.makedirs(made.folder + '/of/folders')\n"
        "print(made.folder, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, f"{FILE}:length"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    folder = parent.stdout.readline().decode().strip()
    assert os.path.isdir(folder)
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 20
    while os.path.exists(folder) and time.monotonic() < until:
        time.sleep(0.02)
    assert not os.path.exists(folder)


@pytest.mark.parametrize(("release", "counts"), [("5.13.0-1", False), ("5.14.0-503.el9", True)])
def test_processes_are_counted_where_the_kernel_counts_them_apart(monkeypatch, release, counts):
    """Before, RLIMIT_NPROC counts all that the user runs, and forks fail at random."""
    set_limits = []
    monkeypatch.setattr("platform.release", lambda: release)
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: set_limits.append(kind))
    missing = []
    sandbox_program._limit({"limits": {"NPROC": 9}}, True, missing)
    assert bool(set_limits) == counts and bool(missing) != counts


def test_a_program_ends_with_its_threads():
    code = (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start(); print('early')"
    )
    with Contained(Sandbox(), PROGRAM, files={"program.py": code}) as process:
        assert process.read(20) == b"early\nlate\n"


def test_a_program_is_the_main_module_and_ends_as_python_does():
    code = (
        "import atexit, dataclasses, pickle\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n"
        "atexit.register(print, 'at the end')\nprint(pickle.loads(pickle.dumps(Point(3))))"
    )
    with Contained(Sandbox(), PROGRAM, files={"program.py": code}) as process:
        assert process.read(20) == b"Point(x=3)\nat the end\n"


def test_folders_deeper_than_python_s_stack_are_removed():
    code = (
        "import os; os.symlink('/', 'link'); os.mkfifo('pipe'); os.mkdir('closed', 0)\n"
        "for _ in range(1200): os.mkdir('a'); os.chdir('a'); os.symlink('/', 'link')"
    )
    with Contained(Sandbox(), PROGRAM, files={"program.py": code}) as process:
        assert process.read(60) == b""
    assert not os.path.exists(process.folder)


PROGRAM = {"mode": "program", "program": "program.py"}


def test_a_contained_program_is_held_to_its_time_and_its_output():
    code = "import sys; sys.stdout.write('x' * 10**6); sys.stdout.flush()\nwhile True: pass"
    with Contained(Sandbox(), PROGRAM, files={"program.py": code}) as process:
        assert process.read(20, most=5000) == b"x" * 5000
        with pytest.raises(TimeoutError):
            process.read(0.2, most=10**8)
        folder = process.folder
    assert process.process.returncode == 137 and not os.path.exists(folder)


def test_closing_ends_the_processes():
    pool = WorkerPool(f"{FILE}:misbehave", num_workers=1)
    pool.map(calls("1"))
    pid = pool._workers.queue[0].process.pid
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_that_does_not_start_in_time_names_the_limit_and_no_class_of_ours():
    pool = WorkerPool(f"{FILE}:length", num_workers=1, start_s=0.01)
    with pytest.raises(WorkerError, match=r"in a worker process: no answer within start_s=0\.01\."):
        pool.map(calls("1"))
    assert pool._workers.queue == [None]
    pool.close()


def test_a_function_that_is_not_there_is_named():
    pool = WorkerPool("no_such_module:check", num_workers=1)
    with pytest.raises(WorkerError, match="'no_such_module:check' must be importable .*no_such_mo"):
        pool.map(calls("1"))
    assert pool._workers.queue == [None]
    with pytest.raises(WorkerError):  # at once: a batch is asked about row by row then
        pool.map(calls("1"))


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"deadline_s": 0}, "deadline_s=0 must be a number above 0"),
        ({"num_workers": "2"}, "num_workers='2' must be a whole number"),
        ({"memory_mb": 0}, "memory_mb=0 must be a whole number of at least 1 or None"),
        ({"num_file": 3}, "num_file=3 must be an argument of Sandbox: .*mean 'num_files'"),
    ],
)
def test_limits_that_are_none_are_told_when_a_pool_is_made(limits, said):
    """Some were TypeErrors, some failed in the first worker."""
    with pytest.raises(SettingError, match=f"^{said}"):
        WorkerPool("a:b", **limits)


def test_a_verifier_is_a_reward_function():
    verifier = Verifier(f"{FILE}:misbehave", num_workers=1, deadline_s=1.0)
    with pytest.warns(UserWarning, match="KeyError: 'no such thing'"):
        judged = RewardSum(verifier)(rows(["1", "raise", "0.5", "skip"]))
    assert judged.valid.tolist() == [True, False, True, False]
    assert judged.scores.tolist() == [1.0, 0.0, 0.5, 0.0]
    assert judged.reasons[1] == "Verifier: KeyError: 'no such thing'"
    with pytest.raises(ValueError, match="columns='answer' must be a column of the data set"):
        Verifier(f"{FILE}:length", columns=["answer"])(["a"])
