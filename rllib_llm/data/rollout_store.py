"""Rollouts as Parquet, written in the background during the run.

    put ─▶ bounded queue ─▶ writer thread: table ─▶ temporary file, fsync, rename

`put` waits while the queue is full: what is put is written, or the run ends. The rows of one
iteration become one file, which is written when the next iteration's rows come, when the queue has
been empty for a second, when it is large, and by `flush`, which a checkpoint calls. So a
checkpoint's state is the number of files: what is found beyond it when a run goes on was sampled
after the checkpoint, will be sampled again, and is removed.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs

from rllib_llm.data.rollout_files import RolloutFiles, conform

logger = logging.getLogger(__name__)

QUEUE_SIZE = 4  # batches that wait; more would only hold memory while the disk is slow
FILE_BYTES = 64 * 1024**2  # of rows in memory, at which a file is written in any case
IDLE_SECONDS = 1.0
MAX_SECONDS_TO_STOP = 300.0  # that the end of a run waits for the writer
ROLLOUTS = "rollouts"  # the folder in a trial's

MakeTable = Callable[[], pa.Table]


class RolloutStoreError(RuntimeError):
    """Rollouts cannot be written, and the run is to stop then."""


@dataclass(frozen=True)
class _Item:
    iteration: int
    num_rows: int
    make: MakeTable


class _Flush:
    """Asks the writer to write its buffer and to signal when that is done."""

    def __init__(self) -> None:
        self.done = threading.Event()


class RolloutStore:
    """The rollouts of one run in one folder.

    Args:
        folder: a path, or one inside `filesystem`.
        filesystem: pyarrow's; None: this machine's.
        on_error: "go_on" says once that rollouts are no longer kept, "stop" raises.
        keep_iterations: of so many iterations rows are kept, the newest; None: of all.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        filesystem: pyarrow.fs.FileSystem | None = None,
        on_error: str = "go_on",
        keep_iterations: int | None = None,
    ) -> None:
        self._open_files = functools.partial(
            RolloutFiles, os.fspath(folder), filesystem or pyarrow.fs.LocalFileSystem(),
            keep_iterations=keep_iterations,
        )  # fmt: skip
        self._files = self._open_files()
        self._on_error = on_error
        self._queue: queue.Queue[_Item | _Flush | None] = queue.Queue(QUEUE_SIZE)
        self._thread: threading.Thread | None = None
        self._begin: dict[str, Any] | None = None  # the state to go on from
        self._rows: list[pa.Table] = []  # of one iteration, not yet written
        self._num_waiting = 0  # rows of them
        self._iteration = 0
        self._error: Exception | None = None
        self._counts = {"rows": 0, "bytes": 0, "files": 0, "lost": 0}
        self._seconds = {"wait": 0.0, "write": 0.0}

    def put(self, iteration: int, num_rows: int, make: MakeTable) -> None:
        """Queues the `num_rows` rows returned by `make`, which runs in the writer's thread, as rows
        of `iteration`. Blocks while the queue is full.

        Raises:
            RolloutStoreError: writing failed, and `on_error` is "stop".
        """
        self._raise_if_stopped()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rollout-store", daemon=True)
            self._thread.start()
        start = time.monotonic()
        self._queue.put(_Item(iteration, num_rows, make))
        self._seconds["wait"] += time.monotonic() - start

    def flush(self) -> None:
        """Returns when all that was put is on disk.

        Raises:
            RolloutStoreError: as `put`.
        """
        if self._thread is not None:
            asked = _Flush()
            self._queue.put(asked)
            asked.done.wait()
        self._raise_if_stopped()

    def stop(self) -> None:
        """Writes the rest and ends the writer's thread; waits only a limited time for storage that
        does not answer."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(MAX_SECONDS_TO_STOP)
            if self._thread.is_alive():
                logger.warning("Rollouts are still being written; this process does not wait.")
            self._thread = None

    def state(self) -> dict[str, Any]:
        """Which files are a checkpoint's, after all rows were written."""
        self.flush()
        if not self._files.has_begun:
            self._guarded(lambda: self._files.begin(self._begin))
            self._raise_if_stopped()
        return {"store": self._files.name, "next_file": self._files.next_file}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the files in `state`; later files are removed with the first new row."""
        self.stop()
        self._begin = dict(state)
        self._files = self._open_files()

    def metrics(self) -> dict[str, float]:
        """Rows, bytes and files written; rows lost; seconds that `put` waited and writing took."""
        return {
            **{name: float(count) for name, count in self._counts.items()},
            **{f"{name}_seconds": seconds for name, seconds in self._seconds.items()},
        }

    # --- the writer's thread -------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=IDLE_SECONDS if self._rows else None)
            except queue.Empty:
                self._guarded(self._write)
                continue
            if isinstance(item, _Item):
                self._take(item)
                continue
            self._guarded(self._write)
            if item is None:
                return
            item.done.set()

    def _take(self, item: _Item) -> None:
        if self._rows and item.iteration != self._iteration:
            self._guarded(self._write)
        self._iteration = item.iteration
        self._num_waiting += item.num_rows
        self._guarded(lambda: self._rows.append(conform(item.make(), item.iteration)))
        if sum(table.nbytes for table in self._rows) >= FILE_BYTES:
            self._guarded(self._write)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Runs the writer; an exception is raised in the run's thread, or logged once."""
        if self._error is None:
            try:
                act()
            except Exception as error:  # noqa: BLE001  (the border of a thread; raised by put)
                self._error = error
                if self._on_error == "go_on":
                    logger.warning("%s The run goes on without.", self._explained(error))
        if self._error is not None:
            self._counts["lost"] += self._num_waiting
            self._num_waiting = 0
            self._rows.clear()

    def _write(self) -> None:
        if not self._rows:
            return
        start = time.monotonic()
        if not self._files.has_begun:
            self._files.begin(self._begin)
        table = pa.concat_tables(self._rows)
        num_bytes = self._files.write(table, self._iteration)
        self._rows.clear()
        self._num_waiting = 0
        self._counts["rows"] += table.num_rows
        self._counts["bytes"] += num_bytes
        self._counts["files"] += 1
        self._seconds["write"] += time.monotonic() - start

    def _raise_if_stopped(self) -> None:
        if self._error is not None and self._on_error == "stop":
            raise RolloutStoreError(self._explained(self._error)) from self._error

    def _explained(self, error: Exception) -> str:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        return (
            f"Rollouts cannot be kept in {self._files.folder!r}: "
            f"{'the disk is full' if full else f'{type(error).__name__}: {error}'}. "
            f"{'Free some' if full else 'Mend it'}, or set store_rollouts=False."
        )
