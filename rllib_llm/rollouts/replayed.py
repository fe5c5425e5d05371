"""Batches with groups of earlier ones behind the fresh ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from rllib_llm.rollouts.replay_buffer import ReplayBuffer
from rllib_llm.rollouts.request import JudgedBatch, concatenate
from rllib_llm.rollouts.source import RolloutSource
from rllib_llm.weights.published import PublishedWeights


class Replayed:
    """A `RolloutSource` whose batches are another source's and `num_groups` that were learnt from
    before: rows at the end, counted by `num_replayed`.

    Args:
        source: of the fresh batches.
        buffer: of the others; a fresh batch enters it once it was handed out.
        num_groups: drawn for each batch, fewer while there are fewer.
    """

    def __init__(self, source: RolloutSource, buffer: ReplayBuffer, num_groups: int) -> None:
        self.source = source
        self.buffer = buffer
        self._num_groups = num_groups
        self._iteration = 0  # batches handed out

    @property
    def position(self) -> int:
        """Prompt groups handed out so far, each counted once."""
        return self.source.position

    def next(self) -> JudgedBatch:
        fresh = self.source.next()
        self._iteration += 1
        drawn = self.buffer.draw(self._num_groups, self._iteration)
        self.buffer.add(fresh, self._iteration)
        if drawn is None:
            return fresh
        drawn = dataclasses.replace(
            drawn.to(fresh.rewards.device),
            timings=dict.fromkeys(fresh.timings, 0.0),
            texts={name: drawn.texts.get(name, [""] * drawn.num_rows) for name in fresh.texts},
        )
        whole = concatenate([fresh, drawn])
        return dataclasses.replace(whole, node=fresh.node, num_replayed=drawn.num_rows)

    def publish(self, weights: PublishedWeights) -> None:
        self.source.publish(weights)

    def metrics(self) -> dict[str, dict[str, float]]:
        """The buffer's metrics beside the source's."""
        return {"replay": self.buffer.metrics(self._iteration), **self.source.metrics()}

    def state(self) -> dict[str, Any]:
        """Holds the buffer as well."""
        replay = {"iteration": self._iteration, "buffer": self.buffer.state()}
        return {**self.source.state(), "replay": replay}

    def set_state(self, state: dict[str, Any]) -> None:
        """A state without a buffer leaves this one empty."""
        self.source.set_state(state)
        if "replay" in state:
            self._iteration = state["replay"]["iteration"]
            self.buffer.set_state(state["replay"]["buffer"])

    def stop(self) -> None:
        self.source.stop()


def replayed(source: RolloutSource, config: Any) -> RolloutSource:
    """The source with a buffer around it, where an `RLHFConfig` asks for one."""
    if not config.replay_groups:
        return source
    buffer = ReplayBuffer(
        capacity=config.replay_capacity or 4 * config.num_prompts_per_iteration,
        eviction=config.replay_eviction,
        max_uses=config.replay_max_uses,
        recency=config.replay_recency,
        seed=config.seed or 0,
    )
    return Replayed(source, buffer, config.replay_groups)
