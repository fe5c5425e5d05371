"""Sandboxed processes with a deadline, for code that a model wrote or that parses a model's output.

    caller ─▶ Contained ── lifeline ──▶ supervisor ─▶ what is contained
                  └─ deadline, or the caller's end: it ends with all that it has started

A deadline inside the process that computes does not hold: signals reach the main thread only, and a
thread cannot be ended. What is held, and by what, the guide on containment says.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import multiprocessing.connection
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_llm.envs.judges.reward_functions import Invalid
from rllib_llm.envs.sandbox_program import remove
from rllib_llm.shared.arguments import Count, Seconds, checked
from rllib_llm.shared.messages import told
from rllib_llm.shared.remote import Away, ExitedError, Late, no_answer

_PROGRAM = Path(__file__).with_name("sandbox_program.py")
_PART = 65_536  # bytes that are read at once
_MAX_LINE = 2**24  # bytes of an answer
_END_SECONDS = 10.0  # that a supervisor has to end what it supervises
_NO_ANSWER = (EOFError, OSError, ValueError)  # `Late` is an OSError
_KEPT = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")


class WorkerError(Away):
    """A worker that cannot be started."""


@checked
@dataclass(frozen=True)
class Sandbox:
    """The limits of a sandboxed process.

    memory_mb: address space of each process; None: no limit. num_processes: where it has namespaces
    of its own, the user is not root, and Linux is 5.14 or later. num_files: open at once. file_mb:
    of one file. cpu_s: of each process. network: whether it may open sockets. namespaces: whether
    it is put into ones of its own where the kernel lets it. environment: names of variables that it
    keeps, beside those of language and time zone. writable: folders, beside one of its own.
    """

    memory_mb: Count | None = 4096
    num_processes: Count = 256
    num_files: Count = 256
    file_mb: Count = 64
    cpu_s: Count | None = None
    network: bool = False
    namespaces: bool = True
    environment: Sequence[str] = ()
    writable: Sequence[str] = ()

    def order(self, folder: str, lifeline: int) -> dict[str, Any]:
        """The instructions for the sandbox's program."""
        return {
            "lifeline": lifeline,
            "folder": folder,
            "writable": [folder, *map(os.path.abspath, self.writable)],
            "network": self.network,
            "namespaces": self.namespaces,
            "path": [os.path.abspath(entry) for entry in sys.path],
            "limits": {
                "AS": None if self.memory_mb is None else self.memory_mb * 2**20,
                "NPROC": self.num_processes, "NOFILE": self.num_files,
                "FSIZE": self.file_mb * 2**20, "CPU": self.cpu_s, "CORE": 0,
            },
        }  # fmt: skip

    def variables(self, folder: str) -> dict[str, str]:
        """Its environment."""
        names = (*_KEPT, *self.environment)
        kept = {name: os.environ[name] for name in names if name in os.environ}
        own = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        return {**own, **kept}


