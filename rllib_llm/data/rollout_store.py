"""Rollouts as Parquet, written in the background during the run.

    put ─▶ bounded queue ─▶ writer thread: table ─▶ temporary file, fsync, rename

`put` waits while the queue is full: every row is written, or the run ends. The rows of one
iteration become one file, which is written when the next iteration's rows come, when the queue has
been empty for a second, when it is large, and by `flush`, which a checkpoint calls. So a
checkpoint's state is the number of files: what is found beyond it when a run resumes was sampled
after the checkpoint, will be sampled again, and is removed.

Files are numbered, merged where many, and cut where a run goes back:

    part-00000034.parquet              rows of one iteration
    part-00000000-00000031.parquet     32 such files, merged; 32 of these are merged again

A merged file is written before the files that it replaces are removed, so readers pass over files
that another one contains. Each file's metadata says how many rows, of which iteration, each of the
files had that it was merged from: it can be cut between any two.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import math
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from rllib_llm.shared.errors import Problem, Problems, require
from rllib_llm.shared.storage import Place, place

# Hidden: readers take a folder's other files for data.
STORE_FILE = ".store.json"
IMAGES = ".images"  # a folder, in which each is once, named by its hash
PIECES_KEY = b"rllib_llm_pieces"  # in each file's metadata: (rows, iteration) of what it is made of
MERGED_FILES = 32
MERGED_BYTES = 64 * 2**20  # of a merged file, as it lies on the disk
# Old rows are removed by whole files, so no file has more than this share of the iterations kept.
KEPT_SHARE = 8
COMPRESSION = "zstd"
_NAME = re.compile(r"part-(\d+)(?:-(\d+))?\.parquet")

# --- what is in them ------------------------------------------------------------------------------

SCHEMA_VERSION = 4
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
        ("images", pa.list_(pa.string())),  # what the prompt shows: files in the folder .images
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


class RolloutSchemaError(Problems):
    """Files of another schema version."""


def image_name(data: bytes) -> str:
    """The name of an image in a store: a hash of its file."""
    return hashlib.sha256(data).hexdigest()[:32]


def is_rollout_folder(folder: str | Place) -> bool:
    """Whether `folder` is the `rollouts` folder of a trial."""
    return (place(folder) / STORE_FILE).is_file()


def check_version(schema: pa.Schema, where: str) -> None:
    """Raises RolloutSchemaError unless files of `schema` can be read here."""
    found = (schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    require(
        found == str(SCHEMA_VERSION), "rollout schema version", found, f"be {SCHEMA_VERSION}",
        f"{where} was written by another version of rllib_llm",
        "Sample again, or read it with that", kind=RolloutSchemaError,
    )  # fmt: skip


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


# Of the columns that hold texts, and of those that hold one value that readers skip files by.
_TEXTS = [field.name for field in SCHEMA if pa.types.is_string(field.type)]
_LONG_TEXTS = ("prompt", "completion", "messages")
_SINGLE = [f.name for f in SCHEMA if not pa.types.is_nested(f.type) and f.name not in _LONG_TEXTS]

# --- which there are ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreFile:
    """One file, with the rows written under the numbers `first` to `last`.

    pieces: (rows, iteration) under each number.
    """

    first: int
    last: int
    num_bytes: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """The file's name."""
        end = "" if self.first == self.last else f"-{self.last:08d}"
        return f"part-{self.first:08d}{end}.parquet"


def not_contained(names: Iterable[str]) -> list[str]:
    """The files of a store among `names`, in order, without those that another one contains."""
    found = [(int(m[1]), int(m[2] or m[1]), name) for name in names if (m := _NAME.fullmatch(name))]
    kept: list[tuple[int, int, str]] = []
    for first, last, name in sorted(found, key=lambda each: (each[0], -each[1])):
        if not kept or last > kept[-1][1]:
            kept.append((first, last, name))
    return [name for *_, name in kept]


