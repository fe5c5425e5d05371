"""Policies that generate elsewhere: another engine in this process, or a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from rllib_llm import columns
from rllib_llm.engines.client import ClientPolicy
from rllib_llm.engines.completions import Completions
from rllib_llm.engines.external_engine import ExternalEngine
from rllib_llm.engines.noise import row_seeds
from rllib_llm.engines.protocol import Engine, Noise
from rllib_llm.rollouts.policy import Generation, LoadWeights
from rllib_llm.weights.flat_buffer import FlatBuffer, unpack


class ForeignPolicy(ABC):
    """What others have in common: asked for whole batches, with weights that nobody can look at.

    Args:
        source: generates, and knows its model's tokenizer.
        needs_turns: why it cannot converse, as `engine=... must be ...: reason`.
    """

    takes_weights, has_weights = False, True

    def __init__(self, source: ExternalEngine | ClientPolicy, *, needs_turns: str) -> None:
        self._source = source
        self._needs_turns = needs_turns

    @property
    def pad_token_id(self) -> int:
        """As of all policies."""
        return self._source.tokenizer.pad_token_id

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """As of all policies."""
        return self._source.stop_token_ids

    def generate(
        self, prompts: Mapping[str, torch.Tensor], asked: Generation
    ) -> dict[str, torch.Tensor]:
        """As of all policies."""
        ids, mask = prompts[columns.PROMPT_IDS], prompts[columns.PROMPT_MASK]
        return self._complete(ids, mask, asked).columns(ids.device)

    @abstractmethod
    def _complete(
        self, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, asked: Generation
    ) -> Completions:
        """The completions of prompts [P, L]."""

    def open_engine(
        self, version: int | None, *, load_weights: LoadWeights | None = None
    ) -> Engine:
        """As of all policies."""
        raise ValueError(f"{self._needs_turns}, not turn by turn. Set engine='torch'.")

    def load(self, weights: FlatBuffer) -> None:
        """As of all policies."""
        self.set_state(unpack(weights))

    def differing(self, weights: FlatBuffer) -> list[str]:
        """Nothing: its weights cannot be seen, or lie in a layout of the engine's own."""
        return []

    def get_state(self) -> dict[str, torch.Tensor]:
        """Nothing: its weights are its own, or those that come with a request."""
        return {}

    @abstractmethod
    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """As of all policies."""

    def close(self) -> None:
        """As of all policies."""
        self._source.close()


class EnginePolicy(ForeignPolicy):
    """An engine that has a copy of the policy, or a model of its own."""

    def __init__(self, engine: ExternalEngine) -> None:
        super().__init__(
            engine,
            needs_turns=f"engine={type(engine).__name__!r} must be 'torch' for conversations: it "
            "is asked for whole batches of completions",
        )
        self._engine = engine
        self.takes_weights = engine.takes_weights
        self.has_weights = not engine.takes_weights  # what it starts from may be dummies

    def _complete(
        self, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, asked: Generation
    ) -> Completions:
        return self._engine.generate(
            prompt_ids, prompt_mask, asked.params,
            num_completions=asked.num_completions, seeds=row_seeds(asked.seed, asked.row_ids),
        )  # fmt: skip

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """As of all policies; one with a model of its own stays as it is."""
        if self.takes_weights:
            self._engine.load_weights(dict(state))
            self.has_weights = True


class ServerPolicy(ForeignPolicy):
    """A server that generates, with weights that it has from elsewhere."""

    def __init__(self, server: ClientPolicy) -> None:
        super().__init__(
            server,
            needs_turns="engine='openai' must be 'torch' for conversations: a server is asked for "
            "whole batches of completions",
        )
        self._server = server

    def _complete(
        self, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, asked: Generation
    ) -> Completions:
        return self._server.generate(
            prompt_ids, prompt_mask, asked.params, num_completions=asked.num_completions,
            noises=[Noise(asked.seed, row) for row in asked.row_ids.tolist()],
            weights=asked.weights,
        )  # fmt: skip

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing: its weights are its own."""
