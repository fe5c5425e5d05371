"""Rollouts as Parquet, written in the background while the run goes on.

    put ─▶ bounded queue ─▶ writer thread: table ─▶ temporary file, fsync, rename

`put` waits while the queue is full: what is put is written, or the run ends. The rows of one
iteration become one file, which is written when the next iteration's rows come, when the queue has
been empty for a second, when it is large, and by `flush`, which a checkpoint calls. So a
checkpoint's state is the number of files: what is found beyond it when a run goes on was sampled
after the checkpoint, will be sampled again, and is removed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

SCHEMA_VERSION = 2
VERSION_KEY = b"rllib_llm_rollouts"  # in each file's metadata, with the version
STATUSES = ("trained", "rejected", "failed", "evaluated")

_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])

# One row for each completion; a conversation that forked has a row for each of its paths. Lists of
# a row are as long as its completion, from its first token on. All columns are plain values, lists
# and structs of fixed fields: pandas, DuckDB, pyarrow and `datasets` read the files as they are.
SCHEMA = pa.schema(
    [
        ("iteration", pa.int32()),  # in which it was sampled, from 1; 0: before training
        ("run", pa.string()),  # the trial's folder name
        ("status", pa.string()),  # one of STATUSES
        ("reason", pa.string()),  # why it was rejected or failed
        ("position", pa.int64()),  # of the prompt, in the order in which prompts are sampled
        ("group", pa.int64()),  # rows alike in it are completions of one prompt
        ("sample", pa.int32()),  # the rollout's place in its group
        ("row", pa.int32()),  # the row's place in its rollout
        ("prompt_index", pa.int64()),  # the prompt's row in its data set
        ("env", pa.string()),
        ("replica", pa.int32()),  # of the environment, where it is known
        ("prompt", pa.string()),  # of a conversation what was said before the row's completion
        ("completion", pa.string()),
        ("messages", pa.string()),  # of a conversation all that was said on the row's path, JSON
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),  # sampled by the policy
        ("logprobs", pa.list_(pa.float32())),  # the sampler's own, nats
        ("ref_logprobs", pa.list_(pa.float32())),  # the reference's
        ("advantages", pa.list_(pa.float32())),  # what the learner made of it, once trained
        ("version_spans", pa.list_(_SPAN)),  # weights that sampled tokens start .. end - 1
        ("score", pa.float32()),  # what the judge says, before any KL share
        ("reward", pa.float32()),  # the environment's, its KL share taken off
        ("valid", pa.bool_()),  # False where the judge failed
        ("rewards", pa.string()),  # what the score is made of, by name, JSON
        ("metrics", pa.string()),  # what the environment reports beside it, by name, JSON
        ("tokens", pa.int32()),  # sampled ones
        ("finish_reason", pa.string()),  # stop, length, aborted or error
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("top_k", pa.int32()),
        ("seed", pa.int64()),
        ("tokenizer", pa.string()),  # a hash of the vocabulary the ids belong to
        ("started", pa.timestamp("us", "UTC")),  # its batch
        ("ended", pa.timestamp("us", "UTC")),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)


class RolloutSchemaError(ValueError):
    """Files of another schema version."""


def check_version(schema: pa.Schema, where: str) -> None:
    """Raises RolloutSchemaError unless files of `schema` can be read here."""
    found = (schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    if found != str(SCHEMA_VERSION):
        raise other_version(found, where)


def other_version(found: str, where: str) -> RolloutSchemaError:
    """The error for files that were written with schema version `found`."""
    return RolloutSchemaError(
        f"{where} has rollout schema version {found}, which must be {SCHEMA_VERSION}: another "
        "version of rllib_llm wrote it, and its columns differ. Sample the rollouts again, or read "
        "them with that version."
    )


def conform(table: pa.Table, iteration: int) -> pa.Table:
    """`table` with exactly the columns of `SCHEMA`, those it lacks null, as rows of `iteration`."""
    given = dict(zip(table.column_names, table.columns, strict=True))
    given["iteration"] = pa.repeat(pa.scalar(iteration, pa.int32()), table.num_rows)
    columns = []
    for field in SCHEMA:
        column = given.get(field.name)
        if column is None:
            column = pa.nulls(table.num_rows, field.type)
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.table(columns, schema=SCHEMA)


logger = logging.getLogger(__name__)

QUEUE_SIZE = 4  # batches that wait; more would only hold memory while the disk is slow
FILE_BYTES = 64 * 1024**2  # of rows in memory, at which a file is written in any case
IDLE_SECONDS = 1.0
MAX_SECONDS_TO_STOP = 300.0  # that the end of a run waits for the writer
ROLLOUTS = "rollouts"  # the folder in a trial's
STORE_FILE = ".store.json"  # hidden: readers take a folder's other files for data
FIRST_STORE_FILE = "_store.json"  # schema version 1's
COMPRESSION = "zstd"

# Of the columns that hold texts, and of those that hold one value that readers skip files by.
_TEXTS = [field.name for field in SCHEMA if pa.types.is_string(field.type)]
_SINGLE = [
    field.name
    for field in SCHEMA
    if not pa.types.is_nested(field.type) and field.name not in ("prompt", "completion", "messages")
]

MakeTable = Callable[[], pa.Table]


class RolloutStoreError(RuntimeError):
    """Rollouts cannot be written, and the run is to stop then."""


@dataclass(frozen=True)
class _Item:
    iteration: int
    num_rows: int
    make: MakeTable


class _Flush:
    """Asks the writer to write what it has, and to say when it did."""

    def __init__(self) -> None:
        self.done = threading.Event()


class RolloutStore:
    """The rollouts of one run in one folder.

    Args:
        folder: a path, or one inside `filesystem`.
        filesystem: pyarrow's; None: this machine's.
        on_error: "go_on" says once that rollouts are no longer kept, "stop" raises.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        filesystem: pyarrow.fs.FileSystem | None = None,
        on_error: str = "go_on",
    ) -> None:
        self._files = _Files(os.fspath(folder), filesystem or pyarrow.fs.LocalFileSystem())
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
        """Has the `num_rows` rows that `make` gives written as rows of `iteration`; it is called
        in the writer's thread. Waits while the queue is full.

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
        """Writes what is still to be written, and ends the writer's thread; storage that does not
        answer is not waited for without end."""
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
        """Goes on after the files that `state` knows; later ones are removed with the first row."""
        self.stop()
        self._begin = dict(state)
        self._files = _Files(self._files.folder, self._files.filesystem)

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
        """Whatever goes wrong here belongs to the run's thread, or is said once."""
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
        num_bytes = self._files.write(table)
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


