"""Batches in step with the learner: consecutive prompts, sampled with the newest weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rllib_llm.rollouts.collect import Collector
from rllib_llm.rollouts.errors import PublishedWeightsLostError
from rllib_llm.rollouts.request import JudgedBatch, SampleRequest
from rllib_llm.rollouts.samples import texts_are_due
from rllib_llm.weights.published import PublishedWeights


class OnPolicy:
    """A `RolloutSource` of consecutive prompts, each batch one request to all samplers.

    Args:
        collector: has requests answered.
        num_prompts: prompts of a batch.
        num_completions: of each prompt.
        texts_every: batches from one that carries its texts to the next; 0: none does.
        publish_again: publishes the current weights anew, since somebody could not get them.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        num_prompts: int,
        num_completions: int,
        texts_every: int,
        publish_again: Callable[[PublishedWeightsLostError], PublishedWeights],
    ) -> None:
        self.position = 0
        self._collector = collector
        self._num_prompts = num_prompts
        self._num_completions = num_completions
        self._texts_every = texts_every
        self._publish_again = publish_again
        self._weights: PublishedWeights | None = None

    def publish(self, weights: PublishedWeights) -> None:
        """As of all sources."""
        self._weights = weights

    def next(self) -> JudgedBatch:
        """All completions of this iteration, in the order of their prompts' positions."""
        try:
            batch = self._sample()
        except PublishedWeightsLostError as error:
            self.publish(self._publish_again(error))
            batch = self._sample()
        self.position += self._num_prompts
        return batch

    def _sample(self) -> JudgedBatch:
        assert self._weights is not None, "weights are published before the first batch"
        every = self._texts_every
        request = SampleRequest(
            position=self.position,
            num_prompts=self._num_prompts,
            num_completions=self._num_completions,
            return_texts=texts_are_due(self._weights.version, every),
        )
        return self._collector.collect(request, self._weights)

    def metrics(self) -> dict[str, dict[str, float]]:
        """None: nothing is on its way between batches."""
        return {}

    def state(self) -> dict[str, Any]:
        """The position."""
        return {"position": self.position}

    def set_state(self, state: dict[str, Any]) -> None:
        """As of all sources; groups of a stream that were not learnt from are sampled again."""
        self.position = state["position"]

    def stop(self) -> None:
        """Nothing: nothing is on its way."""
