"""The named actor that knows the newest weights, for receivers that the driver does not call:
server replicas, evaluators of other runs.

    publisher ── announce(weights) ──▶ coordinator ◀── wait_for(version), report_lost ── receivers

Bytes do not pass through it: it holds object references. Killed, it is restarted by Ray, empty; the
publisher, which looks in several times a second, announces again. Receivers keep what they
have.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

import ray

from rllib_llm.shared.remote import NAMESPACE, PASSING, NamedActor
from rllib_llm.weights.published import PublishedWeights


class Announced(str, Enum):
    """The outcome of an announcement."""

    ACCEPTED = "accepted"  # it is the newest, or was already
    STALE = "stale"  # the same epoch has announced a higher version, or these weights before
    LOST = "lost"  # a receiver could not get it: put it into the store again under a new key
    FENCED = "fenced"  # another publisher has published in a later epoch


class VersionLog:
    """The last `keep` publications of the latest epoch.

    Holding a publication keeps its bytes in the object store: that is what `keep` bounds.

    clock: nanoseconds since 1970. Epochs are microseconds of it, so that they also grow when the
        log is lost and begun anew.
    """

    def __init__(self, keep: int = 2, clock: Callable[[], int] = time.time_ns):
        assert keep >= 1, keep
        self._keep, self._clock = keep, clock
        self._epoch = 0  # of the latest publication
        self._given = 0  # the last number given to a publisher
        self._kept: list[PublishedWeights] = []
        self._lost: set[str] = set()  # keys among those kept

    def begin_epoch(self) -> int:
        """A number for a new publisher, whose first announcement fences off all earlier ones.

        Being asked fences off none: a question whose asker gave up, and asked again, is answered
        late when the process is restarted or wakes up.
        """
        self._given = max(self._given + 1, self._epoch + 1, self._clock() // 1000)
        return self._given

    def is_last_epoch(self, epoch: int) -> bool:
        """Whether no publisher has begun, or published in, a later one."""
        return epoch >= max(self._given, self._epoch)

    def announce(self, published: PublishedWeights) -> Announced:
        """Takes `published` as the newest, if it is. Saying it twice does no harm."""
        if published.epoch < self._epoch:
            return Announced.FENCED
        if published.key in self._lost:
            return Announced.LOST
        self._epoch = published.epoch  # higher than ours: this log was lost and begun anew
        head = self._kept[-1] if self._kept else None
        if head is not None and head.key == published.key:
            return Announced.ACCEPTED
        if head is not None and published.order < head.order:
            return Announced.STALE
        if head is not None and published.order == head.order:
            if head.key not in self._lost:
                return Announced.STALE
            self._kept.pop()
        self._kept = [*self._kept, published][-self._keep :]
        self._lost &= {kept.key for kept in self._kept}
        return Announced.ACCEPTED

    def report_lost(self, key: str) -> None:
        """Notes that the bytes of this publication could not be had."""
        if any(kept.key == key for kept in self._kept):
            self._lost.add(key)

    def latest(self) -> PublishedWeights | None:
        """The newest publication whose bytes were not reported lost."""
        found = [kept for kept in self._kept if kept.key not in self._lost]
        return found[-1] if found else None

    def newer(
        self, min_version: int = 0, after: tuple[int, int] | None = None
    ) -> PublishedWeights | None:
        """The latest publication, if its version is at least `min_version` and it is newer than the
        caller's (epoch, version)."""
        head = self.latest()
        if head is None or head.version < min_version or (after and head.order <= after):
            return None
        return head

    def stats(self) -> dict[str, int]:
        """Kept versions, their bytes, and how many of them are lost."""
        num_bytes = sum(kept.num_bytes for kept in self._kept)
        return {"num_versions": len(self._kept), "num_bytes": num_bytes,
                "num_lost": len(self._lost)}  # fmt: skip


MAX_CONCURRENT_CALLS = 1000  # receivers that wait at the same time
ANSWER_SECONDS = 60.0  # that an attempt may take; the first waits for a process to start
PATIENCE_SECONDS = 300.0  # that a call may take, all its attempts
IDLE_SECONDS = 3600.0  # without a call: a publisher calls several times a second
SECONDS_TO_END = 5.0