class RolloutFiles:
    """The files of a store, numbered in the order in which they were written; see `RolloutStore`.

    `.store.json` holds the store's name, and of a run that resumed from another store's state the
    number of its first own file: where it does so once more, those since then are removed.
    """

    def __init__(
        self, folder: str, filesystem: pyarrow.fs.FileSystem, *, keep_iterations: int | None = None
    ) -> None:
        self.folder = folder
        self.filesystem = filesystem
        self.name = ""
        self.next_file = 0
        self.has_begun = False
        self._is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        self._keep_iterations = keep_iterations
        self._most_merged = math.inf if keep_iterations is None else keep_iterations / KEPT_SHARE
        self._parts: list[StoreFile] = []  # in order, those that may be merged or removed
        self._images: set[str] = set()  # names of those that are there
        self._num_whole = 0  # of the first of them, which are not merged any more

    def begin(self, state: dict[str, Any] | None) -> None:
        """Prepares the folder for a run that resumes from `state`; None: for a new run."""
        self.filesystem.create_dir(self.folder, recursive=True)
        about: dict[str, Any] = {"store": uuid.uuid4().hex, "others": {}}
        path = f"{self.folder}/{STORE_FILE}"
        if self.filesystem.get_file_info(path).type == pyarrow.fs.FileType.File:
            with self.filesystem.open_input_stream(path) as stream:
                about = json.loads(stream.read())
        names = self._names()
        kept = [self._read_part(name) for name in not_contained(names)]
        for name in set(names) - {part.name for part in kept}:
            self._delete(name)
        if not state or not state.get("store"):
            first = 0
            about["others"] = {}
        elif state["store"] == about["store"]:
            first = state["next_file"]
        else:  # another run's: what this one has is its past, unless it began there before
            key = f"{state['store']}:{state['next_file']}"
            first = about["others"].get(key, max((part.last for part in kept), default=-1) + 1)
            about["others"] = {key: first}
        self._parts = [cut for part in kept if (cut := self._cut(part, first)) is not None]
        self.name, self.next_file, self.has_begun = about["store"], first, True
        self._put(STORE_FILE, json.dumps(about).encode())

    def write(self, table: pa.Table, iteration: int) -> int:
        """Writes one file atomically and returns its size in bytes."""
        number = self.next_file
        part = self._write(number, number, table, ((table.num_rows, iteration),))
        self.next_file += 1
        self._merge()
        self._remove_old(iteration)
        return part.num_bytes

    def keep_image(self, data: bytes) -> str:
        """Writes the file of an image, unless it is there; returns its name."""
        if not self._images:
            self.filesystem.create_dir(f"{self.folder}/{IMAGES}", recursive=True)
        if (name := image_name(data)) not in self._images:
            path = f"{IMAGES}/{name}"
            there = self.filesystem.get_file_info(f"{self.folder}/{path}")
            if there.type != pyarrow.fs.FileType.File:
                self._put(path, data)
            self._images.add(name)
        return name

    # --- merged, cut, removed ------------------------------------------------------------------

    def _merge(self) -> None:
        """Merges the newest files of like numbers of pieces, again and again."""
        while True:
            whole = self._parts[self._num_whole :]
            size = len(whole[-1].pieces) if whole else 0
            alike = [part for part in whole[-MERGED_FILES:] if len(part.pieces) == size]
            if len(alike) < MERGED_FILES or MERGED_FILES * size > self._most_merged:
                return
            if sum(part.num_bytes for part in alike) > MERGED_BYTES:
                self._num_whole = len(self._parts)
                return
            table = pa.concat_tables([self._read(part) for part in alike])
            pieces = tuple(piece for part in alike for piece in part.pieces)
            del self._parts[-MERGED_FILES:]
            self._write(alike[0].first, alike[-1].last, table, pieces)
            for part in alike:
                self._delete(part.name)

    def _cut(self, part: StoreFile, first: int) -> StoreFile | None:
        """Removes the rows written under the numbers from `first` on."""
        if part.last < first:
            return part
        cut = None
        if part.first < first:
            pieces = part.pieces[: first - part.first]
            table = self._read(part).slice(0, sum(rows for rows, _ in pieces))
            cut = self._write(part.first, first - 1, table, pieces)
            self._parts.pop()
        self._delete(part.name)
        return cut

    def _remove_old(self, iteration: int) -> None:
        if self._keep_iterations is None:
            return
        oldest = iteration - self._keep_iterations
        old = [part for part in self._parts if max(at for _, at in part.pieces) <= oldest]
        for part in old:
            self._delete(part.name)
        self._parts = self._parts[len(old) :]
        self._num_whole = max(0, self._num_whole - len(old))

    # --- on the disk ---------------------------------------------------------------------------

    def _write(
        self, first: int, last: int, table: pa.Table, pieces: tuple[tuple[int, int], ...]
    ) -> StoreFile:
        metadata = {**(table.schema.metadata or {}), PIECES_KEY: json.dumps(pieces).encode()}
        sink = pa.BufferOutputStream()
        pq.write_table(
            table.replace_schema_metadata(metadata), sink, compression=COMPRESSION,
            use_dictionary=_TEXTS, write_statistics=_SINGLE,
        )  # fmt: skip
        content = sink.getvalue()
        part = StoreFile(first, last, content.size, pieces)
        self._put(part.name, content)
        self._parts.append(part)
        return part

    def _read(self, part: StoreFile) -> pa.Table:
        return pq.read_table(f"{self.folder}/{part.name}", filesystem=self.filesystem)

    def _read_part(self, name: str) -> StoreFile:
        path = f"{self.folder}/{name}"
        schema = pq.read_schema(path, filesystem=self.filesystem)
        check_version(schema, self.folder)
        pieces = json.loads(schema.metadata[PIECES_KEY])
        match = _NAME.fullmatch(name)
        assert match is not None, "names of a store's files"
        size = self.filesystem.get_file_info(path).size
        return StoreFile(int(match[1]), int(match[2] or match[1]), size, tuple(map(tuple, pieces)))

    def _names(self) -> list[str]:
        selector = pyarrow.fs.FileSelector(self.folder, allow_not_found=True)
        names = [info.base_name for info in self.filesystem.get_file_info(selector)]
        return [name for name in names if _NAME.fullmatch(name)]

    def _delete(self, name: str) -> None:
        self.filesystem.delete_file(f"{self.folder}/{name}")

    def _put(self, name: str, content: Any) -> None:
        path = f"{self.folder}/{name}"
        folder, _, file_name = path.rpartition("/")
        if not self._is_local:  # object stores show a file once it is closed
            with self.filesystem.open_output_stream(path) as stream:
                stream.write(content)
            return
        partial = f"{folder}/.{file_name}.partial"
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


