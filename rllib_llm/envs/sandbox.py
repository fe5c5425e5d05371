"""Sandboxed processes with a deadline, for code that a model wrote or that parses a model's output.

    caller ─▶ Contained ─▶ backend: bwrap, docker or process ─▶ what is contained
                  └─ deadline, or the caller's end: it ends with all that it has started

A deadline inside the process that computes does not hold: signals reach the main thread only, and a
thread cannot be ended. What is held, and by what, the guide on containment says.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import secrets
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from rllib_llm.envs.judges.reward_functions import Invalid
from rllib_llm.envs.sandbox_backends import BACKENDS, Launch, Sandbox, paths_for
from rllib_llm.shared.arguments import Count, Seconds, checked
from rllib_llm.shared.messages import told
from rllib_llm.shared.remote import Away, ExitedError, Late, no_answer

_PART = 65_536  # bytes that are read at once
_MAX_LINE = 2**24  # bytes of an answer
_EXIT_SECONDS = 1.0  # that a process has to exit once its output has ended
_NO_ANSWER = (EOFError, OSError, ValueError)  # `Late` is an OSError


class WorkerError(Away):
    """A worker that cannot be started."""


class Contained:
    """A process in a sandbox, with a folder of its own, in which `files` {name: text} lie. `order`:
    what it is to do, see `sandbox_program.py`. `is_asked`: whether it is asked more, line by line.
    `paths`: what it may read. It ends with the thread that made it.

    Raises:
        Away: no process can be started now.
    """

    def __init__(
        self, sandbox: Sandbox, order: Mapping[str, Any], *, files: Mapping[str, str] | None = None,
        is_asked: bool = False, paths: Sequence[str] = (),
    ) -> None:  # fmt: skip
        launch = BACKENDS[sandbox.backend](sandbox, paths)
        self._is_asked, self._is_over, self._unread = is_asked, False, bytearray()
        self.is_ready = False  # for calls, as its first line says
        order = {"files": dict(files or {}), "limits": sandbox.limits(launch), **order}
        self._unsent = json.dumps(order).encode() + b"\n"
        try:
            # Pipes alone: it could change a file's or a terminal's flags through a descriptor.
            self.process = subprocess.Popen(
                launch.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=launch.cwd,
                stderr=subprocess.PIPE if is_asked else subprocess.STDOUT,
                env=launch.environ or sandbox.variables(launch.folder), start_new_session=True,
            )  # fmt: skip
        except BaseException as error:
            launch.clean()
            if isinstance(error, OSError):  # too many processes, too little memory
                raise Away(f"no process can be started: {error}") from error
            raise
        assert self.process.stdin is not None, "it is a pipe"
        os.set_blocking(self.process.stdin.fileno(), False)
        if is_asked:
            threading.Thread(target=_show, args=(self.process.stderr,), daemon=True).start()
        self._end = weakref.finalize(self, _end, self.process, launch)
        self._send()

    def read(
        self, seconds: float, said: str = "", *, most: int | None = None, line: bool = False
    ) -> bytes:
        """Reads its output: a line, or everything up to `most` bytes.

        Raises:
            Late: not within `seconds`; with the message `said`.
            EOFError: it ended before its line.
            ValueError: its line has no end.
        """
        until, end = time.monotonic() + seconds, -1 if not line else self._unread.find(b"\n")
        while end < 0 and not self._is_over and (most is None or len(self._unread) < most):
            before = len(self._unread)
            if not self._exchange(until - time.monotonic()):
                raise Late(said or no_answer(seconds))
            if line:
                end = self._unread.find(b"\n", before)
                if len(self._unread) > _MAX_LINE:
                    raise ValueError(f"its line has more than {_MAX_LINE} bytes")
        if line and end < 0:
            raise EOFError
        size = end if line else len(self._unread) if most is None else most
        read = bytes(self._unread[:size])
        del self._unread[: size + line]
        return read

    def _exchange(self, seconds: float) -> bool:
        """Sends and reads a part of what there is; False: nothing was possible within `seconds`."""
        out, into = self.process.stdout, self.process.stdin
        assert out is not None and into is not None, "they are pipes"
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if self._unsent:
                selector.register(into, selectors.EVENT_WRITE)
            ready = {key.fileobj for key, _ in selector.select(seconds)} if seconds > 0 else set()
        if into in ready:
            self._send()
        if out in ready:
            part = os.read(out.fileno(), _PART)
            self._unread += part
            self._is_over = not part
        return bool(ready)

    def _send(self) -> None:
        """Sends as much as its pipe takes now."""
        assert self.process.stdin is not None, "it is a pipe"
        try:
            self._unsent = self._unsent[os.write(self.process.stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it has ended: what it said is read
            self._unsent = b""
        if not self._unsent and not self._is_asked:
            self.process.stdin.close()

    def ask(self, line: Mapping[str, Any], seconds: float, said: str = "") -> dict[str, Any]:
        """The answer to one line of JSON, {"value": ...} or {"error": ...}.

        Raises as `read`, OSError where it has ended, and ValueError for what is no answer to this
        line, which alone names the word that came with it, or has numbers that are not finite.
        """
        word = secrets.token_hex(16).encode()
        self._unsent += word + b" " + json.dumps(line).encode() + b"\n"
        named, _, answer = self.read(seconds, said, line=True).partition(b" ")
        if self._unread or not secrets.compare_digest(named, word):
            raise ValueError("it is no answer to what was asked")
        try:
            found = json.loads(
                answer, parse_constant=_finite, parse_float=_finite, parse_int=_whole
            )
        except RecursionError as error:
            raise ValueError("it is too deep") from error
        if not isinstance(found, dict) or len(found.keys() & {"value", "error"}) != 1:
            raise ValueError("it holds neither value nor error")
        return found

    def end(self) -> int:
        """Ends it and all that it has started; its exit code."""
        if self._is_over:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_EXIT_SECONDS)
        self._end()
        return self.process.wait()

    def __enter__(self) -> Contained:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not finite")
    return number


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def _end(process: subprocess.Popen[bytes], launch: Launch) -> None:
    launch.kill(process.pid)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    launch.clean()


def _show(errors: IO[bytes]) -> None:
    """Passes on what a worker prints, until it ends."""
    with errors, contextlib.suppress(OSError):
        while part := os.read(errors.fileno(), _PART):
            os.write(2, part)


@checked
class WorkerPool:
    """Contained processes that call one function.

    Args:
        function: "module:name" or "file.py:name"; its arguments and what it returns are JSON.
        num_workers: processes, started when they are first needed.
        deadline_s: of one call.
        start_s: of a worker's start, imports included.
        isolated: whether each call has a process, a container and a folder of its own, so that what
            evaluates a model's words cannot change what the next call meets. An attribute `prepare`
            of the function is called before, with the same arguments, and returns whether this call
            evaluates any; the worker is kept where it does not.
        limits: fields of `Sandbox`.

    Raises:
        Problems: a limit that is none, or a backend that does not work here.
    """

    def __init__(
        self, function: str, *, num_workers: Count = 2, deadline_s: Seconds = 10.0,
        start_s: Seconds = 120.0, isolated: bool = False, **limits: Any,
    ) -> None:  # fmt: skip
        self._deadline_s, self._start_s, self._function = deadline_s, start_s, function
        module, _, name = function.rpartition(":")
        path = f"{os.path.abspath(module)}:{name}" if module.endswith(".py") else function
        self._sandbox, self._isolated = Sandbox(**limits), isolated
        found = [] if self._sandbox.backend == "docker" else [*map(os.path.abspath, sys.path)]
        self._order = {"mode": "calls", "function": path, "path": found}
        self._paths = paths_for(path, self._sandbox)
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
        given, worker = self._workers.get(), None
        try:
            worker = self._ready(given or self._started())
            until = time.monotonic() + self._deadline_s
            late = no_answer(self._deadline_s, "deadline_s")
            try:
                # Asked before, since what has run a model's words may say anything.
                asked = {"prepare": arguments} if self._isolated else {"call": arguments}
                answer = worker.ask(asked, self._deadline_s, late)
                is_last = self._isolated and answer.get("value") is not False
                if self._isolated and "value" in answer:
                    answer = worker.ask({"call": arguments}, until - time.monotonic(), late)
            except _NO_ANSWER as error:
                reason, worker = _why_ended(worker, error), None
                return Invalid.of(reason)
            if is_last:  # the next one starts before it is waited for
                worker.end()
                worker = None
                with contextlib.suppress(Away):  # the next call says so
                    worker = self._started()
            return answer["value"] if "value" in answer else Invalid(str(answer["error"]))
        finally:
            self._workers.put(worker)

    def _started(self) -> Contained:
        if self._broken is not None:  # it would take as long to fail again
            raise self._broken.with_traceback(None)  # else it grows with each call
        return Contained(self._sandbox, self._order, is_asked=True, paths=self._paths)

    def _ready(self, worker: Contained) -> Contained:
        """The worker, which is ready for calls."""
        if worker.is_ready:
            return worker
        try:
            late = no_answer(self._start_s, "start_s")
            said = json.loads(worker.read(self._start_s, late, line=True))
        except _NO_ANSWER as error:
            said = {"error": told(_why_ended(worker, error))}
        if "error" in said:
            worker.end()
            self._broken = WorkerError(
                f"function={self._function!r} must be importable in a worker process: "
                f"{said['error']}. Install what it needs, name what it reads (readable), or raise "
                "start_s and memory_mb."
            )
            raise self._broken
        worker.is_ready = True
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
