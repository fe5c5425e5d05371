"""A ledger that survives its process: every call is written down before it is made.

The ledger is a pure function of its calls and of the time of each, so that a new one to which the
same calls are made holds the same table, the leases that samplers are at work on among it. Object
references of weights mean nothing to another process: the driver tells them again.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.schedule import StreamRules
from rllib_llm.weights.published import PublishedWeights

# Calls that change the table. What is asked only is not written.
CALLS = (
    "begin", "publish", "offer", "take", "lease", "renew", "put_off", "push", "keep_partial",
    "fail", "give_back", "want", "report", "set_state",
)  # fmt: skip
_COMPACT_BYTES = 64 * 2**20  # of calls, after which the state takes their place
_FILE = "ledger.journal"
# After so many seconds without a call, in which this process perhaps had no core, renewals may wait
# behind the next one: no lease ends before so many more.
SILENT_SECONDS, GRANTED_SECONDS = 5.0, 2.0


class JournaledLedger:
    """A `Ledger` whose calls are logged in a file.

    A call that a kill cut short while it was written was not made: its caller repeats it.
    Nor was one for which the disk had no room: it raises OSError.

    Args:
        rules, keeps_rejected: of a new ledger.
        folder: where the file is; a ledger that it describes is resumed. None: no file.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        rules: StreamRules,
        folder: Path | None,
        *,
        keeps_rejected: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._now = clock, clock()
        self.ledger = Ledger(rules, keeps_rejected=keeps_rejected, clock=lambda: self._now)
        self._path = None if folder is None else Path(folder) / _FILE
        self._file: Any = None  # open for calls to be added
        self._num_bytes = 0
        self.was_restored = False
        if self._path is not None and self._path.exists():
            self._replay(self._path)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._compact(self._path)

    def call(self, name: str, *args: Any) -> Any:
        """Makes a call, after it was written down."""
        assert name in CALLS, name
        now = self._clock()
        if self._path is not None:
            self._write((name, now, *_without_references(args)))
        answer = self._make(name, now, args)
        if self._path is not None and self._num_bytes > _COMPACT_BYTES:
            self._compact(self._path)
        return answer

    def _make(self, name: str, now: float, args: Sequence[Any]) -> Any:
        silent, self._now = now - self._now, now
        if silent > SILENT_SECONDS:
            self.ledger.grant_all(now + GRANTED_SECONDS)
        return getattr(self.ledger, name)(*args)

    def _write(self, entry: tuple[Any, ...]) -> None:
        record = pickle.dumps(entry, protocol=5)
        start, rest = self._file.tell(), memoryview(record)
        try:
            while rest:  # a full disk takes what there is room for, and says so at the next write
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(start)  # half a record would hide all that come after it
            raise
        self._num_bytes += len(record)

    def _replay(self, path: Path) -> None:
        for name, now, *args in _read(path):
            if name == "snapshot":
                self._now = now
                self.ledger.restore(args[0])
            else:
                self._make(name, now, args)
        self.ledger.forget_weights()
        # Nobody could renew a lease meanwhile, nor hand anything in.
        away, self._now = self._clock() - self._now, self._clock()
        self.ledger.put_off_all(away)
        self.was_restored = True

    def _compact(self, path: Path) -> None:
        """Replaces the logged calls by a snapshot of the table."""
        whole = path.with_suffix(".new")
        whole.write_bytes(pickle.dumps(("snapshot", self._now, self.ledger.snapshot()), protocol=5))
        whole.replace(path)
        if self._file is not None:
            self._file.close()
        # Unbuffered: the system keeps what is written when a process is killed.
        self._file = path.open("ab", buffering=0)
        self._num_bytes = 0


def _without_references(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        dataclasses.replace(arg, ref=()) if isinstance(arg, PublishedWeights) else arg
        for arg in args
    )


def _read(path: Path) -> Iterator[tuple[Any, ...]]:
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the last one, cut short
                return
