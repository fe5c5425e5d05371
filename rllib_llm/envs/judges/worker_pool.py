"""Functions in processes of their own, each call with a hard deadline: a call that hangs is killed.

    threads of the caller ─▶ a free worker ─▶ one line of JSON ─▶ its answer
                                                              └▶ at the deadline: killed, Invalid

A deadline inside the process that computes does not hold: signals reach the main thread only, and a
thread cannot be ended. Whatever becomes of a call (too slow, out of memory, a crash) costs that
call alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing.connection
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rllib_llm.envs.judges.reward_functions import Invalid

_PROGRAM = Path(__file__).with_name("worker.py")
_PART = 65_536  # bytes that are read at once


class WorkerError(RuntimeError):
    """A worker that cannot be started."""


class WorkerPool:
    """Processes that call one function.

    Args:
        function: "module:name" or "file.py:name"; its arguments and what it returns are JSON.
        num_workers: processes, started when they are first needed.
        deadline_s: of one call.
        start_s: of a worker's start, imports included.
        memory_mb: address space of a worker; None: no limit.

    Raises:
        ValueError: a limit that is none.
    """

    def __init__(
        self,
        function: str,
        *,
        num_workers: int = 2,
        deadline_s: float = 10.0,
        start_s: float = 120.0,
        memory_mb: int | None = 4096,
    ) -> None:
        limits = {"num_workers": num_workers, "deadline_s": deadline_s, "start_s": start_s}
        for name, value in limits.items():
            if not value > 0:
                raise ValueError(f"{name}={value!r} must be above 0: it is a limit. Raise it.")
        self._deadline_s = deadline_s
        order = {
            "function": function, "path": sys.path, "memory_mb": memory_mb,
            "alarm_s": math.ceil(deadline_s) + 1,
        }  # fmt: skip
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="verifier")
        self._workers: queue.LifoQueue[_Worker] = queue.LifoQueue()  # a warm one first
        made = [_Worker(order, start_s) for _ in range(num_workers)]
        for worker in made:
            self._workers.put(worker)
        self._end = weakref.finalize(self, _end_all, made)

    def map(self, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        """What the function returns for each call's arguments, `Invalid` where it did not.

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
            return worker.call(arguments, self._deadline_s)
        finally:
            self._workers.put(worker)


class _Worker:
    """One process, which is started again after it was killed."""

    def __init__(self, order: Mapping[str, Any], start_s: float) -> None:
        self._order, self._start_s = order, start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._broken: WorkerError | None = None
        self._lock = threading.Lock()

    def call(self, arguments: Mapping[str, Any], deadline_s: float) -> Any:
        """What the function returned, or why it did not."""
        process = self._started()
        try:
            answer = self._ask(process, arguments, deadline_s)
        except TimeoutError:
            self.kill()
            return Invalid(f"it did not end within deadline_s={deadline_s:g}")
        except (EOFError, OSError):
            self.kill()
            return Invalid(f"its process ended with exit code {process.returncode}")
        return answer["value"] if "value" in answer else Invalid(answer["error"])

    def kill(self) -> None:
        """Ends the process."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None, "both are pipes"
                with contextlib.suppress(BrokenPipeError):  # what was not sent yet
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        if self._broken is not None:  # it would take as long to fail again
            raise self._broken
        process = subprocess.Popen(
            [sys.executable, str(_PROGRAM)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._process, self._unread = process, b""
        try:
            said = self._ask(process, self._order, self._start_s)
        except (TimeoutError, EOFError, OSError) as error:
            self.kill()
            said = {"error": f"{type(error).__name__}, exit code {process.returncode}"}
        if "error" in said:
            self.kill()
            self._broken = WorkerError(
                f"function={self._order['function']!r} must be importable in a worker process: "
                f"{said['error']}. Correct the path, install what it needs, or raise start_s and "
                "memory_mb."
            )
            raise self._broken
        return process

    def _ask(self, process: subprocess.Popen[bytes], line: Mapping, limit_s: float) -> Any:
        """The answer to one line; raises TimeoutError, or EOFError where the process has ended."""
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        until, out = time.monotonic() + limit_s, process.stdout.fileno()
        process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.flush()
        while b"\n" not in self._unread:
            left = until - time.monotonic()
            if left <= 0 or not multiprocessing.connection.wait([out], left):
                raise TimeoutError
            part = os.read(out, _PART)
            if not part:
                raise EOFError
            self._unread += part
        answer, _, self._unread = self._unread.partition(b"\n")
        return json.loads(answer)


def _end_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.kill()


class Verifier:
    """A function of one completion as a reward function, in processes with hard deadlines.

    In `env_config`: `reward_functions: [{function: rllib_llm.envs.judges.worker_pool.Verifier,
    kwargs: {function: "my_checks:right", columns: [answer]}}]`, where `right(completion, answer)`
    returns a number, or None where it does not judge.

    Args:
        function: "module:name" or "file.py:name".
        columns: of the data set, which it gets by name beside `completion`.
        pool: further arguments of `WorkerPool`.
    """

    wants_texts = True

    def __init__(self, function: str, columns: Sequence[str] = (), **pool: Any) -> None:
        self._pool = WorkerPool(function, **pool)
        self._columns = tuple(columns)

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[Any]:
        """What the function returned for each completion, `Invalid` where it did not end well."""
        missing = [name for name in self._columns if name not in columns]
        if missing:
            raise ValueError(
                f"columns={list(self._columns)!r} must be columns of the data set: there is no "
                f"{missing}. Correct the names."
            )
        calls = [
            {"completion": text, **{name: columns[name][i] for name in self._columns}}
            for i, text in enumerate(completions)
        ]
        return self._pool.map(calls)
