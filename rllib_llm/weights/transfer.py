"""One transfer to a receiver: always with a timeout, tried again when it fails."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RaySystemError

from rllib_llm.weights.backoff import backoff_seconds
from rllib_llm.weights.flat_buffer import ChecksumError, FlatBuffer, verify
from rllib_llm.weights.published import PublishedWeights, WeightsLostError
from rllib_llm.weights.transport import TicketError
from rllib_llm.weights.waves import wait_for_turn

# What passes: a node or an owner went, the store was full or slow, bytes were damaged on the way.
# ObjectLostError is also the base of OwnerDiedError, ObjectFetchTimedOutError and their kind.
LOST_ERRORS = (ObjectLostError, ChecksumError)
PASSING_ERRORS = (*LOST_ERRORS, GetTimeoutError, RayActorError, RaySystemError)


def failure_metrics(failures: Counter[str]) -> dict[str, float]:
    """`failures/<kind>`; the usual kinds are named before they happen, so that every result has
    the same columns."""
    counts = {kind.__name__: 0 for kind in PASSING_ERRORS} | dict(failures)
    return {f"failures/{kind}": float(count) for kind, count in counts.items()}


def wait_among_nodes(published: PublishedWeights) -> None:
    """Returns when the node of this process may pull."""
    wait_for_turn(published, node=ray.get_runtime_context().get_node_id())


class Transfer:
    """Gets published weights, and counts what it took.

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
        """The weights that `latest` names, asked again at each attempt, and their bytes, checked
        where they carry a checksum. `report` is told of weights whose bytes are gone or damaged;
        `open_ticket` makes the bytes of what lies in the store.

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
        """The object, if it comes within the timeout of one attempt."""
        return self._get(ref, timeout=self._timeout_seconds)

    def unreadable(self, published: PublishedWeights, error: TicketError) -> WeightsLostError:
        """What is raised where these bytes will never be read here: trying again is of no use."""
        self.failures[type(error).__name__] += 1
        return WeightsLostError(
            f"weights_version={published.version} must be readable where they were left: {error}. "
            "Publish again, through the object store."
        )
