"""A ledger in an actor: samplers that ask for work and the driver wait for it there."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_llm.rollouts.streaming.entry import Answer, Lease
from rllib_llm.rollouts.streaming.journal import JournaledLedger
from rllib_llm.rollouts.streaming.rules import StreamRules

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
        """Nobody is given work any more; those who wait are told so."""
        self._is_closed = True
        while self._idle:
            self._answer(self._idle.popleft(), [])

    async def call(self, name: str, *args: Any) -> Any:
        """One of `journal.CALLS`; wakes those who wait for what it changed."""
        answer = self._journaled.call(name, *args)
        if name in _WAKE:
            self._changed.set()
            self._serve()
        return answer

    async def take(self, step: int, num_seen: int, nth: int, wait_s: float) -> Answer:
        """See `LedgerCalls`."""
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
        answer = self._journaled.call("take", step, num_seen, nth)
        self._serve()  # what a lease held that has ended
        return answer

    async def lease(
        self, sampler: str, num_groups: int, holding: Sequence[int], wait_s: float
    ) -> list[Lease]:
        """See `Ledger.lease`; waits for work, for `wait_s` at most."""
        ledger = self._journaled.ledger
        for idle in [each for each in self._idle if each.sampler == sampler]:  # of one that died
            self._idle.remove(idle)
            self._answer(idle, [])
        if self._is_closed:
            return []
        if ledger.holds_more(sampler, holding):  # it was started again
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
        return self._journaled.ledger.state()

    async def look(self) -> dict[str, Any]:
        """See `LedgerCalls`."""
        cpu_seconds, pid = time.process_time(), os.getpid()
        return looked(self._journaled) | {"cpu_seconds": cpu_seconds, "pid": pid}


async def _wait(future: asyncio.Future, seconds: float) -> bool:
    """Whether the future is done in time; else it is cancelled."""
    await asyncio.wait([future], timeout=seconds)
    return future.done() or not future.cancel()


def looked(journaled: JournaledLedger) -> dict[str, Any]:
    """See `LedgerCalls.look`, without what is of the ledger's process."""
    ledger = journaled.ledger
    return {
        "metrics": ledger.metrics(),
        "position": ledger.table.position,
        "waits_for": ledger.waits_for(),
        "num_old": ledger.num_old,
    }
