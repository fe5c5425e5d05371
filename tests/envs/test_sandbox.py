"""Contained processes: what goes wrong costs its own call, and changes nothing outside."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from rllib_llm.envs import sandbox_backends
from rllib_llm.envs.judges.remote_rewards import Verifier
from rllib_llm.envs.judges.rewards import Invalid, RewardSum
from rllib_llm.envs.sandbox import Contained, WorkerError, WorkerPool
from rllib_llm.envs.sandbox_backends import Sandbox
from rllib_llm.shared.errors import Problems
from tests.containment import needs_bwrap
from tests.envs.judges.test_judge_server import rows

pytestmark = needs_bwrap
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


def test_what_a_call_has_started_ends_with_its_worker(mark):
    """A session of its own is no hiding place, and neither is a second fork."""
    pool = WorkerPool(f"{FILE}:misbehave", num_workers=1, deadline_s=2.0)
    assert pool.map(calls(f"spawn {mark}")) == [1.0]
    assert begins(mark.encode())
    assert isinstance(pool.map(calls("hang"))[0], Invalid)
    assert ends(mark.encode())
    pool.map(calls(f"spawn {mark}"))
    pool.close()
    assert ends(mark.encode())


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "attempt",
    [
        "write", "change", "network", "loopback", "environment", "parent's environment",
        "kill the parent", "limit the parent", "pin the parent", "slow the parent", "flags",
        "descriptors", "look around", "mount", "remount", "write to the system", "device",
        "write to the root", "host name", "raise the limit", "kernel", "capabilities",
    ],
)  # fmt: skip
def test_what_a_contained_call_cannot_do(tmp_path, monkeypatch, attempt):
    monkeypatch.setenv("MY_SECRET", "hush")
    target = tmp_path / "made"
    readable = []
    if attempt in ("change", "flags"):  # it may read it
        target.write_text("mine")
        readable = [str(tmp_path)]
    panic = Path("/proc/sys/kernel/panic").read_text()
    before = target.stat() if readable else None
    listening = socket.create_server(("127.0.0.1", 0))
    number = listening.getsockname()[1] if attempt == "loopback" else os.getpid()
    with listening, contextlib.ExitStack() as open_sockets:
        if attempt == "descriptors":
            for name in (str(target), "\0made"):
                peer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                open_sockets.enter_context(peer).bind(name)
        pool = WorkerPool(f"{FILE}:attempt", num_workers=1, readable=readable)
        call = {"completion": attempt, "target": str(target), "pid": number}
        assert pool.map([call]) == ["refused"]
        pool.close()
    if readable:
        assert target.stat() == before and target.read_text() == "mine"
    elif attempt != "descriptors":
        assert not target.exists()
    assert Path("/proc/sys/kernel/panic").read_text() == panic
    assert not Path("/usr/made").exists() and not Path("/made").exists()


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


def test_no_call_answers_for_another():
    """A process has its own pipes alone, and knows no word of the next call's."""
    pool = WorkerPool(f"{FILE}:say", num_workers=1, isolated=True)
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
    pool = WorkerPool(f"{FILE}:misbehave", num_workers=1, isolated=True)
    assert pool.map(calls(f"spawn {mark}", "1")) == [1.0, 1.0]
    assert not begins(mark.encode(), seconds=1.0)
    pool.close()


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
        assert process.end() == 0


PROGRAM = {"mode": "program", "program": "program.py"}


def test_a_contained_program_is_held_to_its_time_and_its_output():
    code = "import sys; sys.stdout.write('x' * 10**6); sys.stdout.flush()\nwhile True: pass"
    with Contained(Sandbox(), PROGRAM, files={"program.py": code}) as process:
        assert process.read(20, most=5000) == b"x" * 5000
        with pytest.raises(TimeoutError):
            process.read(0.2, most=10**8)
    assert process.process.returncode == -9


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
        ({"namespaces": False}, "namespaces=False must be an argument of Sandbox"),
        ({"backend": "none"}, "backend='none' must be one of"),
        ({"num_file": 3}, "num_file=3 must be an argument of Sandbox: .*mean 'num_files'"),
    ],
)
def test_limits_that_are_none_are_told_when_a_pool_is_made(limits, said):
    """Some were TypeErrors, some failed in the first worker."""
    with pytest.raises(Problems, match=f"^{said}"):
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