class WeightsCoordinator:
    """A `VersionLog` that can be waited for. Its methods run in turns on one event loop.

    idle_seconds: it ends after so long without a call. Publishers that stop close it;
        one that was killed cannot, and may be started again soon.
    """

    def __init__(self, keep: int, idle_seconds: float = IDLE_SECONDS):
        self._log = VersionLog(keep)
        self._changed = asyncio.Condition()
        self._idle_seconds = idle_seconds
        self._called_at = time.monotonic()
        self._idle_watch: asyncio.Task | None = None

    def _note_call(self) -> None:
        self._called_at = time.monotonic()
        if self._idle_watch is None:  # the loop does not run before the first call
            self._idle_watch = asyncio.create_task(self._end_when_idle())

    async def _end_when_idle(self) -> None:
        while (rest := self._called_at + self._idle_seconds - time.monotonic()) > 0:
            await asyncio.sleep(rest)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def call(self, name: str, *args: Any) -> Any:
        """The result of a method of `VersionLog`."""
        self._note_call()
        return getattr(self._log, name)(*args)

    async def announce(self, published: PublishedWeights) -> Announced:
        """See `VersionLog.announce`; wakes waiting receivers."""
        verdict = await self.call("announce", published)
        async with self._changed:
            self._changed.notify_all()
        return verdict

    async def wait_for(
        self, min_version: int, timeout: float, after: tuple[int, int] | None
    ) -> PublishedWeights | None:
        """See `VersionLog.newer`; None after `timeout` seconds without."""
        self._note_call()
        deadline = time.monotonic() + timeout
        async with self._changed:
            while (found := self._log.newer(min_version, after)) is None:
                rest = deadline - time.monotonic()
                try:
                    await asyncio.wait_for(self._changed.wait(), max(0.0, rest))
                except asyncio.TimeoutError:  # noqa: UP041  (another class before Python 3.11)
                    return self._log.newer(min_version, after)
        return found

    async def stats(self) -> dict[str, int]:
        """See `VersionLog.stats`; `pid` is this process's."""
        self._note_call()
        return {**self._log.stats(), "pid": os.getpid()}


class CoordinatorClient(NamedActor):
    """The coordinator called `name`, made if there is none, from any process of the cluster.

    keep: versions held in the object store; the first caller's value counts.
    restarts_hung: kills a coordinator that gives no answer, for Ray to start it again. For the
        publisher, who tells the new one all it needs.
    idle_seconds: without a call, after which it ends; the first caller's value counts.
    given: see `NamedActor`.
    """

    def __init__(
        self, name: str, *, keep: int = 2, restarts_hung: bool = False,
        idle_seconds: float = IDLE_SECONDS, **given: Any,
    ):  # fmt: skip
        self.name = name
        self._keep, self._idle_seconds = keep, idle_seconds
        super().__init__(
            self._find_or_make, answer_seconds=ANSWER_SECONDS, patience_seconds=PATIENCE_SECONDS,
            restarts_hung=restarts_hung, **given,
        )  # fmt: skip

    def _find_or_make(self) -> Any:
        # Receivers may outlast the run that made it, and wait for the next: it must not go with a
        # trial's placement group.
        kind = ray.remote(WeightsCoordinator).options(
            name=self.name, namespace=NAMESPACE, get_if_exists=True, lifetime="detached",
            scheduling_strategy="DEFAULT", num_cpus=0, max_restarts=-1, max_task_retries=-1,
            max_concurrency=MAX_CONCURRENT_CALLS,
        )  # fmt: skip
        return kind.remote(self._keep, self._idle_seconds)

    def begin_epoch(self) -> int:
        """See `VersionLog.begin_epoch`."""
        return self.call("call", "begin_epoch")

    def announce(self, published: PublishedWeights) -> Announced:
        """Announces a publication; may be repeated at any time."""
        return self.call("announce", published)

    def latest(self) -> PublishedWeights | None:
        """The newest weights that can be had."""
        return self.call("call", "latest")

    def wait_for(
        self, min_version: int = 0, timeout: float = 60.0, *, after: tuple[int, int] | None = None
    ) -> PublishedWeights | None:
        """The newest weights once their version is at least `min_version` and they come after the
        (epoch, version) `after`; None after `timeout` seconds without."""
        return self.call("wait_for", min_version, timeout, after, waits=timeout)

    def report_lost(self, key: str) -> None:
        """Reports that a publication's bytes could not be fetched."""
        self.call("call", "report_lost", key)

    def stats(self) -> dict[str, int]:
        """Kept versions, their bytes, how many of them are lost, and the actor's process id."""
        return self.call("stats")

    def end_epoch(self, epoch: int) -> None:
        """Ends the coordinator, unless a publisher has begun a later epoch. Receivers that wait
        for the next run make a new one. Tried once: one that is away ends itself (`idle_seconds`).
        """
        if not ray.is_initialized():  # and with Ray the coordinator has gone
            return
        with contextlib.suppress(*PASSING):
            if self.ask("call", "is_last_epoch", epoch, timeout=SECONDS_TO_END):
                self.close()

    def close(self) -> None:
        """Ends the coordinator for everybody; the bytes it held leave the store."""
        self.end()
