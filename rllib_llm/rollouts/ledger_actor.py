"""A ledger in a named actor, with a journal: samplers that ask for work, and the driver, wait for
it. A process that samples and learns in turn calls a `Ledger` itself instead."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rllib_llm.rollouts.groups import Lease
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.schedule import StreamRules
from rllib_llm.shared.remote import NAMESPACE, NamedActor
from rllib_llm.weights.published import PublishedWeights

# Calls that change the table, and those that only ask, which are not written.
ASKED = ("state", "look")
CALLS = (
    "begin", "publish", "offer", "take", "lease", "renew", "put_off", "push", "keep_partial",
    "fail", "give_back", "want", "report", "set_state",
)  # fmt: skip
_COMPACT_BYTES = 64 * 2**20  # of calls, after which the state takes their place
_FILE = "ledger.journal"


class JournaledLedger:
    """A `Ledger` whose calls are logged in a file.

    A call that a kill cut short while it was written was not made: its caller repeats it.
    Nor was one for which the disk had no room: it raises OSError.

    Args:
        folder: where the file is; a ledger that it describes is resumed.
    """

    def __init__(
        self, rules: StreamRules, folder: Path, *, keeps_rejected: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._clock, self._now = clock, clock()
        self.ledger = Ledger(rules, keeps_rejected=keeps_rejected, clock=lambda: self._now)
        self._path = folder / _FILE
        self._file: Any = None  # open for calls to be added
        self._num_bytes = 0
        self.was_restored = self._path.exists()
        if self.was_restored:
            self._replay()
        folder.mkdir(parents=True, exist_ok=True)
        self._compact()

    def call(self, name: str, *args: Any) -> Any:
        """Makes a call, after it was written down."""
        if name in ASKED:
            return self.ledger.call(name, *args)
        assert name in CALLS, name
        now = self._clock()
        self._write((name, now, *(
            dataclasses.replace(arg, ref=()) if isinstance(arg, PublishedWeights) else arg
            for arg in args
        )))  # fmt: skip
        self._now = now
        answer = self.ledger.call(name, *args)
        if self._num_bytes > _COMPACT_BYTES:
            self._compact()
        return answer

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

    def _replay(self) -> None:
        for name, now, *args in _read(self._path):
            self._now = now
            if name == "snapshot":
                self.ledger.restore(args[0])
            else:
                self.ledger.call(name, *args)
        self.ledger.forget_weights()
        away, self._now = self._clock() - self._now, self._clock()
        self.ledger.was_away(away)

    def _compact(self) -> None:
        """Replaces the logged calls by a snapshot of the table."""
        whole = self._path.with_suffix(".new")
        whole.write_bytes(pickle.dumps(("snapshot", self._now, self.ledger.snapshot()), protocol=5))
        whole.replace(self._path)
        if self._file is not None:
            self._file.close()
        # Unbuffered: the system keeps what is written when a process is killed.
        self._file = self._path.open("ab", buffering=0)
        self._num_bytes = 0


def _read(path: Path) -> Iterator[tuple[Any, ...]]:
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the last one, cut short
                return


# May end a caller's wait; the last ones, as leases end by them.
_WAKE = ("begin", "publish", "offer", "push", "fail", "give_back", "set_state", "report", "take")
WAIT_SECONDS = 0.5  # of a driver for a batch, between looks at samplers


class LedgerActor:
    """A `JournaledLedger` that can be waited for. Its methods run in turns on one event loop.

    Samplers that wait are served in the order in which they came, as many as there is work for.
    """

    def __init__(self, rules: StreamRules, folder: str, keeps_rejected: bool) -> None:
        self._journaled = JournaledLedger(rules, Path(folder), keeps_rejected=keeps_rejected)
        self._changed = asyncio.Event()
        # The calls for which samplers wait, in the order in which they came, and their answers.
        self._idle: dict[str, tuple[tuple[Any, ...], asyncio.Future[list[Lease]]]] = {}
        self._is_closed = False

    async def close(self) -> None:
        """Stops giving out work and wakes all waiting samplers."""
        self._is_closed = True
        for sampler in [*self._idle]:
            self._answer(sampler, [])

    async def call(self, name: str, *args: Any) -> Any:
        """Makes one of `CALLS`, and wakes those who wait for its effect. `take` waits until it has
        something to tell, for `WAIT_SECONDS` at most; `look` has `cpu_seconds` and `pid` of this
        process, too."""
        if name == "take":
            if nth := args[2]:
                self._journaled.call("want", nth)
                self._serve()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_answer(nth), WAIT_SECONDS)
        elif name == "give_back":
            self._answer(args[0], [])  # one that died would be given what it held
        answer = self._journaled.call(name, *args)
        if name == "look":
            answer |= {"cpu_seconds": time.process_time(), "pid": os.getpid()}
        if name in _WAKE:
            self._changed.set()
            self._serve()
        return answer

    async def _has_answer(self, nth: int) -> None:
        """Waits for what `take` is to tell."""
        while not self._journaled.ledger.has_answer(nth):
            self._changed.clear()
            await self._changed.wait()

    async def lease(
        self, sampler: str, num_groups: int, holding: Sequence[int], wait_s: float
    ) -> list[Lease]:
        """See `Ledger.lease`; waits for work, for `wait_s` at most."""
        ledger = self._journaled.ledger
        self._answer(sampler, [])  # it was started again
        if self._is_closed:
            return []
        if ledger.leases.holds_more(sampler, holding):  # it was started again
            self._journaled.call("lease", sampler, 0, list(holding))
            self._serve()
        asked = ("lease", sampler, num_groups, list(holding))
        if ledger.has_work() and (leases := self._journaled.call(*asked)):
            return leases
        answer: asyncio.Future[list[Lease]] = asyncio.Future()
        self._idle[sampler] = asked, answer
        await asyncio.wait([answer], timeout=wait_s)
        if not answer.done():
            self._answer(sampler, [])
        return answer.result()

    def _serve(self) -> None:
        """Gives what waits to samplers that wait."""
        for sampler, (asked, _) in [*self._idle.items()]:
            if not self._journaled.ledger.has_work():
                break
            if leases := self._journaled.call(*asked):
                self._answer(sampler, leases)

    def _answer(self, sampler: str, leases: list[Lease]) -> None:
        """Ends the wait of a sampler, if it waits."""
        if sampler in self._idle:
            self._idle.pop(sampler)[1].set_result(leases)


MAX_CONCURRENT_CALLS = 1000  # samplers that wait at the same time
CALL_SECONDS = 30.0  # that an attempt may take
MAX_SECONDS_OF_A_CALL = 900.0  # all attempts of it, while the actor is started again and again
STOP_SECONDS = 2.0


class RemoteLedger:
    """The driver's end of a ledger in an actor, which it makes and ends.

    The actor is on the driver's node, where the journal is. It is started again when it dies; one
    that gives no answer is killed first.

    Args:
        answer_seconds: that a call may take, beyond what the call itself waits for.
    """

    def __init__(
        self, name: str, rules: StreamRules, folder: Path, *, keeps_rejected: bool = False,
        answer_seconds: float = CALL_SECONDS,
    ) -> None:  # fmt: skip
        self._folder = folder
        node = ray.get_runtime_context().get_node_id()
        kind = ray.remote(LedgerActor).options(
            name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=-1, max_task_retries=-1,
            max_concurrency=MAX_CONCURRENT_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )  # fmt: skip
        actor = kind.remote(rules, str(folder), keeps_rejected)
        self.named = NamedActor(
            lambda: actor, answer_seconds=answer_seconds, patience_seconds=MAX_SECONDS_OF_A_CALL,
            reconnects=False,
        )  # fmt: skip

    @property
    def actor(self) -> Any:
        """Its handle."""
        return self.named.handle

    def call(self, name: str, *args: Any) -> Any:
        """See `LedgerActor.call`."""
        return self.named.call("call", name, *args)

    def close(self) -> None:
        if ray.is_initialized():
            ray.wait([self.actor.close.remote()], timeout=STOP_SECONDS)

    def stop(self) -> None:
        """Removes its journal as well."""
        if ray.is_initialized():
            self.named.end()
        shutil.rmtree(self._folder, ignore_errors=True)