# --- attacks that worked against the sandbox that this project wrote itself ----------------------


@pytest.fixture
def outside(tmp_path):
    """Three files of the user's."""
    for name in "abc":
        tmp_path.joinpath(name).write_text(name)
    yield str(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]
    assert all(tmp_path.joinpath(name).read_text() == name for name in "abc")


def program(code, seconds=20.0, **limits):
    """What it prints, and its exit code."""
    with Contained(Sandbox(**limits), PROGRAM, files={"program.py": code}) as made:
        printed = made.read(seconds).decode()
        return printed, made.end()


def test_stealing_from_inherited_pipes_ends_no_supervisor(outside):
    """Bytes of a supervisor's own pipe were read, which it then waited for; its end left a child
    that swapped folders for links while the sandbox's folder was removed."""
    attack = f"""
import os, subprocess, sys
for fd in range(256):
    try:
        os.set_blocking(fd, False)
        print(fd, end=" ")
        if fd > 2: os.read(fd, 99)
    except OSError:
        pass
for pid in (1, os.getppid()):
    try: os.kill(pid, 19)
    except OSError: pass
os.symlink({outside!r}, "link")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
"""
    printed, code = program(attack)
    assert code == 0 and "1" in printed.split()


@pytest.mark.parametrize("backend", ["bwrap", "process"])
def test_removal_follows_no_link_that_is_swapped_under_it(outside, backend):
    for _ in range(3):
        pool = WorkerPool(f"{FILE}:swap", num_workers=1, deadline_s=20.0, backend=backend,
                          readable=[outside])  # fmt: skip
        assert pool.map([{"completion": "", "outside": outside}]) == [1.0]
        pool.close()


def test_an_isolated_call_meets_nothing_of_the_last_one():
    """Neither its files nor its processes nor its memory; and no child reads the next call. What it
    may read in /tmp (a restored run's folder is put on Python's path) does not lie in its HOME."""
    with tempfile.TemporaryDirectory(dir="/tmp") as readable:
        pool = WorkerPool(f"{FILE}:lurk", num_workers=1, isolated=True, deadline_s=20.0,
                          readable=[readable])  # fmt: skip
        for _ in range(2):
            for completion in ("leave", "look"):
                found = pool.map([{"completion": completion, "secret": "the right answer"}])
                assert found == [[[], 0, False, 0]]
        pool.close()


def test_a_call_that_cannot_be_sent_is_late():
    """Its words fill the pipe of a worker that a leftover child has stopped."""
    pool = WorkerPool(f"{FILE}:stop", num_workers=1, deadline_s=2.0)
    assert pool.map(calls("stop")) == [1.0]
    time.sleep(1.0)
    start = time.monotonic()
    (found,) = pool.map(calls("x" * 10**6))
    assert isinstance(found, Invalid) and "deadline_s=2" in found.reason
    assert time.monotonic() - start < 20
    assert pool.map(calls("x" * 10**6)) == [1.0]  # what is long arrives
    pool.close()


def test_processes_that_start_one_another_end_at_the_deadline():
    """300 at a time, as root's are not counted; each starts its successor."""
    code = (
        "import os\n"
        "for _ in range(300):\n"
        "    if not os.fork(): break\n"
        "while True:\n"
        "    if os.fork(): os._exit(0) if os.getpid() != 2 else os.wait()"
    )
    with Contained(Sandbox(num_processes=512), PROGRAM, files={"program.py": code}) as made:
        with pytest.raises(TimeoutError):
            made.read(4.0)
        start = time.monotonic()
    assert time.monotonic() - start < 5


