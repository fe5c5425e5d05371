"""The receiving end: whichever way weights come, fetched, opened, loaded and counted.

    where from ── latest() ──▶ ticket ── transport ──▶ flat buffer ── load ──▶ the model

A sampler is told by each request which weights to use (`ensure`); who follows a run asks its
coordinator (`follower.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from rllib_llm.weights.by_name import Transports
from rllib_llm.weights.flat_buffer import FlatBuffer
from rllib_llm.weights.published import PublishedWeights, WeightsLostError
from rllib_llm.weights.transfer import Transfer, failure_metrics
from rllib_llm.weights.transport import TicketError


class WeightsReceiver:
    """Keeps one model at published weights.

    `in_use`: what the model holds whole; None before the first, and after a load that failed
    midway: it may then hold parts of two versions.
    """

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer or Transfer()
        self._transports = Transports(self._transfer.get)
        self.in_use: PublishedWeights | None = None
        self.load_seconds = 0.0  # of the last load
        self.num_skipped = 0  # versions passed over
        self._num_bytes = 0

    @property
    def version(self) -> int:
        """Of the weights in use; -1 where there are none."""
        return -1 if self.in_use is None else self.in_use.version

    @property
    def failures(self) -> Counter[str]:
        """Transfers that failed so far, by the error's name."""
        return self._transfer.failures

    def ensure(self, published: PublishedWeights, load: Callable[[FlatBuffer], None]) -> None:
        """Calls `load` with the published weights unless they are the ones in use.

        A lower version than the one in use is loaded too: a restored run goes back.

        Raises:
            WeightsLostError: they are not where they were put any more, or cannot be read here.
        """
        if self.in_use is not None and published.key == self.in_use.key:
            return
        if not published.ref:  # sampler and learner share the module
            self._use(published, before=self.in_use)
            return
        with ExitStack() as opened:
            _, flat = opened.enter_context(self.open(lambda: published))

            def load_all() -> None:
                load(flat)
                opened.close()  # raises where memory of a device was written over meanwhile

            self.replace(published, flat.num_bytes, load_all)

    def replace(
        self, published: PublishedWeights, num_bytes: int, load: Callable[[], None]
    ) -> None:
        """Calls `load`, which gives the model these weights; until it has done so none count as in
        use: the model may hold parts of two versions."""
        before, self.in_use = self.in_use, None
        start = time.perf_counter()
        load()
        self.load_seconds, self._num_bytes = time.perf_counter() - start, num_bytes
        self._use(published, before)

    def _use(self, published: PublishedWeights, before: PublishedWeights | None) -> None:
        if before is not None and before.epoch == published.epoch:
            self.num_skipped += max(0, published.version - before.version - 1)
        self.in_use = published

    @contextmanager
    def open(
        self,
        latest: Callable[[], PublishedWeights],
        report: Callable[[PublishedWeights], None] = lambda published: None,
    ) -> Iterator[tuple[PublishedWeights, FlatBuffer]]:
        """Weights and their bytes, which are to be read within the block.

        latest: where tickets come from, see `Transfer.fetch`, as is `report`.

        Raises:
            WeightsLostError: they are not where they were put, or cannot be read here; or, at the
                end of the block, they have changed while they were read.
        """
        with ExitStack() as opened:
            published, flat = self._transfer.fetch(
                latest,
                report,
                open_ticket=lambda ticket: opened.enter_context(
                    self._transports[ticket.transport].open(ticket)
                ),
            )
            yield published, flat
            try:
                opened.close()
            except TicketError as error:
                raise self._transfer.unreadable(published, error) from error

    def published_bytes(self) -> FlatBuffer:
        """The weights in use as they were published, on a device a copy of them.

        Raises:
            WeightsLostError: there are none, or they are not there any more.
        """
        in_use = self.in_use
        if in_use is None:
            raise WeightsLostError("no published weights are in use yet: none were loaded")
        with self.open(lambda: in_use) as (_, flat):
            if isinstance(flat.data, np.ndarray):
                return flat
            return dataclasses.replace(flat, data=torch.clone(flat.data))

    def metrics(self) -> dict[str, float]:
        """Bytes and seconds of the last transfer and load, age of the weights in use in seconds;
        versions passed over (`skips`) and failed transfers by kind so far."""
        seconds = self._transfer.seconds + self.load_seconds
        return {
            "bytes": float(self._num_bytes),
            "transfer_seconds": self._transfer.seconds,
            "load_seconds": self.load_seconds,
            "gb_per_s": self._num_bytes / 1e9 / seconds if seconds else 0.0,
            "age_seconds": 0.0 if self.in_use is None else self.in_use.age_seconds,
            "skips": float(self.num_skipped),
            **failure_metrics(self._transfer.failures),
        }
