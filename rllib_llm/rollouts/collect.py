"""One batch of completions from whatever samplers are alive, each prompt answered exactly once."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass

from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_llm.openai_client import ServerError
from rllib_llm.rollouts.errors import (
    BrokenSamplerError,
    NoSamplersError,
    NoServerError,
    PublishedWeightsLostError,
    SamplingError,
)
from rllib_llm.rollouts.faults import Faults
from rllib_llm.rollouts.request import JudgedBatch, SampleFailure, SampleRequest, concatenate
from rllib_llm.rollouts.samplers import Samplers
from rllib_llm.time_limit import TimeLimit
from rllib_llm.weights.broadcast import PublishedWeights

logger = logging.getLogger(__name__)

MAX_LOSSES_PER_SAMPLER = 3  # in a row, without an answer of anyone in between
MAX_FAILURES = 3  # of one part, where an exception may pass by itself
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
    """A part on its way."""

    part: Part
    sent: float  # monotonic seconds
    limit: float | None  # seconds


class Collector:
    """Has requests answered by a group of samplers, of which any may die or hang at any moment.

    A sampler has no state: a part that one did not answer is given to the next that is idle, and
    the completions are the same.
    """

    def __init__(
        self,
        group: EnvRunnerGroup,
        *,
        timeout_s: float | str | None = "auto",
        faults: Faults | None = None,
        start_seconds: float = 0.0,
    ):
        self.group = group
        self.faults = Faults() if faults is None else faults
        self.samplers = Samplers(group, self.faults, start_seconds)
        self.limit = TimeLimit(timeout_s)
        self.nodes: dict[int, str] = {}  # by worker, as its last answer said
        self._num_requests = 0

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
        if self.group.num_remote_env_runners() == 0:
            try:
                return self.group.local_env_runner.serve(request, published)
            except ServerError as error:
                raise NoServerError(str(error)) from error
        self._num_requests += 1
        return _Collection(self, request, published, f"serve {self._num_requests}").run()


class _Collection:
    """One request being answered."""

    def __init__(
        self, collector: Collector, request: SampleRequest, published: PublishedWeights, tag: str
    ):
        self.collector = collector
        self.group, self.faults = collector.group, collector.faults
        self.request, self.tag = request, tag
        # Pulled by one node after the other where there are several.
        self.waiting = deal(request.num_prompts, self.group.num_remote_env_runners())
        # Where they are on several nodes, these pull the weights in turns.
        asked = self.group.healthy_worker_ids()[: len(self.waiting)]
        nodes = dict.fromkeys(collector.nodes.get(worker, "") for worker in asked)
        self.published = dataclasses.replace(published, nodes=tuple(filter(None, nodes)))
        self.flights: dict[int, Flight] = {}  # by worker
        self.done: dict[int, JudgedBatch] = {}  # by start of their part
        self.num_losses = 0  # since the last answer
        self.first_failure: SampleFailure | None = None
        self.someone_seen = time.monotonic()

    def run(self) -> JudgedBatch:
        while self.waiting or self.flights:
            self._send()
            self._receive()
            self._take_from_the_dead()
            self._take_from_the_silent()
            self._require_progress()
        return concatenate([self.done[start] for start in sorted(self.done)])

    def _send(self) -> None:
        if not self.waiting:
            return
        idle = [w for w in self.collector.samplers.healthy() if w not in self.flights]
        now = time.monotonic()
        for worker in idle[: len(self.waiting)]:
            part = self.waiting.pop(0)
            limit = self.collector.limit.seconds(part.num_prompts)
            # It may be the part that is slow, not the sampler.
            self.flights[worker] = Flight(part, now, limit and limit * 2**part.num_hung)
            self.group.foreach_env_runner_async(
                serve_part,
                tag=self.tag,
                kwargs={
                    "start": part.start,
                    "part": self.request.part(part.start, part.num_prompts),
                    "published": self.published,
                },
                healthy_only=False,
                remote_worker_ids=[worker],
            )

    def _receive(self) -> None:
        if not self.flights:
            time.sleep(POLL_SECONDS)
            return
        for worker, answer in self.group.fetch_ready_async_reqs(
            tags=self.tag, timeout_seconds=POLL_SECONDS
        ):
            flight = self.flights.pop(worker)
            seconds = time.monotonic() - flight.sent
            if isinstance(answer, SampleFailure):
                self._fail(flight, answer, seconds)
                continue
            self.collector.nodes[worker] = answer.node
            self.collector.limit.record(seconds, flight.part.num_prompts)
            self.done[flight.part.start] = answer
            self.num_losses = 0

    def _fail(self, flight: Flight, failure: SampleFailure, seconds: float) -> None:
        self.first_failure = self.first_failure or failure
        if failure.weights_lost:
            raise PublishedWeightsLostError(failure.error)
        if failure.no_server:
            raise NoServerError(failure.error)
        flight.part.num_failed += 1
        if not failure.may_pass or flight.part.num_failed >= MAX_FAILURES:
            first = self.first_failure
            kind = SamplingError if failure.may_pass else BrokenSamplerError
            raise kind(f"{first.error}\n\nIn the sampler:\n{first.traceback}")
        logger.warning("A sampler failed and is asked again: %s", failure.error)
        self._give_back(flight.part, seconds)

    def _take_from_the_dead(self) -> None:
        healthy = set(self.group.healthy_worker_ids())
        for worker in [worker for worker in self.flights if worker not in healthy]:
            flight = self.flights.pop(worker)
            logger.warning("Sampler %d died; its prompts are sampled again.", worker)
            self._give_back(flight.part, time.monotonic() - flight.sent)
            self.num_losses += 1

    def _take_from_the_silent(self) -> None:
        now = time.monotonic()
        for worker, flight in list(self.flights.items()):
            if flight.limit is not None and now - flight.sent > flight.limit:
                del self.flights[worker]
                self.collector.samplers.replace(
                    worker,
                    f"it gave no answer in {flight.limit:.0f} s (sampler_timeout_s="
                    f"{self.collector.limit.setting!r}; slowest answer so far "
                    f"{self.collector.limit.slowest:.1f} s)",
                )
                flight.part.num_hung += 1
                self._give_back(flight.part, now - flight.sent)
                self.num_losses += 1

    def _give_back(self, part: Part, seconds: float) -> None:
        self.waiting.append(part)
        self.faults.requests_retried += 1
        self.faults.seconds_lost += seconds

    def _require_progress(self) -> None:
        samplers, now = self.collector.samplers, time.monotonic()
        if self.flights or samplers.healthy():
            self.someone_seen = now
        advice = (
            "Look for the reason in the workers' logs (out of memory is common), and raise "
            "max_num_env_runner_restarts or sampler_timeout_s."
        )
        have = f"num_healthy_samplers={self.group.num_healthy_remote_workers()} must be at least 1"
        if self.num_losses >= MAX_LOSSES_PER_SAMPLER * samplers.num_samplers:
            raise SamplingError(
                f"{have}: all that were asked died or hung, {self.num_losses} times in a row. "
                f"{advice}\n{samplers.last_words()}"
            )
        if now - self.someone_seen > samplers.start_limit:
            raise NoSamplersError(
                f"{have}: none came back in {samplers.start_limit:.0f} s. {advice}\n"
                f"{samplers.last_words()}"
            )


def serve_part(
    runner, *, start: int, part: SampleRequest, published: PublishedWeights
) -> JudgedBatch | SampleFailure:
    """In the sampler: its answer to the part of a request that begins at prompt `start`."""
    return runner.serve(part, published)


def deal(num_prompts: int, num_samplers: int) -> list[Part]:
    """The prompts of a request cut as evenly as it goes, one part for each sampler there should be.

    Also while some are dead, and the parts stay as they are: round-off in the log-probs depends on
    what is computed together, and nothing that is learnt shall depend on who died.
    """
    num_parts = min(num_samplers, num_prompts)
    bounds = [num_prompts * i // num_parts for i in range(num_parts + 1)]
    return [Part(low, high - low) for low, high in zip(bounds, bounds[1:], strict=False)]
