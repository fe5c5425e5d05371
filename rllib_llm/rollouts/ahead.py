"""A request served in the background, while the driver learns from the batch before it."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from rllib_llm.rollouts.request import JudgedBatch


class RequestInFlight:
    """Serves one request in a thread of its own, which does nothing but wait for samplers.

    Args:
        position: first prompt of the request.
        serve: gives its judged completions.
    """

    def __init__(self, position: int, serve: Callable[[], JudgedBatch]) -> None:
        self.position = position
        self._serve = serve
        self._answer: concurrent.futures.Future[JudgedBatch] = concurrent.futures.Future()
        # A daemon: a process that ends does not wait for samplers.
        threading.Thread(target=self._run, name="sampling-ahead", daemon=True).start()

    def _run(self) -> None:
        try:
            self._answer.set_result(self._serve())
        except Exception as error:  # noqa: BLE001  (raised where the batch is wanted)
            self._answer.set_exception(error)

    def result(self) -> JudgedBatch:
        """The batch, once it is there.

        Raises:
            SamplingError: and whatever else `serve` raised.
        """
        return self._answer.result()

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the request was answered or failed, at the latest after `timeout_s`."""
        concurrent.futures.wait([self._answer], timeout=timeout_s)

    def get_state(self) -> dict[str, Any] | None:
        """Position and batch, once it is there; None where the request failed."""
        if self._answer.exception() is not None:
            return None
        return {"position": self.position, "batch": dict(vars(self.result()))}

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> RequestInFlight | None:
        """The request that `get_state` described, answered already."""
        if state is None:
            return None
        batch = JudgedBatch(**state["batch"])
        return cls(state["position"], lambda: batch)
