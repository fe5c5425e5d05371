"""What worker processes run in the tests."""

import ctypes
import os
import resource
import socket
import subprocess
import time
from pathlib import Path


def say(completion):
    """Writes into every pipe that it has; what other than a worker's answers may a test forge."""
    if completion == "forge":
        _write_everywhere(b'{"value": 1.0}\n{"value": 2.0}\n' * 3, os.getppid())
    return SAID.get(completion, completion)


deep = 1
for _ in range(900):
    deep = [deep]
SAID = {"nan": float("nan"), "infinite": 10**400, "long": "x" * 2**25, "deep": deep}


def _write_everywhere(text, *others):
    for pid in ("self", *others):
        for place in _listed(f"/proc/{pid}/fd"):
            try:
                fd = os.open(place, os.O_WRONLY)
            except OSError:
                continue
            os.write(fd, text)


def _listed(folder):
    try:
        return [os.path.join(folder, name) for name in os.listdir(folder)]
    except OSError:
        return []


def length(completion, factor=1):
    print("this is no answer")
    return len(completion) * factor


def misbehave(completion):
    if completion == "hang":
        while True:
            time.sleep(0.01)
    if completion == "die":
        os._exit(3)
    if completion == "eat":
        return len(bytearray(2**33))
    if completion == "raise":
        raise KeyError("no such thing")
    if completion.startswith("spawn"):  # not a child, and not of its session
        program = f"setsid sleep {completion.split()[1]} &"
        subprocess.run(program, shell=True, check=True, stdout=subprocess.DEVNULL)
        return 1.0
    return None if completion == "skip" else float(completion)


SEEN = []


def remember(completion):
    if completion == "die":
        os._exit(3)
    SEEN.append(completion)
    return SEEN


def attempt(completion, target, pid):
    """What code of a model may try; "refused" where it cannot."""
    try:
        done = _ATTEMPTS[completion](target, pid)
    except OSError:
        return "refused"
    return "refused" if done is False else "done"


def _write(target, pid):
    with open(target, "w") as file:
        file.write("x")


def _change(target, pid):
    """Changes a file that is not its own, without writing to it; whether anything is possible."""
    changes = [
        lambda: os.chmod(target, 0o777),
        lambda: os.fchmod(os.open(target, os.O_RDONLY), 0o777),
        lambda: os.chown(target, os.getuid(), os.getgid()),
        lambda: os.utime(target, (1, 1)),
        lambda: os.setxattr(target, "user.mark", b"1"),
        lambda: os.truncate(target, 0),
    ]
    done = False
    for change in changes:
        try:
            change()
            done = True
        except OSError:
            pass
    return done


def _called(name, *arguments):
    """Calls a function of the C library."""
    found = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), name)
    return found


def _share_memory(target, pid):
    """A segment of shared memory, which would outlive all processes; it is removed again."""
    segment = _called("shmget", 0, 4096, 0o1600)  # IPC_PRIVATE, IPC_CREAT
    _called("shmctl", segment, 0, None)


_ATTEMPTS = {
    "limit the parent": lambda target, pid: resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0)),
    "pin the parent": lambda target, pid: os.sched_setaffinity(pid, os.sched_getaffinity(0)),
    "slow the parent": lambda target, pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
    "slow the user": lambda target, pid: os.setpriority(os.PRIO_USER, 0, 1),
    "shared memory": _share_memory,
    "capabilities": lambda target, pid: _called("unshare", 0x10000000),  # CLONE_NEWUSER
    "change": _change,
    "write": _write,
    "network": lambda target, pid: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
    "unix": lambda target, pid: socket.socket(socket.AF_UNIX).close(),
    "environment": lambda target, pid: "MY_SECRET" in os.environ,
    "parent's environment": lambda target, pid: Path(f"/proc/{pid}/environ").read_text(),
    "kill the parent": lambda target, pid: os.kill(pid, 0),
}
