"""Where an algorithm's batches come from.

    samplers ── lease ──▶ ledger ◀── take, publish ── this ◀── next, publish ── the loop
             ── push ───▶

The ledger (`ledger.py`) decides who samples what, and which groups a batch is made of; this waits
for the batch, looks after samplers meanwhile, and says why where none comes.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_llm.rollouts.errors import BrokenSamplerError, SampleFailure
from rllib_llm.rollouts.groups import Answer, Ending
from rllib_llm.rollouts.judged_batch import JudgedBatch, as_bytes, batch_of, rows_of
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.recorder import RolloutRecorder
from rllib_llm.rollouts.sample_loop import LocalWorker, Workers
from rllib_llm.rollouts.sampler_pool import SamplerPool
from rllib_llm.rollouts.schedule import ServingSettings, StreamRules
from rllib_llm.shared.process import LEAST_SECONDS
from rllib_llm.shared.remote import ServerError
from rllib_llm.weights.published import PublishedWeights

if TYPE_CHECKING:
    from rllib_llm.rollouts.env_runner import RLHFEnvRunner
    from rllib_llm.rollouts.ledger_actor import RemoteLedger
    from rllib_llm.rollouts.replay import ReplayBuffer

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_REPORTS = 0.02  # of the ledger, while a state waits for older weights' groups
SECONDS_BETWEEN_WORDS = 60.0  # about who is waited for


class RolloutSource:
    """Judged completions, batch after batch: `RLHF.training_step` is next, update, publish. They
    are the groups of a ledger.

    Args:
        publish_again: publishes the current weights anew, given why they could not be fetched.
        tell: called with the groups of the next batch that are judged, as they come.
        replay: groups of earlier batches, some of which follow each.
    """

    def __init__(
        self, ledger: Ledger | RemoteLedger, workers: Workers, rules: StreamRules, *,
        recorder: RolloutRecorder, publish_again: Callable[[str], PublishedWeights],
        tell: Callable[[int], None] = lambda num_groups: None, replay: ReplayBuffer | None = None,
    ) -> None:  # fmt: skip
        self._replay = replay
        self._ledger, self._workers, self._rules = ledger, workers, rules
        self._recorder, self._publish_again, self._tell = recorder, publish_again, tell
        self._kept: dict[int, PublishedWeights] = {}  # by version, those that may be asked for
        # Of them, the first and those after a batch, which groups of a table are sampled with.
        self._turns: deque[int] = deque(maxlen=rules.largest_age + 1)
        self._step = self._newest = 0  # updates done, and version of the newest weights
        self._num_seen = 0  # rejected groups
        self._last_failure = ""  # that may pass
        self._num_failures: Counter[str] = Counter()  # of no group's, by sampler, since a batch
        self._num_lost = 0  # publications, since a batch was asked for
        self._handed_out: list[int] = []  # groups of each batch of this update
        self._ages: list[float] = []  # of the groups of the last batch, updates
        self._wait_seconds = 0.0  # for the last batch
        self._position = 0

    @property
    def position(self) -> int:
        """Prompt groups learnt from so far, those of the batch handed out last among them."""
        return self._position

    def publish(
        self, weights: PublishedWeights, env_weights: tuple[float, ...] | None = None,
        step: int | None = None,
    ) -> None:  # fmt: skip
        """Sets the weights to sample with, before the first `next`; the batch handed out before was
        learnt from. `env_weights`: of the environments from now on, where they are others. `step`:
        updates done, where the weights are older ones."""
        step = weights.version if step is None else step
        if step != self._step:
            if self._handed_out:
                self._turns.append(weights.version)
            elif self._newest not in self._turns:
                self._kept.pop(self._newest, None)  # no group is sampled with them
            self._handed_out.clear()
        if not self._turns:
            self._turns.append(weights.version)
        self._step, self._newest = step, weights.version
        self._kept[weights.version] = weights
        self._kept = {v: w for v, w in self._kept.items() if v >= self._turns[0]}
        self._ledger.call("publish", weights, env_weights, step)

    def next(self) -> JudgedBatch:
        """The next batch, once it is full. Where a synchronous run gets none, it is as before the
        call: its checkpoint is one of the iteration before, and the same prompts come again.

        Raises:
            RuntimeError: no sampler can sample, or all groups are rejected.
        """
        is_ahead, before = self._rules.num_parts is None, None
        if not is_ahead and not self._handed_out:
            before = self._saved() | {"weights_version": self._step}, self._kept[self._newest]
        start = said = time.monotonic()
        num_judged = self._num_lost = 0
        self._workers.note_progress()
        try:
            while True:
                self._workers.work()
                answer = self._take()
                if answer.groups is not None:
                    fresh = batch_of(answer.groups)
                    break
                if answer.num_judged != num_judged:
                    num_judged = answer.num_judged
                    self._workers.note_progress()
                    self._tell(num_judged)
                if is_ahead and time.monotonic() - said > SECONDS_BETWEEN_WORDS:  # else no news
                    said = time.monotonic()
                    waits_for = self.look()["waits_for"]
                    logger.warning("Update %d waits for a batch: %s", self._step, waits_for)
        except Exception:
            if before is not None:
                self.set_state(before[0])
                self.publish(before[1], step=self._step)
            raise
        self._wait_seconds = time.monotonic() - start
        self._ages = [float(self._step - group.oldest_version) for group in answer.groups]
        self._num_failures.clear()
        self._handed_out.append(len(answer.groups))
        self._position += len(answer.groups)
        return fresh if self._replay is None else self._replay.extend(fresh)

    def next_from(self, position: int, weights: PublishedWeights) -> JudgedBatch:
        """The batch that begins at a position, sampled with these weights, whatever was sampled
        before; nothing of it is kept."""
        start = {"position": position, "weights_version": weights.version}
        self.set_state(start)
        self.publish(weights)
        try:
            return self.next()
        finally:
            self.set_state(start)

    def _take(self) -> Answer:
        nth = len(self._handed_out)
        answer: Answer = self._ledger.call("take", self._step, self._num_seen, nth)
        self._attend(answer)
        if answer.ending is not None and answer.groups is None:
            raise self._ended(answer.ending)
        return answer

    def _attend(self, answer: Answer) -> None:
        """Acts on the ledger's report: records closed groups, replaces samplers, offers weights."""
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
            self._handle_failure(sampler, failure, num_failures)

    def _handle_failure(self, sampler: str, failure: SampleFailure, num_failures: int) -> None:
        if failure.weights_lost:
            self._replace_lost(failure)
            return
        if failure.no_server:
            raise ServerError(failure.error)
        is_lockstep = self._rules.schedule == "lockstep"
        if not num_failures:  # of no group's
            self._num_failures[sampler] += 1
            num_failures, is_lockstep = self._num_failures[sampler], True
        if not failure.may_pass or (is_lockstep and num_failures >= self._rules.max_failures):
            kind = RuntimeError if failure.may_pass else BrokenSamplerError
            trace = RuntimeError(f"in sampler {sampler}:\n{failure.traceback}")
            raise kind(failure.error) from trace
        self._last_failure = f"The last failure: {failure.error}"
        logger.warning("Sampler %s failed and is asked again: %s", sampler, failure.error)

    def _replace_lost(self, failure: SampleFailure) -> None:
        """Publishes weights again that were lost, unless others have taken their place already.

        Raises:
            RuntimeError: so many were lost, one after the other.
        """
        key = failure.lost_key
        if key and all(key != kept.key for kept in self._kept.values()):
            return
        self._num_lost += 1
        if self._num_lost >= self._rules.max_failures:
            raise RuntimeError(failure.error)
        again = self._publish_again(failure.error)
        self._kept[again.version] = again
        self._ledger.call("offer", again)

    def _ended(self, ending: Ending) -> RuntimeError:
        counts = ", ".join(f"{count} {reason}" for reason, count in ending.counts.items())
        # A cause says itself what to correct: the environment, or a reward function.
        what, remedy = {
            "unjudged": ("got no score", "Reward functions returned None for all completions."),
            "failed": ("failed", self._last_failure),
            "rejected": ("were rejected", "Change prompts or filters, or raise max_resampling."),
        }[ending.kind]
        cause = f"The last without a score: {ending.cause}" if ending.cause else ""
        is_broken = ending.kind == "unjudged"
        kind = BrokenSamplerError if is_broken else RuntimeError
        return kind(
            f"{sum(ending.counts.values())} groups in a row {what}, and at most {ending.limit} may "
            f"({counts}): update {self._step} has too few completions to train on. "
            + " ".join(filter(None, [remedy if not (is_broken and cause) else "", cause]))
        )

    def metrics(self) -> dict[str, dict[str, float]]:
        """`rollouts`, see `Ledger.metrics`, with `age_mean` and `age_max` of the
        last batch's groups in updates, and the seconds that it was waited for; `replay`."""
        look = self.look()
        of_batch = self._ages or [0.0]
        ages = {"age_mean": sum(of_batch) / len(of_batch), "age_max": max(of_batch)}
        replay = {} if self._replay is None else {"replay": self._replay.metrics()}
        waited = {"wait_seconds": self._wait_seconds}
        return {**replay, "rollouts": {**look["metrics"], **ages, **waited}}

    def look(self) -> dict[str, Any]:
        """See `Ledger.look`."""
        return self._ledger.call("look")

    def state(self) -> dict[str, Any]:
        """The ledger with all judged groups, and the partial output of the others. Waits for
        what older weights have to sample: a restored run has only the newest. No batch is
        wanted meanwhile: that would change which weights sample."""
        self._workers.note_progress()
        while self.look()["num_old"]:
            self._workers.work()
            self._attend(self._ledger.call("report", self._num_seen))
            time.sleep(SECONDS_BETWEEN_REPORTS)
        replay = {} if self._replay is None else {"replay": self._replay.state()}
        return {**self._saved(), **replay}

    def _saved(self) -> dict[str, Any]:
        ledger = self._ledger.call("state")
        closed, num_closed = ledger["closed"]
        known = max(0, self._num_seen - num_closed + len(closed))
        return {
            "position": ledger["position"],  # for sources that know no other
            "num_learnt": self._position - sum(self._handed_out),
            "ledger": ledger
            | {
                "table": [(*rest, as_bytes(group), tokens)
                          for *rest, group, tokens in ledger["table"]],
                "closed": (tuple(dataclasses.replace(each, group=as_bytes(each.group))
                                 for each in closed[known:]), num_closed),
            },
        }  # fmt: skip

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the state; work in flight is refused when it arrives. The checkpoint of another
        source gives only the position, and `weights_version`, the number of updates until then."""
        self._num_seen, self._step = 0, state["weights_version"]
        self._kept.clear()
        self._turns.clear()
        self._handed_out.clear()
        self._workers.forget()
        if "ledger" in state:
            self._ledger.call("set_state", state["ledger"])
        else:
            self._ledger.call("begin", state["position"], state["weights_version"])
        self._position = state.get("num_learnt", state["position"])
        if self._replay is not None and "replay" in state:
            self._replay.set_state(state["replay"])

    def stop(self) -> None:
        """Waits, for a limited time, for work in flight."""
        self._workers.stop()


def open_rollouts(
    pool: SamplerPool, local: RLHFEnvRunner | None, rules: StreamRules, settings: ServingSettings,
    *, folder: Path, recorder: RolloutRecorder, **given: Any,
) -> RolloutSource:  # fmt: skip
    """The source of the batches that these samplers make.

    Args:
        pool: remote samplers. local: that of this process, where there are none.
        folder: for the journal of a ledger in an actor, which goes with the run.
        given: see `RolloutSource`.
    """
    ledger: Ledger | RemoteLedger
    if not pool.num_samplers:  # nothing could replace a sampler that is this very process
        assert local is not None, "a group without remote samplers has a local one"
        rules = dataclasses.replace(rules, timeout_s=None)
        ledger = Ledger(rules, keeps_rejected=recorder.keeps)
        worker = LocalWorker(local.sampler, ledger, settings)
        return RolloutSource(ledger, worker, rules, recorder=recorder, **given)
    from rllib_llm.rollouts.workers import DealtLeases, PulledLeases

    if rules.num_parts is not None:
        ledger = Ledger(rules, keeps_rejected=recorder.keeps)
        workers: Workers = DealtLeases(pool, ledger, settings, are_enough=rules.are_open)
    else:  # samplers are at work while this process is not
        from rllib_llm.rollouts.ledger_actor import CALL_SECONDS, RemoteLedger

        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed here
        limit = rules.timeout_s if isinstance(rules.timeout_s, (int, float)) else LEAST_SECONDS
        ledger = RemoteLedger(
            f"ledger-{uuid.uuid4().hex}", rules, folder, keeps_rejected=recorder.keeps,
            answer_seconds=min(limit, CALL_SECONDS),
        )  # fmt: skip
        workers = PulledLeases(
            pool, ledger, settings, answer_seconds=limit, are_enough=rules.are_open
        )
        workers.watch()
    return RolloutSource(ledger, workers, rules, recorder=recorder, **given)
