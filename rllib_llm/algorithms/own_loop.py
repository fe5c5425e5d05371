"""An algorithm's steps as calls that can be awaited, for those who write their own loop.

    async def loop(algorithm, num_updates):
        for _ in range(num_updates):
            batch = await algorithm.next_batch()
            under_way = algorithm.submit(batch)  # learns from it and publishes the weights
            ...                                  # whatever else there is to do
            metrics = await under_way

They are made one after the other, in the order in which they were asked for, in a thread of their
own; samplers that stream work meanwhile. Results, evaluation and checkpoints are `train()`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class UnderWay(Generic[Result]):
    """A call that was begun: `await` it, or ask for its `result()`."""

    def __init__(self, future: Future[Result]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, Result]:
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout_s: float | None = None) -> Result:
        """What the call gave; waits for it.

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

    def begin(self, call: Callable[..., Result], *args: Any) -> UnderWay[Result]:
        """Makes the call when those before it have ended."""
        return UnderWay(self._thread.submit(call, *args))

    def stop(self) -> None:
        """Makes no more calls; the one under way is waited for."""
        self._thread.shutdown(wait=True, cancel_futures=True)
