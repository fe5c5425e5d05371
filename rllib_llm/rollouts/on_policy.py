"""Batches in step with the learner: sampled with the newest weights, or one update ahead of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from rllib_llm import columns
from rllib_llm.rollouts.ahead import RequestInFlight
from rllib_llm.rollouts.collect import Collector
from rllib_llm.rollouts.errors import PublishedWeightsLostError, SamplingError
from rllib_llm.rollouts.request import JudgedBatch, SampleRequest
from rllib_llm.weights.published import PublishedWeights

logger = logging.getLogger(__name__)

MAX_SECONDS_TO_STOP = 60.0  # that the end of a run waits for a request in flight


class OnPolicy:
    """A `RolloutSource` of consecutive prompts, each batch one request to all samplers.

    Args:
        collector: has requests answered.
        num_prompts: prompts of a batch.
        num_completions: of each prompt.
        is_ahead: whether the next batch is sampled while the learner learns from the last, with
            weights that are one update older.
        texts_every: batches from one that carries its texts to the next; 0: none does.
        publish_again: publishes the current weights anew, since somebody could not get them.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        num_prompts: int,
        num_completions: int,
        is_ahead: bool,
        texts_every: int,
        publish_again: Callable[[PublishedWeightsLostError], PublishedWeights],
    ) -> None:
        self.position = 0
        self._collector = collector
        self._num_prompts = num_prompts
        self._num_completions = num_completions
        self._is_ahead = is_ahead
        self._texts_every = texts_every
        self._publish_again = publish_again
        self._weights: PublishedWeights | None = None
        self._in_flight: RequestInFlight | None = None  # the next batch, being sampled

    def publish(self, weights: PublishedWeights) -> None:
        """As of all sources."""
        self._weights = weights

    def next(self) -> JudgedBatch:
        """All completions of this iteration, in the order of their prompts' positions."""
        batch = self._take()
        self.position += self._num_prompts
        self._in_flight = None
        if self._is_ahead:
            self._in_flight = RequestInFlight(self.position, self._request(num_updates=1))
        return batch

    def _take(self) -> JudgedBatch:
        try:
            if self._in_flight is not None and self._in_flight.position == self.position:
                return self._in_flight.result()
            return self._request()()
        except PublishedWeightsLostError as error:
            self._in_flight = None
            self.publish(self._publish_again(error))
            return self._request()()
        except SamplingError:
            self._in_flight = None  # whoever tries again asks anew
            raise

    def _request(self, *, num_updates: int = 0) -> Callable[[], JudgedBatch]:
        """Samples the batch at the present position with the weights as they are now.

        num_updates: that the learner will take before it learns from this batch.
        """
        assert self._weights is not None, "weights are published before the first batch"
        number = self._weights.version + num_updates
        request = SampleRequest(
            position=self.position,
            num_prompts=self._num_prompts,
            num_completions=self._num_completions,
            return_texts=bool(self._texts_every) and number % self._texts_every == 0,
        )
        return functools.partial(self._collector.collect, request, self._weights)

    def state(self) -> dict[str, Any]:
        """The position, and the batch sampled ahead, which is waited for."""
        in_flight = None if self._in_flight is None else self._in_flight.get_state()
        return {"position": self.position, "in_flight": in_flight}

    def set_state(self, state: dict[str, Any]) -> None:
        """The next batch is the very one that was waiting when the state was taken."""
        if self._in_flight is not None:
            self._in_flight.wait()  # its samplers are wanted
        self.position = state["position"]
        in_flight = state.get("in_flight")
        if in_flight is not None and columns.GROUP not in in_flight["batch"]["columns"]:
            logger.warning("The batch sampled ahead is of an older format: it is sampled again.")
            in_flight = None
        self._in_flight = RequestInFlight.from_state(in_flight)

    def stop(self) -> None:
        """Waits for a batch that is being sampled, a minute at most."""
        if self._in_flight is not None:
            self._in_flight.wait(MAX_SECONDS_TO_STOP)
