"""Batches of groups that stream: samplers work while the learner learns.

    samplers ── lease ──▶ ledger ◀── take, publish ── this ◀── next, publish ── the loop
             ── push ───▶

The ledger (`ledger.py`) decides who samples what, and which groups a batch is made of; this waits
for the batch, looks after samplers meanwhile, and says why where none comes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from rllib_llm.rollouts.errors import (
    BrokenSamplerError,
    NoServerError,
    PublishedWeightsLostError,
    SamplingError,
)
from rllib_llm.rollouts.failure import SampleFailure
from rllib_llm.rollouts.recorder import RolloutRecorder
from rllib_llm.rollouts.request import JudgedBatch
from rllib_llm.rollouts.streaming.client import LedgerCalls
from rllib_llm.rollouts.streaming.entry import Answer
from rllib_llm.rollouts.streaming.packing import batch_of, rows_of
from rllib_llm.rollouts.streaming.rules import StreamRules
from rllib_llm.rollouts.streaming.workers import StreamWorkers
from rllib_llm.weights.published import PublishedWeights

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.5  # for a batch, between looks at samplers
SECONDS_BETWEEN_WORDS = 60.0  # about who is waited for


class FilteredOutError(SamplingError):
    """Filters refuse, or samplers fail to make, so many groups that no batch gets full."""


class Streaming:
    """A `RolloutSource` whose samplers lease groups from a ledger.

    Args:
        ledger: the table of groups.
        workers: who samples.
        rules: of the ledger.
        recorder: is told of groups that are rejected.
        publish_again: publishes the current weights anew, since somebody could not get them.
        tell: called with the groups of the next batch that are judged, as they come.
    """

    def __init__(
        self,
        ledger: LedgerCalls,
        workers: StreamWorkers,
        rules: StreamRules,
        *,
        recorder: RolloutRecorder,
        publish_again: Callable[[PublishedWeightsLostError], PublishedWeights],
        tell: Callable[[int], None] = lambda num_groups: None,
    ) -> None:
        self._ledger, self._workers, self._rules = ledger, workers, rules
        self._recorder, self._publish_again, self._tell = recorder, publish_again, tell
        self._kept: dict[int, PublishedWeights] = {}  # by version, those that may be asked for
        self._step = 0  # updates done
        self._num_seen = 0  # rejected groups
        self._last_failure = ""  # that may pass
        self._ages: list[float] = []  # of the groups of the last batch, updates
        self._wait_seconds = 0.0  # for the last batch
        self._position = 0

    @property
    def position(self) -> int:
        """As of all sources."""
        return self._position

    def publish(self, weights: PublishedWeights) -> None:
        """As of all sources; the batch handed out before was learnt from."""
        self._step = weights.version
        self._kept[weights.version] = weights
        oldest = weights.version - self._rules.largest_age
        self._kept = {v: w for v, w in self._kept.items() if oldest <= v <= weights.version}
        self._ledger.call("publish", weights)

    def next(self) -> JudgedBatch:
        """As of all sources.

        Raises:
            FilteredOutError: filters refuse everything.
            SamplingError: nobody can sample.
        """
        start = said = time.monotonic()
        num_judged = 0
        while True:
            self._workers.work()
            answer = self._take(WAIT_SECONDS)
            if answer.groups is not None:
                break
            if answer.num_judged != num_judged:
                num_judged = answer.num_judged
                self._tell(num_judged)
            now = time.monotonic()
            if now - said > SECONDS_BETWEEN_WORDS:
                said = now
                waits_for = self.look()["waits_for"]
                logger.warning("Update %d waits for a batch: %s", self._step, waits_for)
        self._workers.has_progress()
        self._wait_seconds = time.monotonic() - start
        ages = [self._step - group.oldest_version for group in answer.groups]
        self._ages = [float(age) for age in ages]
        self._position += len(answer.groups)
        return batch_of(answer.groups)

    def _take(self, wait_s: float) -> Answer:
        answer = self._ledger.take(self._step, self._num_seen, wait_s)
        new = answer.closed[max(0, self._num_seen - answer.num_closed + len(answer.closed)) :]
        for closed in new:
            self._recorder.record(
                rows_of(closed), closed.status, iteration=self._step + 1, reason=closed.reason
            )
        self._num_seen = answer.num_closed
        for version in answer.missing:
            if version in self._kept:
                self._ledger.call("offer", self._kept[version])
        for sampler, why in answer.expired:
            self._workers.replace(sampler, why)
        for sampler, (failure, num_failures) in answer.failures:
            self._require_may_pass(sampler, failure, num_failures)
        if answer.too_many_closed:
            raise self._filtered_out(answer.too_many_closed)
        return answer

    def _require_may_pass(self, sampler: str, failure: SampleFailure, num_failures: int) -> None:
        if failure.weights_lost:
            again = self._publish_again(PublishedWeightsLostError(failure.error))
            self._ledger.call("offer", again)
            return
        if failure.no_server:
            raise NoServerError(failure.error)
        is_lockstep = self._rules.schedule == "lockstep"
        if not failure.may_pass or (is_lockstep and num_failures >= self._rules.max_failures):
            kind = SamplingError if failure.may_pass else BrokenSamplerError
            raise kind(f"{failure.error}\n\nIn sampler {sampler}:\n{failure.traceback}")
        self._last_failure = f" The last failure: {failure.error}"
        logger.warning("Sampler %s failed and is asked again: %s", sampler, failure.error)

    def _filtered_out(self, reasons: dict[str, int]) -> FilteredOutError:
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        return FilteredOutError(
            f"groups rejected in a row={sum(reasons.values())} must be at most "
            f"{self._rules.max_rejected} (max_resampling batches): update {self._step} gets no "
            f"full batch ({counts}). Give easier or harder prompts, loosen filters, or raise "
            f"max_resampling.{self._last_failure}"
        )

    def metrics(self) -> dict[str, dict[str, float]]:
        """As of all sources: `rollouts`, see `Ledger.metrics`, with `age_mean` and `age_max` of the
        last batch's groups in updates, and the seconds that it was waited for."""
        look = self.look()
        ages = self._ages or [0.0]
        told = {
            **look["metrics"],
            "age_mean": sum(ages) / len(ages),
            "age_max": max(ages),
            "wait_seconds": self._wait_seconds,
        }
        return {"rollouts": told}

    def look(self) -> dict[str, Any]:
        """See `LedgerCalls.look`."""
        return self._ledger.look()

    def state(self) -> dict[str, Any]:
        """As of all sources: the ledger with all that is judged, and with what there is of the
        rest. What older weights have to sample is waited for: a restored run has only the
        newest."""
        while self.look()["num_old"]:
            self._workers.work()
            self._take(0.0)
            time.sleep(0.02)
        return {
            "position": self.look()["position"],  # for sources that know no other
            "num_learnt": self._position,
            "ledger": self._ledger.state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """As of all sources; what is on its way is refused when it comes. A checkpoint of another
        source says the position alone."""
        self._num_seen = 0
        self._kept.clear()
        if "ledger" in state:
            self._ledger.call("set_state", state["ledger"])
        else:
            self._ledger.call("begin", state["position"], state["weights_version"])
        self._position = state.get("num_learnt", state["position"])

    def stop(self) -> None:
        """As of all sources."""
        self._ledger.close()
        self._workers.stop()  # before the ledger, that calls of theirs are not made in vain
        self._ledger.stop()