class Contained:
    """A process in a sandbox, with a folder of its own, in which `files` {name: text} lie. `order`:
    what it is to do, see `sandbox_program.py`. `is_asked`: whether it reads from a pipe.

    Raises:
        Away: no process can be started now.
    """

    def __init__(
        self, sandbox: Sandbox, order: Mapping[str, Any], *, files: Mapping[str, str] | None = None,
        is_asked: bool = False,
    ) -> None:  # fmt: skip
        self.folder = tempfile.mkdtemp(prefix="rllib-llm-")
        for name, text in (files or {}).items():
            Path(self.folder, name).write_text(text, encoding="utf-8", errors="replace")
        held, self._lifeline = os.pipe()
        told = {**sandbox.order(self.folder, held), **order}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", str(_PROGRAM), json.dumps(told)],
                stdin=subprocess.PIPE if is_asked else subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=None if is_asked else subprocess.STDOUT,
                env=sandbox.variables(self.folder), pass_fds=(held,), start_new_session=True,
            )  # fmt: skip
        except BaseException as error:
            os.close(self._lifeline)
            remove(self.folder)
            if isinstance(error, OSError):  # too many processes, too little memory
                raise Away(f"no process can be started: {error}") from error
            raise
        finally:
            os.close(held)
        self._unread = b""
        self._end = weakref.finalize(
            self, _end, self.process, self._lifeline, self.folder, threading.Lock()
        )

    def read(
        self, seconds: float, said: str = "", *, most: int | None = None, line: bool = False
    ) -> bytes:
        """Reads its output: a line, or everything up to `most` bytes.

        Raises:
            Late: not within `seconds`; with the message `said`.
            EOFError: it ended before its line.
            ValueError: its line has no end.
        """
        assert self.process.stdout is not None, "it is a pipe"
        until = time.monotonic() + seconds
        out = self.process.stdout.fileno()
        while not (line and b"\n" in self._unread):
            if most is not None and len(self._unread) >= most:
                break
            left = until - time.monotonic()
            if left <= 0 or not multiprocessing.connection.wait([out], left):
                raise Late(said or no_answer(seconds))
            part = os.read(out, _PART)
            if not part and line:
                raise EOFError
            if not part:
                break
            self._unread += part
            if line and len(self._unread) > _MAX_LINE:
                raise ValueError(f"its line has more than {_MAX_LINE} bytes")
        if not line:
            read, self._unread = self._unread[:most], b""
            return read
        read, _, self._unread = self._unread.partition(b"\n")
        return read

    def ask(self, line: Mapping[str, Any], seconds: float, said: str = "") -> dict[str, Any]:
        """The answer to one line of JSON, {"value": ...} or {"error": ...}.

        Raises as `read`, OSError where it has ended, and ValueError for what is no answer to this
        line, which alone names the word that came with it.
        """
        assert self.process.stdin is not None, "it is asked"
        word = secrets.token_hex(16).encode()
        self.process.stdin.write(word + b" " + json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()
        named, _, answer = self.read(seconds, said, line=True).partition(b" ")
        if self._unread or not secrets.compare_digest(named, word):
            raise ValueError("it is no answer to what was asked")
        return _read_answer(answer)

    def end(self) -> int:
        """Ends it and all that it has started; its exit code."""
        self._end()
        return int(self.process.returncode)

    def __enter__(self) -> Contained:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def _read_answer(said: bytes) -> dict[str, Any]:
    """Parses an answer; raises ValueError for invalid ones and for numbers that are not finite."""
    try:
        answer = json.loads(said, parse_constant=_finite, parse_float=_finite, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("it is too deep") from error
    if not isinstance(answer, dict) or len(answer.keys() & {"value", "error"}) != 1:
        raise ValueError("it holds neither value nor error")
    return answer


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not finite")
    return number


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def _end(
    process: subprocess.Popen[bytes], lifeline: int, folder: str, lock: threading.Lock
) -> None:
    with lock:
        os.close(lifeline)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was not sent yet
                    pipe.close()
        remove(folder)


@functools.cache
def missing_layers() -> tuple[str, ...]:
    """The layers of the sandbox that this kernel does not support, with reasons; checked once, with
    a warning."""
    with Contained(Sandbox(), {"mode": "missing"}) as probe:
        missing = tuple(json.loads(probe.read(60.0) or b"[]"))
    if missing:
        warnings.warn(
            f"sandbox without {', '.join(missing)}: this kernel or container refuses it. Code of a "
            "model is held by less than it could be: run in a container that allows it, or see the "
            "guide on containment.",
            stacklevel=3,
        )
    return missing


@checked
class WorkerPool:
    """Contained processes that call one function.

    Args:
        function: "module:name" or "file.py:name"; its arguments and what it returns are JSON.
        num_workers: processes, started when they are first needed.
        deadline_s: of one call.
        start_s: of a worker's start, imports included.
        isolated: whether each call is made in a copy of the worker, so that what evaluates a
            model's words cannot change what the next call meets. An attribute `prepare` of the
            function is called before, with the same arguments, in the worker itself, and returns
            whether this call evaluates any.
        limits: fields of `Sandbox`.

    Raises:
        SettingError: a limit that is none.
    """

    def __init__(
        self,
        function: str,
        *,
        num_workers: Count = 2,
        deadline_s: Seconds = 10.0,
        start_s: Seconds = 120.0,
        isolated: bool = False,
        **limits: Any,
    ) -> None:
        self._deadline_s, self._start_s, self._function = deadline_s, start_s, function
        module, _, name = function.rpartition(":")
        path = f"{os.path.abspath(module)}:{name}" if module.endswith(".py") else function
        self._order = {"mode": "calls", "function": path, "isolated": isolated}
        self._sandbox = Sandbox(**limits)
        self._broken: WorkerError | None = None
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="verifier")
        # A warm one first; None: one that is to be started.
        self._workers: queue.LifoQueue[Contained | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._workers.put(None)
        self._end = weakref.finalize(self, _end_all, self._workers)

    def map(self, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The function's result for each call's arguments; `Invalid` if it failed or timed out.

        Raises:
            WorkerError: no worker can be started.
        """
        return list(self._threads.map(self._call, calls))

    def close(self) -> None:
        """Ends the processes."""
        self._threads.shutdown(cancel_futures=True)
        self._end()

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        worker = self._workers.get()
        try:
            worker = worker or self._started()
            late = no_answer(self._deadline_s, "deadline_s")
            try:
                answer = worker.ask(arguments, self._deadline_s, late)
            except _NO_ANSWER as error:
                reason, worker = _why_ended(worker, error), None
                return Invalid.of(reason)
            return answer["value"] if "value" in answer else Invalid(str(answer["error"]))
        finally:
            self._workers.put(worker)

    def _started(self) -> Contained:
        if self._broken is not None:  # it would take as long to fail again
            raise self._broken
        missing_layers()
        worker = Contained(self._sandbox, self._order, is_asked=True)
        try:
            late = no_answer(self._start_s, "start_s")
            said = json.loads(worker.read(self._start_s, late, line=True))
        except _NO_ANSWER as error:
            said = {"error": told(_why_ended(worker, error))}
        if "error" in said:
            worker.end()
            self._broken = WorkerError(
                f"function={self._function!r} must be importable in a worker process: "
                f"{said['error']}. Correct the path, install what it needs, or raise start_s and "
                "memory_mb."
            )
            raise self._broken
        return worker


def _why_ended(worker: Contained, error: Exception) -> Exception:
    """Ends a process that gave no answer that can be read; returns why."""
    code = worker.end()
    if isinstance(error, Late):
        return error
    if isinstance(error, ValueError):
        return ExitedError(f"its process was ended, since what it said cannot be read: {error}")
    return ExitedError(f"its process ended with exit code {code}")


def _end_all(workers: queue.LifoQueue[Contained | None]) -> None:
    while not workers.empty():
        if (worker := workers.get()) is not None:
            worker.end()