@pytest.mark.skipif(os.getuid() == 0, reason="the kernel does not count root's processes")
def test_processes_are_counted():
    code = "import os, time\nfor _ in range(40):\n    if not os.fork(): time.sleep(9)"
    assert "BlockingIOError" in program(code, num_processes=20)[0]


def test_memory_of_the_folder_is_bounded():
    code = (
        "import os\n"
        "for folder in ('/tmp', '/dev/shm'):\n"
        "    try:\n"
        "        for i in range(9): open(f'{folder}/{i}', 'wb').write(bytes(2**24))\n"
        "        print('written')\n"
        "    except OSError as error: print(error.errno)"
    )
    said, _ = program(code, memory_mb=100)
    if "--size" in sandbox_backends._bubblewrap()[1]:
        assert said.split() == ["28", "28"]  # ENOSPC


# --- backends ------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    """What was found out once is found out anew."""
    for cached in (sandbox_backends.bwrap_refused, sandbox_backends._bubblewrap):
        cached.cache_clear()
    yield
    for cached in (sandbox_backends.bwrap_refused, sandbox_backends._bubblewrap):
        cached.cache_clear()


def stand_in(folder, name, text):
    folder.joinpath(name).write_text(f"#!/bin/sh\n{text}")
    folder.joinpath(name).chmod(0o755)


@pytest.mark.parametrize("backend", ["auto", "bwrap"])
def test_where_bubblewrap_does_not_work_it_is_said_how_to_install_it(
    tmp_path, monkeypatch, fresh, backend
):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = f"^backend='{backend}' must be able to contain a process: .*not on PATH.*apt-get install"
    with pytest.raises(Problems, match=said):
        WorkerPool(f"{FILE}:length", backend=backend)
    sandbox_backends.bwrap_refused.cache_clear()
    stand_in(tmp_path, "bwrap", "echo 'No permissions to create new namespace' >&2; exit 1")
    with pytest.raises(Problems, match=r"fails: No permissions .*backend: process"):
        Sandbox(backend=backend)


def test_limits_alone_are_no_boundary_and_say_so(mark):
    sandbox_backends._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="backend='process' is no boundary"):
        pool = WorkerPool(f"{FILE}:misbehave", num_workers=1, backend="process", deadline_s=2.0)
        assert pool.map(calls("1", "die", "hang", "2"))[::3] == [1.0, 2.0]
    pool.close()
    code = "import os; print(os.getcwd() == os.environ['HOME']); os.mkdir('x')"
    said, status = program(code, backend="process", memory_mb=512)
    assert (said, status) == ("True\n", 0)
    assert "MemoryError" in program("bytearray(2**31)", backend="process", memory_mb=512)[0]


DOCKER = """printf '%s\\n' "$@" >> "$0.log"
case $1 in
  kill) exit 0;;
esac
while [ "$1" != image:1 ]; do shift; done
shift
exec "$@"
"""


def test_docker_is_asked_for_one_container_a_call(tmp_path, monkeypatch):
    stand_in(tmp_path, "docker", DOCKER)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Problems, match="^image=None must name an image"):
        Sandbox(backend="docker")
    pool = WorkerPool(f"{FILE}:remember", num_workers=1, isolated=True, backend="docker",
                      image="image:1", memory_mb=2000, num_processes=33)  # fmt: skip
    assert pool.map(calls("a", "b")) == [["a"], ["b"]]
    pool.close()
    said = (tmp_path / "docker.log").read_text().split("\n")
    names = {said[i + 1] for i, word in enumerate(said) if word == "--name"}
    ended = {said[i + 1] for i, word in enumerate(said) if word == "kill"}
    # The third is started for a next call, and may be ended before its command has run.
    assert len(ended) == 3 and names <= ended and len(names) >= 2
    flags = " ".join(said)
    for flag in ("run --rm", "--network none", "--read-only", "--cap-drop ALL", "--pids-limit 33",
                 "--memory 2000m", "--security-opt no-new-privileges", "--user 65534:65534",
                 f"--volume={FILE}:{FILE}:ro"):  # fmt: skip
        assert flag in flags
