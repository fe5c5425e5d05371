"""Backends that hold a sandboxed process: bubblewrap, Docker, or no more than limits.

A backend turns a sandbox into a command and says how what the command started is ended. Each
process has a container and a folder of its own, which end with it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rllib_llm.shared.arguments import Count, checked
from rllib_llm.shared.errors import Problems, require

PROGRAM = str(Path(__file__).with_name("sandbox_program.py"))
_TMP, _IN = "/tmp", "/tmp/sandbox"  # the folder, as a container sees it: paths may lie in /tmp
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix")
_ETC = ("alternatives", "ca-certificates", "group", "hosts", "ld.so.cache", "localtime",
        "nsswitch.conf", "passwd", "pki", "resolv.conf", "ssl")  # fmt: skip
_KEPT = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
_COUNTS_APART = (5, 14)  # Linux that counts processes of each user namespace by itself
_END_SECONDS = 10.0
_PROBE_SECONDS = 60.0
_HOLDS = "be able to contain a process"


@checked
@dataclass(frozen=True)
class Sandbox:
    """A sandboxed process: what holds it, and its limits.

    backend: "bwrap" (bubblewrap), "docker" (in `image`), "process" (limits alone: no boundary);
    "auto": bwrap. memory_mb: address space of each process, and size of its folder; None: no limit.
    num_processes: where the user is not root, and Linux is 5.14 or later, or with docker.
    num_files: open at once. file_mb: of one file. cpu_s: of each process. network: whether it has
    the machine's. environment: names of variables that it keeps, beside those of language and time
    zone. readable, writable: files and folders, beside Python's and one of its own.

    Raises:
        Problems: the backend does not work here.
    """

    memory_mb: Count | None = 4096
    num_processes: Count = 256
    num_files: Count = 256
    file_mb: Count = 64
    cpu_s: Count | None = None
    network: bool = False
    environment: Sequence[str] = ()
    readable: Sequence[str] = ()
    writable: Sequence[str] = ()
    backend: Literal["auto", "bwrap", "docker", "process"] = "auto"
    image: str | None = None

    def __post_init__(self) -> None:
        if BACKENDS[self.backend] is bwrap and (reason := bwrap_refused()):
            raise Problems(
                "backend", _HOLDS, reason,
                "Install it (apt-get install bubblewrap, dnf install bubblewrap), in Docker with "
                "--security-opt seccomp=unconfined --security-opt systempaths=unconfined; else "
                "backend: docker, or backend: process, which is no boundary", self.backend,
            )  # fmt: skip
        if self.backend == "docker":
            docker(self, ())

    def limits(self, launch: Launch) -> dict[str, int | None]:
        """The most its processes may take, by the names of setrlimit(2)."""
        return {
            "AS": None if self.memory_mb is None else self.memory_mb * 2**20,
            "NPROC": self.num_processes if launch.counts else None, "NOFILE": self.num_files,
            "FSIZE": self.file_mb * 2**20, "CPU": self.cpu_s, "CORE": 0,
        }  # fmt: skip

    def variables(self, folder: str) -> dict[str, str]:
        """Its environment."""
        names = (*_KEPT, *self.environment)
        kept = {name: os.environ[name] for name in names if name in os.environ}
        own = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        return {**own, **kept}


@dataclass(frozen=True)
class Launch:
    """How a contained process is started, and ended.

    command: with its arguments. folder: the one of its own, as it sees it. cwd: where the command
    is run. counts: whether RLIMIT_NPROC counts its processes alone. kill: ends what the command's
    own end leaves; it gets the process id. clean: removes what lies outside. environ: the
    command's, where it is not the process's own.
    """

    command: Sequence[str]
    folder: str = _IN
    cwd: str = "/"
    counts: bool = False
    kill: Callable[[int], None] = field(default=lambda pid: None)
    clean: Callable[[], None] = field(default=lambda: None)
    environ: Mapping[str, str] | None = None


Backend = Callable[[Sandbox, Sequence[str]], Launch]
"""One way to contain a process that may read these paths."""


def bwrap(sandbox: Sandbox, paths: Sequence[str]) -> Launch:
    """Namespaces of its own; nothing but the system, Python and `paths` to read."""
    program, knows = _bubblewrap()
    size = [] if sandbox.memory_mb is None else ["--size", str(sandbox.memory_mb * 2**20)]
    tmpfs = [*(size if "--size" in knows else []), "--tmpfs"]
    command = [
        program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session",
        "--cap-drop", "ALL", *(["--share-net"] if sandbox.network else []),
        *(["--disable-userns"] if "--disable-userns" in knows else []),
        "--proc", "/proc", "--remount-ro", "/proc",  # root would set the kernel's settings there
        "--dev", "/dev", *tmpfs, "/dev/shm", "--remount-ro", "/dev", *tmpfs, _TMP, "--dir", _IN,
    ]  # fmt: skip
    for path in _SYSTEM:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    real = os.path.realpath(sys.executable)
    python = ["/usr", sys.prefix, sys.base_prefix, os.path.dirname(real)]
    python += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    etc = (f"/etc/{name}" for name in _ETC)
    for path in dict.fromkeys((*python, *etc, PROGRAM, *paths, *sandbox.readable)):
        if path:
            command += ["--ro-bind-try", path, os.path.abspath(path)]
    for path in map(os.path.abspath, sandbox.writable):
        command += ["--bind-try", path, path]
    command += ["--remount-ro", "/", "--chdir", _IN, "--", sys.executable, "-I", PROGRAM]
    parts = platform.release().split(".")[:2]  # 5.14.0-503.el9.x86_64 is (5, 14)
    release = tuple(int("0" + "".join(filter(str.isdigit, part))) for part in parts)
    return Launch(command, counts=release >= _COUNTS_APART)


def docker(sandbox: Sandbox, paths: Sequence[str]) -> Launch:
    """A container of Docker, in an image that has Python and what the function needs."""
    if (program := shutil.which("docker")) is None:
        raise Problems("backend", _HOLDS, "docker is not on PATH", value=sandbox.backend)
    require(sandbox.image is not None, "image", None, "name an image", "docker runs Python in one",
            "For example python:3.11")  # fmt: skip
    name = f"rllib-llm-{os.urandom(8).hex()}"
    read = [os.path.abspath(path) for path in (PROGRAM, *paths, *sandbox.readable)]
    memory = [] if sandbox.memory_mb is None else ["--memory", f"{sandbox.memory_mb}m"]
    size = "" if sandbox.memory_mb is None else f",size={sandbox.memory_mb}m"
    command = [
        program, "run", "--rm", "--init", "--interactive", "--name", name, "--read-only",
        *(f"--tmpfs={place}:rw,mode=1777{size}" for place in (_TMP, _IN)), "--workdir", _IN,
        "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534",
        *memory, "--pids-limit", str(sandbox.num_processes),
        *([] if sandbox.network else ["--network", "none"]),
        *(f"--env={name}={value}" for name, value in sandbox.variables(_IN).items()
          if name not in ("PATH", "LD_LIBRARY_PATH")),
        *(f"--volume={path}:{path}:ro" for path in dict.fromkeys(read)),
        *(f"--volume={path}:{path}" for path in map(os.path.abspath, sandbox.writable)),
        str(sandbox.image), "python3", "-I", PROGRAM,
    ]  # fmt: skip

    def kill(pid: int) -> None:  # the command's end leaves the container
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([program, "kill", name], capture_output=True, timeout=_END_SECONDS)

    return Launch(command, kill=kill, environ=os.environ)


def process(sandbox: Sandbox, paths: Sequence[str]) -> Launch:
    """A process of the user's with limits, a session and a folder of its own: no boundary."""
    _warn_once()
    folder = tempfile.mkdtemp(prefix="rllib-llm-")

    def kill(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def clean() -> None:
        with contextlib.suppress(RecursionError):
            shutil.rmtree(folder, ignore_errors=True)  # by file descriptors: it follows no link

    command = [sys.executable, "-I", PROGRAM]
    return Launch(command, folder, folder, kill=kill, clean=clean)


BACKENDS: dict[str, Backend] = {
    "auto": bwrap, "bwrap": bwrap, "docker": docker, "process": process,
}  # fmt: skip


@functools.cache
def bwrap_refused() -> str:
    """Why bubblewrap does not work here; "" where it does. Tried once."""
    if shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not on PATH"
    try:
        command = bwrap(Sandbox(backend="process"), ()).command
        tried = subprocess.run(
            [*command[:-1], "-c", "pass"], capture_output=True, timeout=_PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap fails: {error}"
    said = tried.stderr.decode(errors="replace").strip() or f"exit code {tried.returncode}"
    return f"bubblewrap fails: {said}" if tried.returncode else ""


@functools.cache
def _bubblewrap() -> tuple[str, str]:
    """The program, and what it says of its options."""
    program = shutil.which("bwrap") or "bwrap"
    asked = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    return program, asked.stdout + asked.stderr


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "backend='process' is no boundary: code of a model reads, changes and sends what the run's "
        "user can.", stacklevel=4,
    )  # fmt: skip


def paths_for(function: str, sandbox: Sandbox) -> list[str]:
    """Paths that a worker reads to import "module:name" or "file.py:name": Python's path without
    folders that hold the user's home, and the function's own package. An image has its own."""
    module, is_file = function.rpartition(":")[0], function.rpartition(":")[0].endswith(".py")
    if is_file:
        own = [os.path.dirname(module), module]
    else:
        package = module.partition(".")[0]
        spec = None if package in ("", "__main__") else importlib.util.find_spec(package)
        own = list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []
    if sandbox.backend == "docker":
        return own if is_file else []
    found = [os.path.abspath(path) for path in (*sys.path, *own)]
    home = Path.home()
    return [path for path in found if Path(path) not in (home, *home.parents)]
