"""What worker processes run in the tests."""

import ctypes
import fcntl
import os
import resource
import socket
import stat
import struct
import subprocess
import sys
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
    except (OSError, ValueError):
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


def _change_flags(target, pid):
    """Of files outside, also through what came with it: that is pipes alone."""
    given = [os.fstat(fd) for fd in range(3)]
    if not all(stat.S_ISFIFO(one.st_mode) for one in given):
        return True
    found = []
    for place in (target, os.path.dirname(target)):  # FS_IOC_SETFLAGS: no times of access
        found.append(lambda place=place: _set_flags(place))
    if os.getuid():  # devices are root's own: the guide says so
        found += [lambda: os.chmod("/dev/null", 0o600), lambda: os.utime("/dev/zero", (1, 1))]
    return _any(found)


def _set_flags(place):
    fcntl.ioctl(os.open(place, os.O_RDONLY), 0x40086602, struct.pack("l", 0x80))


def _any(attempts):
    done = False
    for attempt in attempts:
        try:
            attempt()
            done = True
        except OSError:
            pass
    return done


def _pass_descriptors(target, pid):
    """To a socket of the machine: by its path and by its abstract name."""
    ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return _any(
        lambda name=name: ours.sendmsg(
            [b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0))], 0, name)
        for name in (target, "\0" + os.path.basename(target))
    )


def _seen(target, pid):
    """Files of the user's, and processes that are not of this container."""
    home = os.path.expanduser("~root")
    own = [name for name in _listed("/proc") if os.path.basename(name).isdigit()]
    return os.path.exists(target) or len(own) > 8 or os.path.exists(f"{home}/.ssh")


def swap(completion, outside):
    """Leaves a child that swaps folders for links to `outside` for seconds beyond the deadline."""
    code = f"""
import os, time
end = time.monotonic() + 5
while time.monotonic() < end:
    try:
        os.makedirs('a/b/c', exist_ok=True); open('a/b/c/f', 'w').close()
        os.rename('a', 'z'); os.symlink({outside!r}, 'a'); os.unlink('a'); os.rename('z', 'a')
    except OSError:
        pass
"""
    for _ in range(3):
        subprocess.Popen(["python3", "-c", code], start_new_session=True, cwd=os.environ["HOME"])
    time.sleep(0.3)
    return 1.0


def lurk(completion, secret=""):
    """A call that changes what later ones meet, and leaves a child that reads their pipe."""
    home = os.environ["HOME"]
    found = sorted(os.listdir(home)), len(_listed("/dev/shm")), "seen" in SAID, _sleepers()
    if completion == "leave":
        SAID["seen"] = 1
        for folder in (home, "/dev/shm"):
            Path(folder, "math.py").write_text("pi = 3")
        code = f"import os\nwhile True: open({home!r} + '/stolen', 'ab').write(os.read(0, 9999))"
        subprocess.Popen(["python3", "-c", code], start_new_session=True, stdin=0)
        subprocess.Popen(["sleep", "99"], start_new_session=True)
    return found


def _sleepers():
    found = 0
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        found += place.read_bytes().startswith(b"sleep")
    return found


def stop(completion):
    """Leaves a child that stops the worker for good."""
    code = f"import os, time\ntime.sleep(0.5)\nwhile True: os.kill({os.getpid()}, 19)"
    if completion == "stop":
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    return 1.0


_ATTEMPTS = {
    "flags": _change_flags,
    "descriptors": _pass_descriptors,
    "look around": _seen,
    "mount": lambda target, pid: _called("mount", b"x", b"/tmp", b"tmpfs", 0, None),
    "remount": lambda target, pid: _called("mount", None, b"/usr", None, 0x1020, None),
    "write to the system": lambda target, pid: Path("/usr/made").write_text("x"),
    "write to the root": lambda target, pid: Path("/made").write_text("x"),
    "host name": lambda target, pid: socket.sethostname("x"),
    "device": lambda target, pid: os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0)),
    "raise the limit": lambda target, pid: resource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999)),
    "loopback": lambda target, pid: socket.create_connection(("127.0.0.1", int(pid)), 5).close(),
    "kernel": lambda target, pid: Path("/proc/sys/kernel/panic").write_text("1"),
    "limit the parent": lambda target, pid: resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0)),
    "pin the parent": lambda target, pid: os.sched_setaffinity(pid, os.sched_getaffinity(0)),
    "slow the parent": lambda target, pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
    "slow the user": lambda target, pid: os.setpriority(os.PRIO_USER, 0, 1),
    "capabilities": lambda target, pid: _called("unshare", 0x10000000),  # CLONE_NEWUSER
    "change": _change,
    "write": _write,
    "network": lambda target, pid: socket.socket(2, 2).connect(("192.0.2.1", 9)),
    "environment": lambda target, pid: "MY_SECRET" in os.environ,
    "parent's environment": lambda target, pid: Path(f"/proc/{pid}/environ").read_text(),
    "kill the parent": lambda target, pid: os.kill(pid, 0),
}