class _Files:
    """The files of a store, numbered in the order in which they were written.

    `.store.json` holds the store's name, and of a run that went on from another store's state the
    number of its first own file: where it does so once more, those since then are removed.
    """

    def __init__(self, folder: str, filesystem: pyarrow.fs.FileSystem) -> None:
        self.folder = folder
        self.filesystem = filesystem
        self.is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        self.name = ""
        self.next_file = 0
        self.has_begun = False

    def begin(self, state: dict[str, Any] | None) -> None:
        """Makes the folder that of a run which goes on from `state`, None: from nothing."""
        self.filesystem.create_dir(self.folder, recursive=True)
        if self._is_file(FIRST_STORE_FILE):
            raise other_version("1", self.folder)
        about = self._read_about() or {"store": uuid.uuid4().hex, "others": {}}
        numbered = self._numbered()
        if not state or not state.get("store"):
            first = 0
            about["others"] = {}
        elif state["store"] == about["store"]:
            first = state["next_file"]
        else:  # another run's: what this one has is its past, unless it began there before
            key = f"{state['store']}:{state['next_file']}"
            first = about["others"].get(key, max(numbered, default=-1) + 1)
            about["others"] = {key: first}
        for number, path in numbered.items():
            if number >= first:
                self.filesystem.delete_file(path)
        self.name, self.next_file, self.has_begun = about["store"], first, True
        self._put(f"{self.folder}/{STORE_FILE}", json.dumps(about).encode())

    def write(self, table: pa.Table) -> int:
        """Writes one file, there as a whole or not at all, and returns its bytes."""
        path = f"{self.folder}/part-{self.next_file:08d}.parquet"
        sink = pa.BufferOutputStream()
        pq.write_table(
            table, sink, compression=COMPRESSION, use_dictionary=_TEXTS, write_statistics=_SINGLE
        )
        content = sink.getvalue()
        self._put(path, content)
        self.next_file += 1
        return content.size

    def _read_about(self) -> dict[str, Any] | None:
        if not self._is_file(STORE_FILE):
            return None
        with self.filesystem.open_input_stream(f"{self.folder}/{STORE_FILE}") as stream:
            return json.loads(stream.read())

    def _is_file(self, name: str) -> bool:
        info = self.filesystem.get_file_info(f"{self.folder}/{name}")
        return info.type == pyarrow.fs.FileType.File

    def _numbered(self) -> dict[int, str]:
        """The path of each file by its number."""
        selector = pyarrow.fs.FileSelector(self.folder, allow_not_found=True)
        found = {}
        for info in self.filesystem.get_file_info(selector):
            stem = info.base_name.removesuffix(".parquet")
            number = stem.removeprefix("part-")
            if info.base_name.endswith(".parquet") and number.isdigit():
                found[int(number)] = info.path
        return found

    def _put(self, path: str, content: Any) -> None:
        if not self.is_local:  # object stores show a file once it is closed
            with self.filesystem.open_output_stream(path) as stream:
                stream.write(content)
            return
        head, _, name = path.rpartition("/")
        partial = f"{head}/.{name}.partial"
        try:
            with open(partial, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            if os.path.exists(partial):
                os.unlink(partial)
            raise
