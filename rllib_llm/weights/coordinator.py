"""The named actor that knows which weights are the newest, for receivers that the driver does not
ask: replicas of a server, evaluators of other runs.

    publisher ── announce(weights) ──▶ coordinator ◀── wait_for(version), report_lost ── receivers

Bytes do not pass through it: it holds object references. Killed, it is restarted by Ray, empty; the
publisher, which looks in several times a second, tells it again. Receivers go on with what they
have.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RaySystemError

from rllib_llm.weights.backoff import backoff_seconds
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.version_log import Verdict, VersionLog

NAMESPACE = "rllib_llm"  # of coordinators, whichever driver asks
MAX_CONCURRENT_CALLS = 1000  # receivers that wait at the same time
MAX_ATTEMPTS = 8
TIMEOUTS_OF_HUNG = 3  # of one call; fewer may be a process that takes long to start
IDLE_SECONDS = 3600.0  # without a call: a publisher calls several times a second
SECONDS_TO_END = 5.0


class WeightsCoordinator:
    """A `VersionLog` that can be waited for. Its methods run in turns on one event loop.

    idle_seconds: it ends when nobody has called it for so long. Publishers that stop close it;
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

    async def begin_epoch(self) -> int:
        """See `VersionLog.begin_epoch`."""
        self._note_call()
        return self._log.begin_epoch()

    async def is_last_epoch(self, epoch: int) -> bool:
        """See `VersionLog.is_last_epoch`."""
        self._note_call()
        return self._log.is_last_epoch(epoch)

    async def announce(self, published: PublishedWeights) -> Verdict:
        """See `VersionLog.announce`; wakes those who wait."""
        self._note_call()
        verdict = self._log.announce(published)
        async with self._changed:
            self._changed.notify_all()
        return verdict

    async def latest(self) -> PublishedWeights | None:
        """See `VersionLog.latest`."""
        self._note_call()
        return self._log.latest()

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

    async def report_lost(self, key: str) -> None:
        """See `VersionLog.report_lost`."""
        self._note_call()
        self._log.report_lost(key)

    async def stats(self) -> dict[str, int]:
        """See `VersionLog.stats`; `pid` is this process's."""
        self._note_call()
        return {**self._log.stats(), "pid": os.getpid()}


class CoordinatorClient:
    """The coordinator called `name`, made if there is none, from any process of the cluster.

    Calls have a timeout and are repeated while the actor is restarted.

    keep: versions held in the object store, by whoever comes first.
    call_timeout_seconds: of one attempt, beyond what the call itself waits for; the first waits for
        a process to start. A restart is waited for by Ray itself, however short this is.
    restarts_hung: kills a coordinator that gives a call no answer three times, for Ray to start it
        again. For the publisher, who tells the new one all it needs.
    idle_seconds: after which without a call it ends, by whoever comes first.
    get, sleep, uniform: what stands for `ray.get`, `time.sleep` and `random.uniform`.
    """

    def __init__(
        self,
        name: str,
        *,
        keep: int = 2,
        call_timeout_seconds: float = 60.0,
        restarts_hung: bool = False,
        idle_seconds: float = IDLE_SECONDS,
        get: Callable[..., Any] = ray.get,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ):
        self.name = name
        self._keep, self._idle_seconds = keep, idle_seconds
        self._call_timeout_seconds = call_timeout_seconds
        self._restarts_hung = restarts_hung
        self._get, self._sleep, self._uniform = get, sleep, uniform
        self.failures: Counter[str] = Counter()  # by the error's name
        self._actor = self._connect()

    def _connect(self) -> Any:
        return (
            ray.remote(WeightsCoordinator)
            .options(
                name=self.name,
                namespace=NAMESPACE,
                get_if_exists=True,
                # Receivers may outlast the run that made it, and wait for the next: it must not go
                # with a trial's placement group.
                lifetime="detached",
                scheduling_strategy="DEFAULT",
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=MAX_CONCURRENT_CALLS,
            )
            .remote(self._keep, self._idle_seconds)
        )

    def begin_epoch(self) -> int:
        """See `VersionLog.begin_epoch`."""
        return self._call("begin_epoch")

    def announce(self, published: PublishedWeights) -> Verdict:
        """Tells of a publication; may be said again at any time."""
        return self._call("announce", published)

    def latest(self) -> PublishedWeights | None:
        """The newest weights that can be had."""
        return self._call("latest")

    def wait_for(
        self,
        min_version: int = 0,
        timeout: float = 60.0,
        *,
        after: tuple[int, int] | None = None,
    ) -> PublishedWeights | None:
        """The newest weights once their version is at least `min_version` and they come after the
        (epoch, version) `after`; None after `timeout` seconds without."""
        return self._call("wait_for", min_version, timeout, after, waits=timeout)

    def report_lost(self, key: str) -> None:
        """Says that the bytes of a publication could not be had."""
        self._call("report_lost", key)

    def stats(self) -> dict[str, int]:
        """Kept versions, their bytes, how many of them are lost, and the actor's process id."""
        return self._call("stats")

    def end_epoch(self, epoch: int) -> None:
        """Ends the coordinator, unless a publisher has begun a later epoch. Receivers that wait
        for the next run make a new one. Tried once: one that is away ends itself (`idle_seconds`).
        """
        if not ray.is_initialized():  # and with Ray the coordinator has gone
            return
        try:
            ref = self._actor.is_last_epoch.remote(epoch)
            if self._get(ref, timeout=SECONDS_TO_END):
                self.close()
        except (RayActorError, GetTimeoutError, RaySystemError) as error:
            self.failures[type(error).__name__] += 1

    def close(self) -> None:
        """Ends the coordinator for everybody; the bytes it held leave the store."""
        ray.kill(self._actor, no_restart=True)

    def _call(self, method: str, *arguments: Any, waits: float = 0.0) -> Any:
        num_timeouts = 0
        for attempt in range(MAX_ATTEMPTS):
            try:
                ref = getattr(self._actor, method).remote(*arguments)
                return self._get(ref, timeout=waits + self._call_timeout_seconds)
            except (RayActorError, GetTimeoutError, RaySystemError) as error:
                self.failures[type(error).__name__] += 1
                if attempt + 1 == MAX_ATTEMPTS:
                    raise
                if isinstance(error, GetTimeoutError):
                    num_timeouts += 1
                    if self._restarts_hung and num_timeouts == TIMEOUTS_OF_HUNG:
                        ray.kill(self._actor, no_restart=False)
                self._sleep(backoff_seconds(attempt, self._uniform))
                if isinstance(error, ActorDiedError):  # for good: somebody closed it
                    self._actor = self._connect()
        raise AssertionError("unreachable")
