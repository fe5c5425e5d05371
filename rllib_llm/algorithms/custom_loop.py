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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeAlias, TypeVar

Result = TypeVar("Result")
Metrics: TypeAlias = dict[str, dict[str, float]]


class PendingCall(Generic[Result]):
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
        if not wait([self._future], timeout_s).done:
            raise TimeoutError(f"the call has not ended in {timeout_s:g} s")
        return self._future.result()

    @property
    def is_done(self) -> bool:
        """Whether the call has ended."""
        return self._future.done()


class CustomLoop:
    """The calls of an algorithm, one after the other."""

    def __init__(self, algorithm: Any) -> None:
        self._algorithm = algorithm
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="custom-loop")

    def begin(self, call: Callable[..., Result], *args: Any) -> PendingCall[Result]:
        """Makes the call when those before it have ended."""
        return PendingCall(self._thread.submit(call, *args))

    def begin_learning(self, call: Callable[..., Any], *args: Any) -> PendingCall[Metrics]:
        """As `begin`; the result is the learners' metrics by group."""

        def learn() -> Metrics:
            call(*args)
            return self._algorithm.pop_learner_metrics()

        return self.begin(learn)

    def stop(self) -> None:
        """Makes no more calls; the one under way is waited for."""
        self._thread.shutdown(wait=True, cancel_futures=True)
