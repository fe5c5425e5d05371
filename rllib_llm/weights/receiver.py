"""The receiving end: whichever way weights come, fetched, opened, loaded and counted.

    where from ── latest() ──▶ ticket ── transport ──▶ flat buffer ── load ──▶ the model

A sampler is told by each request which weights to use (`ensure`); who follows a run asks its
coordinator (`follower.py`).
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RaySystemError

from rllib_llm.shared.elsewhere import backoff_seconds
from rllib_llm.weights.flat_buffer import ChecksumError, FlatBuffer, TicketError, verify
from rllib_llm.weights.published import PublishedWeights, WeightsLostError
from rllib_llm.weights.transport import Transports

# --- Nodes that want the same weights take turns: each that has them gives them to one more

POLL_SECONDS = 0.01
MAX_WAIT_SECONDS = 5.0  # a node before this one may have died


def may_pull(node: str, nodes: Sequence[str], holders: Collection[str]) -> bool:
    """Whether it is the turn of `node` among `nodes`, in order, while `holders` have whole copies.
    Nodes not in `nodes` need not wait."""
    lacking = [other for other in nodes if other not in holders]
    return node not in lacking or lacking.index(node) < max(1, len(holders))


def nodes_with_a_copy(ref: ray.ObjectRef) -> list[str]:
    """Ids of the nodes whose object store holds the whole object.

    Raises:
        GetTimeoutError: the owner of the object does not answer.
    """
    timeout_ms = int(1000 * MAX_WAIT_SECONDS)
    return ray.experimental.get_object_locations([ref], timeout_ms)[ref]["node_ids"]


def wait_for_turn(
    published: PublishedWeights,
    *,
    node: str,
    holders: Callable[[ray.ObjectRef], Collection[str]] = nodes_with_a_copy,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns when this node may pull, at the latest after `MAX_WAIT_SECONDS`."""
    deadline = clock() + MAX_WAIT_SECONDS
    while clock() < deadline and not may_pull(node, published.nodes, holders(published.ref[0])):
        sleep(POLL_SECONDS)


# --- One transfer to a receiver: always with a timeout, tried again when it fails

# What passes: a node or an owner went, the store was full or slow, bytes were damaged on the way.
# ObjectLostError is also the base of OwnerDiedError, ObjectFetchTimedOutError and their kind.
LOST_ERRORS = (ObjectLostError, ChecksumError)
PASSING_ERRORS = (*LOST_ERRORS, GetTimeoutError, RayActorError, RaySystemError)


def failure_metrics(failures: Counter[str]) -> dict[str, float]:
    """`failures/<kind>`; the usual kinds are always present, so that every result has the same
    columns."""
    counts = {kind.__name__: 0 for kind in PASSING_ERRORS} | dict(failures)
    return {f"failures/{kind}": float(count) for kind, count in counts.items()}


def wait_among_nodes(published: PublishedWeights) -> None:
    """Returns when the node of this process may pull."""
    wait_for_turn(published, node=ray.get_runtime_context().get_node_id())


class Transfer:
    """Fetches published weights and records the cost.

    get: `ray.get` or what stands for it. sleep, uniform, wait_for_turn: likewise.
    timeout_seconds: of one attempt; a transfer slower than that counts as failed.
    max_attempts: after so many failures the weights count as lost.
    """

    def __init__(
        self,
        *,
        get: Callable[..., Any] = ray.get,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
        wait_for_turn: Callable[[PublishedWeights], None] = wait_among_nodes,
        timeout_seconds: float = 60.0,
        max_attempts: int = 5,
    ):
        self._get, self._sleep, self._uniform = get, sleep, uniform
        self._wait_for_turn = wait_for_turn
        self._timeout_seconds, self._max_attempts = timeout_seconds, max_attempts
        self.failures: Counter[str] = Counter()  # by the error's name, over all transfers
        self.seconds = 0.0  # of the last transfer, its failed attempts included

    def fetch(
        self,
        latest: Callable[[], PublishedWeights],
        report: Callable[[PublishedWeights], None] = lambda published: None,
        *,
        open_ticket: Callable[[Any], FlatBuffer] = lambda ticket: ticket,
    ) -> tuple[PublishedWeights, FlatBuffer]:
        """Fetches the weights that `latest` returns, calling it again at each attempt, and verifies
        checksums. `report` receives weights whose bytes are lost or damaged; `open_ticket` reads
        the object from the store.

        Raises:
            WeightsLostError: every attempt failed, or the ticket cannot be opened by this process.
        """
        start = time.perf_counter()
        for attempt in range(self._max_attempts):
            published = latest()
            try:
                if len(published.nodes) > 1:
                    self._wait_for_turn(published)
                flat = open_ticket(self.get(published.ref[0]))
                verify(flat)
            except TicketError as error:
                raise self.unreadable(published, error) from error
            except PASSING_ERRORS as error:
                self.failures[type(error).__name__] += 1
                if isinstance(error, LOST_ERRORS):
                    report(published)
                last = error
                if attempt + 1 < self._max_attempts:
                    self._sleep(backoff_seconds(attempt, self._uniform))
            else:
                self.seconds = time.perf_counter() - start
                return published, flat
        raise WeightsLostError(
            f"weights_version={published.version} must be in the object store: {self._max_attempts}"
            f" attempts failed, the last with {type(last).__name__}: {last}. Publish again."
        ) from last

    def get(self, ref: ray.ObjectRef) -> Any:
        """The object, if it arrives within the timeout of one attempt."""
        return self._get(ref, timeout=self._timeout_seconds)

    def unreadable(self, published: PublishedWeights, error: TicketError) -> WeightsLostError:
        """The error for bytes that this process can never read, so that retrying is pointless."""
        self.failures[type(error).__name__] += 1
        return WeightsLostError(
            f"weights_version={published.version} must be readable where they were left: {error}. "
            "Publish again, through the object store."
        )


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
        """The version in use; -1 without one."""
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
