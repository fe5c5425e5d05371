"""The steps of an algorithm as awaitable calls, for custom training loops.

    async def loop(algorithm, num_updates):
        for _ in range(num_updates):
            batch = await algorithm.next_batch()
            under_way = algorithm.submit(batch)  # learns from it and publishes the weights
            ...                                  # whatever else there is to do
            metrics = await under_way

`submit` takes the optimiser steps that the settings say, as `train()` does. In three parts it is

    await algorithm.forward_backward(batch)      # as often as wanted: gradients add up
    await algorithm.optimizer_step()
    await algorithm.publish_weights()            # samplers have the new weights from now on

Calls are made one after the other, in the order in which they were asked for, in a thread of their
own; samplers that stream work meanwhile. Results, evaluation and checkpoints are `train()`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from rllib_llm.rollouts.judged_batch import JudgedBatch

if TYPE_CHECKING:
    from rllib_llm.rollouts.source import RolloutSource

Result = TypeVar("Result")
Metrics: TypeAlias = dict[str, dict[str, float]]


class UnderWay(Generic[Result]):
    """A call that was begun: `await` it, or ask for its `result()`."""

    def __init__(self, future: Future[Result]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, Result]:
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout_s: float | None = None) -> Result:
        """Waits for the call and returns its result.

        Raises:
            TimeoutError: it is not there after `timeout_s`; else whatever the call raised.
        """
        return self._future.result(timeout_s)

    @property
    def is_done(self) -> bool:
        """Whether the call has ended."""
        return self._future.done()


class OneAfterAnother:
    """A thread that makes calls in the order in which they come."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="own-loop")

    def begin(self, call: Callable[..., Result]) -> UnderWay[Result]:
        """Makes the call when those before it have ended."""
        return UnderWay(self._thread.submit(call))

    def stop(self) -> None:
        """Makes no more calls; the one under way is waited for."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class OwnLoop:
    """The calls of an `RLHF` algorithm, which is one."""

    rollouts: RolloutSource
    _calls: OneAfterAnother | None = None

    def next_batch(self) -> UnderWay[JudgedBatch]:
        """The batch to be learnt from next."""
        return self._begin(self.rollouts.next)

    def submit(self, batch: JudgedBatch) -> UnderWay[Metrics]:
        """Learns from a batch and publishes the weights; the learners' metrics by group."""

        def learn() -> Metrics:
            self.learn(batch)
            return self.pop_learner_metrics()

        return self._begin(learn)

    def forward_backward(self, batch: JudgedBatch) -> UnderWay[Metrics]:
        """Adds a batch's gradient to what `optimizer_step` takes: the whole batch at once, each
        row once; the learners' metrics by group."""

        def add() -> Metrics:
            self.add_gradients(batch)
            return self.pop_learner_metrics()

        return self._begin(add)

    def optimizer_step(self) -> UnderWay[Metrics]:
        """Takes an optimiser step with the gradients added up; its metrics by group."""
        from rllib_llm.learners.language_model_learner import LanguageModelLearner

        def step() -> Metrics:
            self.foreach_learner(LanguageModelLearner.optimizer_step)
            return self.pop_learner_metrics()

        return self._begin(step)

    def publish_weights(self) -> UnderWay[None]:
        """Gives samplers the weights as they are; the next batch is one version later."""
        return self._begin(self.publish_next)

    def _begin(self, call: Callable[..., Result]) -> UnderWay[Result]:
        if self._calls is None:
            self._calls = OneAfterAnother()
        return self._calls.begin(call)

    def stop_own_loop(self) -> None:
        """Makes no more calls."""
        if self._calls is not None:
            self._calls.stop()

    # --- what the algorithm is asked for -------------------------------------------------------

    def learn(self, sampled: JudgedBatch) -> Any:
        """Updates the learners with a batch and publishes their weights."""
        raise NotImplementedError

    def add_gradients(self, sampled: JudgedBatch) -> None:
        """Adds the gradients of a batch on all learners."""
        raise NotImplementedError

    def publish_next(self) -> None:
        """Publishes the weights under the next version."""
        raise NotImplementedError

    def foreach_learner(self, call: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Calls a method on every learner whose results are those of an update; returns the
        learners' messages."""
        raise NotImplementedError

    def pop_learner_metrics(self) -> Metrics:
        """The learners' means since the last call, by group."""
        raise NotImplementedError
