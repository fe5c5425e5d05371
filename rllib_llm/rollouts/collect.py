"""One batch of completions from whatever samplers are alive, each prompt answered exactly once."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ray.exceptions import RayError, RayTaskError

from rllib_llm.rollouts.errors import (
    BrokenSamplerError,
    NoSamplersError,
    NoServerError,
    PublishedWeightsLostError,
    SamplingError,
)
from rllib_llm.rollouts.failure import SampleFailure
from rllib_llm.rollouts.request import JudgedBatch, SampleRequest, concatenate
from rllib_llm.rollouts.sampler import SamplesAndJudges
from rllib_llm.rollouts.sampler_pool import SamplerPool
from rllib_llm.shared.openai_client import ServerError
from rllib_llm.shared.process import StarvedProcesses, TimeLimit
from rllib_llm.weights.published import PublishedWeights

logger = logging.getLogger(__name__)

MAX_LOSSES_PER_SAMPLER = 3  # in a row, without an answer of anyone in between
MAX_FAILURES = 3  # of one part, where an exception may pass by itself
LOOK_FROM = 0.5  # of its limit: from then on it is looked at why a sampler is silent
POLL_SECONDS = 0.2  # between looks at who died; answers of all are seen at once


@dataclass
class Part:
    """Prompts `start .. start + num_prompts - 1` of a request; a sampler answers it as a whole."""

    start: int
    num_prompts: int
    num_hung: int = 0  # times that it was taken from a silent sampler
    num_failed: int = 0  # times that it was answered by an exception


@dataclass
class Flight:
    """A part on its way; None: an answer that nobody wants any more, of a request that failed."""

    part: Part | None
    call: Any  # the reference that becomes the answer
    sent: float  # monotonic seconds; later by the time in which the sampler had no core
    limit: float | None  # seconds
    starved: StarvedProcesses | None = None  # once it is silent for long


class LocalSampler(SamplesAndJudges, Protocol):
    """The sampler in this process."""

    def serve(
        self, request: SampleRequest, published: PublishedWeights
    ) -> JudgedBatch | SampleFailure:
        """The judged completions; an exception passes through."""


class Collector:
    """Has requests answered by a pool of samplers, of which any may die or hang at any moment.

    A sampler has no state: a part that one did not answer is given to the next that is idle, and
    the completions are the same.

    Args:
        pool: the remote samplers.
        local: the sampler of this process, which serves where the pool is empty.
        timeout_s: of an answer, see `TimeLimit`.
        tell: called with the prompts of a request that were answered so far, as they come.
    """

    def __init__(
        self,
        pool: SamplerPool,
        *,
        local: LocalSampler | None = None,
        timeout_s: float | str | None = "auto",
        tell: Callable[[int], None] = lambda num_prompts: None,
    ):
        self.pool = pool
        self.tell = tell
        self.local = local
        self.limit = TimeLimit(timeout_s)
        self.flights: dict[int, Flight] = {}  # by worker
        self.nodes: dict[int, str] = {}  # by worker, as its last answer said

    def collect(self, request: SampleRequest, published: PublishedWeights) -> JudgedBatch:
        """The judged completions of `request`, ordered by position, whoever made them.

        Raises:
            PublishedWeightsLostError: the published weights are gone.
            BrokenSamplerError: a sampler reported an exception.
            SamplingError: it did so thrice, where that may pass by itself; or all died several
                times in a row.
            NoSamplersError: all are gone, and none came back in the time that a start may take.
            NoServerError: they generate with a server, and that gave no answer.
        """
        if self.pool.num_samplers:
            return _Collection(self, request, published).run()
        assert self.local is not None, "a group without remote samplers has a local one"
        try:
            answer = self.local.serve(request, published)
        except ServerError as error:
            raise NoServerError(str(error)) from error
        assert isinstance(answer, JudgedBatch), "the local sampler raises its exceptions"
        return answer


class _Collection:
    """One request being answered."""

    def __init__(self, collector: Collector, request: SampleRequest, published: PublishedWeights):
        self.collector = collector
        self.pool, self.actors = collector.pool, collector.pool.actors
        self.flights = collector.flights
        self.request = request
        self.waiting = deal(request.num_prompts, self.pool.num_parts)
        # Where they are on several nodes, these pull the weights in turns.
        asked = self.actors.healthy()[: len(self.waiting)]
        nodes = dict.fromkeys(collector.nodes.get(worker, "") for worker in asked)
        self.published = dataclasses.replace(published, nodes=tuple(filter(None, nodes)))
        self.done: dict[int, JudgedBatch] = {}  # by start of their part
        self.spent: dict[int, Counter[str]] = {}  # seconds by worker, of all parts that it did
        self.num_losses = 0  # since the last answer
        self.first_failure: SampleFailure | None = None
        self.someone_seen = time.monotonic()

    def run(self) -> JudgedBatch:
        try:
            while self.waiting or any(flight.part is not None for flight in self.flights.values()):
                self._send()
                self._receive()
                self._take_from_the_dead()
                self._take_from_the_silent()
                self._require_progress()
        finally:
            # After an error samplers may be at work for nobody; the next request waits for them
            # only where no other is idle.
            for flight in self.flights.values():
                flight.part = None
        batch = concatenate([self.done[start] for start in sorted(self.done)])
        # They work at the same time: who spent most was waited for.
        names = {name for spent in self.spent.values() for name in spent}
        timings = {name: max(float(spent[name]) for spent in self.spent.values()) for name in names}
        return dataclasses.replace(batch, timings=timings)

    def _send(self) -> None:
        if not self.waiting:
            return
        idle = [worker for worker in self.pool.healthy() if worker not in self.flights]
        for worker in idle[: len(self.waiting)]:
            part = self.waiting.pop(0)
            limit = self.collector.limit.seconds(part.num_prompts)
            request = self.request.part(part.start, part.num_prompts)
            call = self.actors.call(worker, "serve", request, self.published)
            # It may be the part that is slow, not the sampler.
            limit = limit and limit * 2**part.num_hung
            self.flights[worker] = Flight(part, call, time.monotonic(), limit)

    def _receive(self) -> None:
        if not self.flights:
            time.sleep(POLL_SECONDS)
            return
        workers = {flight.call: worker for worker, flight in self.flights.items()}
        for call in self.actors.ready(list(workers), POLL_SECONDS):
            worker = workers[call]
            flight = self.flights.pop(worker)
            try:
                answer = self.actors.answer(call)
            except RayTaskError as error:  # it is alive: what it answered cannot be sent, say
                answer = SampleFailure.from_exception(error)
            except RayError as error:
                self.actors.mark(worker, healthy=False)
                self._lose(worker, flight, f": {error}")
                continue
            self._take(worker, flight, answer)

    def _take(self, worker: int, flight: Flight, answer: JudgedBatch | SampleFailure) -> None:
        if flight.part is None:
            return
        seconds = time.monotonic() - flight.sent
        if isinstance(answer, SampleFailure):
            self._fail(flight.part, answer, seconds)
            return
        self.collector.nodes[worker] = answer.node
        self.collector.limit.record(seconds, flight.part.num_prompts)
        self.done[flight.part.start] = answer
        self.spent.setdefault(worker, Counter()).update(answer.timings)
        self.num_losses = 0
        if self.waiting or self.flights:
            self.collector.tell(self.request.num_prompts - self._num_missing())

    def _num_missing(self) -> int:
        parts = [*self.waiting, *(flight.part for flight in self.flights.values())]
        return sum(part.num_prompts for part in parts if part is not None)

    def _fail(self, part: Part, failure: SampleFailure, seconds: float) -> None:
        self.first_failure = self.first_failure or failure
        if failure.weights_lost:
            raise PublishedWeightsLostError(failure.error)
        if failure.no_server:
            raise NoServerError(failure.error)
        part.num_failed += 1
        if not failure.may_pass or part.num_failed >= MAX_FAILURES:
            first = self.first_failure
            kind = SamplingError if failure.may_pass else BrokenSamplerError
            raise kind(f"{first.error}\n\nIn the sampler:\n{first.traceback}")
        logger.warning("A sampler failed and is asked again: %s", failure.error)
        self._give_back(part, seconds)

    def _take_from_the_dead(self) -> None:
        healthy = set(self.actors.healthy())
        for worker in [worker for worker in self.flights if worker not in healthy]:
            self._lose(worker, self.flights.pop(worker))

    def _lose(self, worker: int, flight: Flight, reason: str = "") -> None:
        """Of a sampler that died."""
        logger.warning("Sampler %d died; its prompts are sampled again%s", worker, reason)
        if flight.part is not None:
            self._give_back(flight.part, time.monotonic() - flight.sent)
            self.num_losses += 1

    def _take_from_the_silent(self) -> None:
        now = time.monotonic()
        for worker, flight in list(self.flights.items()):
            if flight.limit is None or not self._is_silent(worker, flight, now, flight.limit):
                continue
            del self.flights[worker]
            self.pool.replace(
                worker,
                f"it gave no answer in {flight.limit:.0f} s in which it had cores to work on "
                f"(sampler_timeout_s={self.collector.limit.setting!r}; slowest answer so far "
                f"{self.collector.limit.slowest:.1f} s)",
            )
            if flight.part is not None:
                flight.part.num_hung += 1
                self._give_back(flight.part, now - flight.sent)
                self.num_losses += 1

    def _is_silent(self, worker: int, flight: Flight, now: float, limit: float) -> bool:
        """Whether a sampler gave no answer in `limit` seconds in which it could have worked: one
        that other processes leave no core to is not hung."""
        if now - flight.sent <= LOOK_FROM * limit:
            return False
        if flight.starved is None:
            flight.starved = StarvedProcesses(self.actors.processes(worker), time.monotonic)
        flight.sent += flight.starved.take()
        return now - flight.sent > limit

    def _give_back(self, part: Part, seconds: float) -> None:
        self.waiting.append(part)
        self.pool.faults.requests_retried += 1
        self.pool.faults.seconds_lost += seconds

    def _require_progress(self) -> None:
        pool, now = self.pool, time.monotonic()
        if self.flights or pool.healthy():
            self.someone_seen = now
        advice = (
            "Look for the reason in the workers' logs (out of memory is common), and raise "
            "max_num_env_runner_restarts or sampler_timeout_s."
        )
        have = f"num_healthy_samplers={len(self.actors.healthy())} must be at least 1"
        if self.num_losses >= MAX_LOSSES_PER_SAMPLER * pool.num_samplers:
            raise SamplingError(
                f"{have}: all that were asked died or hung, {self.num_losses} times in a row. "
                f"{advice}\n{pool.last_words()}"
            )
        if now - self.someone_seen > pool.start_limit:
            raise NoSamplersError(
                f"{have}: none came back in {pool.start_limit:.0f} s. {advice}\n{pool.last_words()}"
            )


def deal(num_prompts: int, num_samplers: int) -> list[Part]:
    """The prompts of a request cut as evenly as it goes, one part for each sampler there should be.

    Also while some are dead, and the parts stay as they are: round-off in the log-probs depends on
    what is computed together, and nothing that is learnt shall depend on who died.
    """
    num_parts = min(num_samplers, num_prompts)
    bounds = [num_prompts * i // num_parts for i in range(num_parts + 1)]
    return [Part(low, high - low) for low, high in zip(bounds, bounds[1:], strict=False)]