logger = logging.getLogger(__name__)

QUEUE_SIZE = 4  # batches that wait; more would only hold memory while the disk is slow
FILE_BYTES = 64 * 1024**2  # of rows in memory, at which a file is written in any case
IDLE_SECONDS = 1.0
MAX_SECONDS_TO_STOP = 300.0  # that the end of a run waits for the writer
ROLLOUTS = "rollouts"  # the folder in a trial's


def rollouts_in(trial: Place, rollouts_path: str | None) -> Place:
    """The folder of a trial's rollouts: its own, or below the setting `rollouts_path`."""
    return place(rollouts_path) / trial.name if rollouts_path else trial / ROLLOUTS

MakeTable = Callable[[], pa.Table]


_Item = tuple[int, int, MakeTable]  # of an iteration, so many rows


class RolloutStore:
    """The rollouts of one run in one folder.

    Args:
        folder: a path, or one inside `filesystem`.
        filesystem: pyarrow's; None: this machine's.
        on_error: "go_on" logs once that rollouts are no longer kept, "stop" raises.
        keep_iterations: of so many iterations rows are kept, the newest; None: of all.
    """

    def __init__(
        self, folder: str | os.PathLike, *, filesystem: pyarrow.fs.FileSystem | None = None,
        on_error: str = "go_on", keep_iterations: int | None = None,
    ) -> None:  # fmt: skip
        self._open_files = functools.partial(
            RolloutFiles, os.fspath(folder), filesystem or pyarrow.fs.LocalFileSystem(),
            keep_iterations=keep_iterations,
        )  # fmt: skip
        self._files = self._open_files()
        self._on_error = on_error
        # An event asks for all that came before it to be written, and is set then.
        self._queue: queue.Queue[_Item | threading.Event | None] = queue.Queue(QUEUE_SIZE)
        self._thread: threading.Thread | None = None
        self.keep_image = lambda data: self._files.keep_image(data)  # in the writer's thread
        self._begin: dict[str, Any] | None = None  # the state to resume from
        self._rows: list[pa.Table] = []  # of one iteration, not yet written
        self._num_waiting = self._num_bytes = 0  # rows of them, and their size in memory
        self._iteration = 0
        self._error: Exception | None = None
        self._counts = {"rows": 0, "bytes": 0, "files": 0, "lost": 0}
        self._seconds = {"wait": 0.0, "write": 0.0}

    def put(self, iteration: int, num_rows: int, make: MakeTable) -> None:
        """Queues the `num_rows` rows returned by `make`, which runs in the writer's thread, as rows
        of `iteration`. Blocks while the queue is full.

        Raises:
            Problems: writing failed, and `on_error` is "stop".
        """
        self._raise_if_stopped()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rollout-store", daemon=True)
            self._thread.start()
        start = time.monotonic()
        self._queue.put((iteration, num_rows, make))
        self._seconds["wait"] += time.monotonic() - start

    def flush(self) -> None:
        """Returns when all that was put is on disk.

        Raises:
            Problems: as `put`.
        """
        if self._thread is not None:
            written = threading.Event()
            self._queue.put(written)
            written.wait()
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
            if item is None or isinstance(item, threading.Event):
                self._guarded(self._write)
                if item is None:
                    return
                item.set()
                continue
            iteration, num_rows, make = item
            if self._rows and iteration != self._iteration:
                self._guarded(self._write)
            self._iteration = iteration
            self._num_waiting += num_rows
            self._guarded(functools.partial(self._add, make))

    def _add(self, make: MakeTable) -> None:
        table = conform(make(), self._iteration)
        self._rows.append(table)
        self._num_bytes += table.nbytes
        if self._num_bytes >= FILE_BYTES:
            self._write()

    def _guarded(self, act: Callable[[], None]) -> None:
        """Runs the writer; an exception is raised in the run's thread, or logged once."""
        if self._error is None:
            try:
                act()
            except Exception as error:  # noqa: BLE001  (the border of a thread; raised by put)
                self._error = error
                if self._on_error == "go_on":
                    logger.warning("%s The run continues without.", self._problem(error))
        if self._error is not None:
            self._counts["lost"] += self._num_waiting
            self._clear()

    def _write(self) -> None:
        if not self._rows:
            return
        start = time.monotonic()
        if not self._files.has_begun:
            self._files.begin(self._begin)
        table = pa.concat_tables(self._rows)
        num_bytes = self._files.write(table, self._iteration)
        self._clear()
        self._counts["rows"] += table.num_rows
        self._counts["bytes"] += num_bytes
        self._counts["files"] += 1
        self._seconds["write"] += time.monotonic() - start

    def _clear(self) -> None:
        self._rows.clear()
        self._num_waiting = self._num_bytes = 0

    def _raise_if_stopped(self) -> None:
        if self._error is not None and self._on_error == "stop":
            raise Problems([self._problem(self._error)]) from self._error

    def _problem(self, error: Exception) -> Problem:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        why = "the disk is full" if full else f"{type(error).__name__}: {error}"
        rule = f"be able to write to {self._files.folder!r}"
        return Problem("store_rollouts", rule, why, "Free some space, or set store_rollouts=False")
