"""The ledger as driver and samplers call it: a `JournaledLedger` without a file in one process;
else one in a named actor, where samplers that ask for work, and the driver, wait for it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rllib_llm.rollouts.groups import Answer, Lease
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.schedule import StreamRules
from rllib_llm.shared.remote import NAMESPACE, NamedActor
from rllib_llm.weights.coordinator import PublishedWeights

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
        folder: where the file is; a ledger that it describes is resumed. None: no file, for a
            process that samples and learns in turn.
    """

    def __init__(
        self,
        rules: StreamRules,
        folder: Path | None = None,
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

    def take(self, step: int, num_seen: int, nth: int, wait_s: float = 0.0) -> Answer:
        """See `Ledger.take`. Nobody works meanwhile, so it does not wait."""
        return self.call("take", step, num_seen, nth)

    def state(self) -> dict[str, Any]:
        """See `Ledger.state`."""
        return self.ledger.state()

    def look(self) -> dict[str, Any]:
        """`metrics`, `position`, `waits_for` (samplers being waited for) and `num_old` (groups to
        be sampled by older weights than the newest)."""
        return {
            "metrics": self.ledger.metrics(),
            "position": self.ledger.table.position,
            "waits_for": self.ledger.waits_for(),
            "num_old": self.ledger.num_old,
        }

    def close(self) -> None:
        """Stops giving out work, and wakes all waiting samplers: there are none."""

    def stop(self) -> None:
        """Ends it: it needs no end."""

    def _make(self, name: str, now: float, args: Sequence[Any]) -> Any:
        silent, self._now = now - self._now, now
        if silent > SILENT_SECONDS:
            self.ledger.leases.grant(now + GRANTED_SECONDS)
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
        self.ledger.leases.put_off_all(away)
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


# May end somebody's wait.
_WAKE = ("begin", "publish", "offer", "push", "fail", "give_back", "report", "set_state")


@dataclass(eq=False)
class _Idle:
    """A sampler that waits for work."""

    sampler: str
    num_groups: int
    holding: list[int]
    answer: asyncio.Future[list[Lease]]


class LedgerActor:
    """A `JournaledLedger` that can be waited for. Its methods run in turns on one event loop.

    Samplers that wait are served in the order in which they came, as many as there is work for.
    """

    def __init__(self, rules: StreamRules, folder: str, keeps_rejected: bool) -> None:
        self._journaled = JournaledLedger(rules, Path(folder), keeps_rejected=keeps_rejected)
        self._changed = asyncio.Event()
        self._idle: deque[_Idle] = deque()
        self._is_closed = False

    async def close(self) -> None:
        """Stops giving out work and wakes all waiting samplers."""
        self._is_closed = True
        while self._idle:
            self._answer(self._idle.popleft(), [])

    async def call(self, name: str, *args: Any) -> Any:
        """Makes one of `CALLS`, and wakes those who wait for its effect."""
        if name == "give_back":
            self._end_wait_of(args[0])  # one that died would be given what it held
        answer = self._journaled.call(name, *args)
        if name in _WAKE:
            self._changed.set()
            self._serve()
        return answer

    async def take(self, step: int, num_seen: int, nth: int, wait_s: float) -> Answer:
        """See `Ledger.take`; returns within `wait_s`."""
        deadline = time.monotonic() + wait_s
        if nth:
            self._journaled.call("want", nth)
            self._serve()
        while not self._journaled.ledger.has_answer(nth):
            self._changed.clear()
            rest = deadline - time.monotonic()
            if rest <= 0:
                break
            await _wait(asyncio.ensure_future(self._changed.wait()), rest)
        answer = self._journaled.take(step, num_seen, nth)
        self._serve()  # what a lease held that has ended
        return answer

    async def lease(
        self, sampler: str, num_groups: int, holding: Sequence[int], wait_s: float
    ) -> list[Lease]:
        """See `Ledger.lease`; waits for work, for `wait_s` at most."""
        ledger = self._journaled.ledger
        self._end_wait_of(sampler)  # it was started again
        if self._is_closed:
            return []
        if ledger.leases.holds_more(sampler, holding):  # it was started again
            self._journaled.call("lease", sampler, 0, list(holding))
            self._serve()
        if ledger.has_work():
            return self._journaled.call("lease", sampler, num_groups, list(holding))
        idle = _Idle(sampler, num_groups, list(holding), asyncio.Future())
        self._idle.append(idle)
        if await _wait(idle.answer, wait_s):
            return idle.answer.result()
        self._idle.remove(idle)
        return []

    def _end_wait_of(self, sampler: str) -> None:
        """Answers the requests of a sampler that wait with nothing."""
        for idle in [each for each in self._idle if each.sampler == sampler]:
            self._idle.remove(idle)
            self._answer(idle, [])

    def _serve(self) -> None:
        """Gives what waits to samplers that wait."""
        while self._idle and self._journaled.ledger.has_work():
            idle = self._idle.popleft()
            leases = self._journaled.call("lease", idle.sampler, idle.num_groups, idle.holding)
            self._answer(idle, leases)

    @staticmethod
    def _answer(idle: _Idle, leases: list[Lease]) -> None:
        if not idle.answer.done():
            idle.answer.set_result(leases)

    async def state(self) -> dict[str, Any]:
        """See `Ledger.state`."""
        return self._journaled.state()

    async def look(self) -> dict[str, Any]:
        """As `JournaledLedger.look`, with `cpu_seconds` and `pid` of this process."""
        return self._journaled.look() | {"cpu_seconds": time.process_time(), "pid": os.getpid()}


async def _wait(future: asyncio.Future, seconds: float) -> bool:
    """Whether the future is done in time; else it is cancelled."""
    await asyncio.wait([future], timeout=seconds)
    return future.done() or not future.cancel()


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
        self,
        name: str,
        rules: StreamRules,
        folder: Path,
        *,
        keeps_rejected: bool = False,
        answer_seconds: float = CALL_SECONDS,
    ) -> None:
        self._folder = folder
        node = ray.get_runtime_context().get_node_id()
        actor = (
            ray.remote(LedgerActor)
            .options(
                name=name,
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=MAX_CONCURRENT_CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(rules, str(folder), keeps_rejected)
        )
        self.named = NamedActor(
            lambda: actor, answer_seconds=answer_seconds, patience_seconds=MAX_SECONDS_OF_A_CALL,
            reconnects=False,
        )  # fmt: skip

    @property
    def actor(self) -> Any:
        """Its handle."""
        return self.named.handle

    def call(self, name: str, *args: Any) -> Any:
        return self.named.call("call", name, *args)

    def take(self, step: int, num_seen: int, nth: int, wait_s: float) -> Answer:
        return self.named.call("take", step, num_seen, nth, wait_s)

    def state(self) -> dict[str, Any]:
        return self.named.call("state")

    def look(self) -> dict[str, Any]:
        return self.named.call("look")

    def close(self) -> None:
        if ray.is_initialized():
            ray.wait([self.actor.close.remote()], timeout=STOP_SECONDS)

    def stop(self) -> None:
        """Removes its journal as well."""
        if ray.is_initialized():
            self.named.end()
        shutil.rmtree(self._folder, ignore_errors=True)


LedgerCalls: TypeAlias = JournaledLedger | RemoteLedger
"""The driver's interface to a ledger."""


class SamplerLedger:
    """A sampler's end of a ledger in an actor.

    Its calls wait for the actor as long as that is being started again; they fail only once it has
    ended for good, and so has the run. To look whether one is answered costs nothing, as a sampler
    does after every token.
    """

    def __init__(self, actor: Any, sampler: str) -> None:
        self._actor, self.sampler = actor, sampler

    def lease(self, num_groups: int, holding: Iterable[int], wait_s: float) -> Future[Any]:
        """See `LedgerActor.lease`."""
        call = self._actor.lease.remote(self.sampler, num_groups, list(holding), wait_s)
        return call.future()

    def call(self, name: str, *args: Any) -> Future[Any]:
        """One of `CALLS`."""
        return self._actor.call.remote(name, *args).future()
