"""A sampler's turns where its rows stream: calls to the ledger are under way while it samples."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from ray.exceptions import RayError

from rllib_llm.listening import Listener
from rllib_llm.rollouts.failure import SampleFailure
from rllib_llm.rollouts.sampler import Sampler
from rllib_llm.rollouts.streaming.client import SamplerLedger
from rllib_llm.rollouts.streaming.entry import Lease
from rllib_llm.rollouts.streaming.rows import RowStream
from rllib_llm.rollouts.streaming.serving import GroupJudge, ServingSettings

WAIT_SECONDS = 2.0  # for work, where there is none
SECONDS_BETWEEN_RENEWALS = 0.2  # which bring news of weights


class RowWork:
    """Takes leases as it has room, samples a token for all rows, hands in what became whole.

    Args:
        ledger: to lease from.
        sampler: its environment, policy and weights.
        settings: of the stream.
    """

    def __init__(self, ledger: SamplerLedger, sampler: Sampler, settings: ServingSettings) -> None:
        self._ledger, self._sampler, self._settings = ledger, sampler, settings
        self._judge = GroupJudge(settings)
        self._listener = Listener(sampler.name)
        self._rows = self._begin()
        self._asked: Future[Any] | None = None  # for leases
        self._renewing: Future[Any] | None = None
        self._renewed = 0.0
        self._new: set[int] = set()  # leases that the renewal under way may not know of
        self._pushed: list[tuple[int, Future[int]]] = []  # of leases, not answered yet

    def _begin(self) -> RowStream:
        settings = self._settings
        return RowStream(
            self._sampler, settings.num_completions, in_flight=settings.in_flight,
            masks_stale_prefix=settings.masks_stale_prefix,
        )  # fmt: skip

    def listening(self) -> AbstractContextManager[Any]:
        """Within it, what is said while rows are sampled goes with their groups."""
        return self._listener

    def turn(self) -> None:
        """One step, and a look at what the ledger answered."""
        self._take_leases()
        if not self._rows.num_groups:
            return
        try:
            for lease, batch in self._rows.step():
                batch.messages = self._listener.take()
                groups = self._judge.groups(batch, continues=True)
                self._pushed.append((lease.id, self._ledger.push(lease.id, groups)))
            self._renew()
        except RayError:
            raise  # the ledger's
        except Exception as error:  # noqa: BLE001  (the border of the process)
            self._fail(error)
        self._forget_answered()

    def _forget_answered(self) -> None:
        """Of what was handed in, what the ledger has."""
        self._pushed = [(lease, call) for lease, call in self._pushed if not call.done()]

    def _holding(self) -> set[int]:
        return self._rows.leases | {lease for lease, _ in self._pushed}

    def _take_leases(self) -> None:
        room = self._settings.max_groups - self._rows.num_groups
        if self._asked is None and room > 0:
            self._asked = self._ledger.lease(room, self._holding(), WAIT_SECONDS)
        if self._asked is None or (self._rows.num_groups and not self._asked.done()):
            return
        leases, self._asked = self._asked.result(), None
        for lease in leases:
            self._begin_with(lease)

    def _begin_with(self, lease: Lease) -> None:
        try:
            self._rows.load(lease.weights)
            self._rows.add(lease)
            self._new.add(lease.id)
        except Exception as error:  # noqa: BLE001  (the border of the process)
            self._ledger.fail(lease.id, SampleFailure.from_exception(error)).result()
            self._fail(error)

    def _renew(self) -> None:
        now = time.monotonic()
        if self._renewing is None and now - self._renewed >= SECONDS_BETWEEN_RENEWALS:
            self._renewing, self._renewed = self._ledger.renew(self._holding()), now
        if self._renewing is None or not self._renewing.done():
            return
        (held, newest), self._renewing = self._renewing.result(), None
        unknown = {lease for lease, _ in self._pushed}
        for lease in self._rows.leases - set(held) - unknown - self._new:
            self._rows.drop(lease)
        self._new.clear()
        if newest is not None and self._rows.is_news(newest):
            for lease, partial in self._rows.partial().items():
                self._ledger.keep_partial(lease, partial)
            self._rows.load(newest)

    def _fail(self, error: Exception) -> None:
        """All that is in the engine is given back: what it holds is not to be trusted."""
        failure = SampleFailure.from_exception(error)
        for lease in self._rows.leases:
            self._ledger.fail(lease, failure).result()
        self._rows.close()
        self._rows = self._begin()

    def close(self) -> None:
        """Frees the engine."""
        self._rows.close()
