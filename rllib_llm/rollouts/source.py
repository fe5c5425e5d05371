"""Where an algorithm's batches come from: the one thing that the loop asks for."""

from __future__ import annotations

from typing import Any, Protocol

from rllib_llm.rollouts.request import JudgedBatch
from rllib_llm.weights.published import PublishedWeights


class RolloutSource(Protocol):
    """Judged completions, batch after batch: `RLHF.training_step` is next, update, publish."""

    @property
    def position(self) -> int:
        """Prompt groups learnt from so far, those of the batch handed out last among them."""

    def next(self) -> JudgedBatch:
        """The batch to be learnt from next.

        Raises:
            SamplingError: nobody can sample it.
        """

    def publish(self, weights: PublishedWeights) -> None:
        """Says what to sample with from now on; called before the first `next`."""

    def metrics(self) -> dict[str, dict[str, float]]:
        """What is reported of it once per iteration, by group of metrics."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, such that another source goes on where this one is."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken, by this source or by another. `state` also has
        `weights_version`, the updates done until then."""

    def stop(self) -> None:
        """Waits for what is on its way, not for ever."""
