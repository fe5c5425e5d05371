"""Policies that generate elsewhere: another engine in this process, or a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from rllib_llm.engines.completions import Completions
from rllib_llm.engines.protocol import Engine, Noise
from rllib_llm.engines.servers import ClientPolicy
from rllib_llm.rollouts.policy import Generation, LoadWeights
from rllib_llm.shared import columns
from rllib_llm.weights.flat_buffer import FlatBuffer, unpack

if TYPE_CHECKING:  # it imports transformers
    from rllib_llm.engines.vllm_engine import VLLMEngine


class ForeignPolicy(ABC):
    """What others have in common: weights that nobody can look at.

    Args:
        source: generates, and knows its model's tokenizer.
    """

    takes_weights: bool = False
    has_weights: bool = True

    def __init__(self, source: VLLMEngine | ClientPolicy) -> None:
        self._source = source

    @property
    def pad_token_id(self) -> int:
        return self._source.tokenizer.pad_token_id

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._source.stop_token_ids

    def generate(
        self, prompts: Mapping[str, torch.Tensor], asked: Generation
    ) -> dict[str, torch.Tensor]:
        ids, mask = prompts[columns.PROMPT_IDS], prompts[columns.PROMPT_MASK]
        return self._complete(ids, mask, asked).columns(ids.device)

    @abstractmethod
    def _complete(
        self, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, asked: Generation
    ) -> Completions:
        """The completions of prompts [P, L]."""

    @abstractmethod
    def open_engine(
        self, version: int | None, *, load_weights: LoadWeights | None = None
    ) -> Engine:
        """A new engine with weights of `version`."""

    def load(self, weights: FlatBuffer) -> None:
        self.set_state(unpack(weights))

    def differing(self, weights: FlatBuffer) -> list[str]:
        """Nothing: its weights cannot be seen, or lie in a layout of the engine's own."""
        return []

    def get_state(self) -> dict[str, torch.Tensor]:
        """Nothing: its weights are its own, or those that come with a request."""
        return {}

    @abstractmethod
    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Does nothing."""

    def close(self) -> None:
        self._source.close()


class EnginePolicy(ForeignPolicy):
    """vLLM in this process, which has a copy of the policy."""

    takes_weights = True

    def __init__(self, engine: VLLMEngine) -> None:
        super().__init__(engine)
        self._engine = engine

    @property
    def has_weights(self) -> bool:  # type: ignore[override]  # what it starts from are dummies
        return self._engine.has_weights

    def _complete(
        self, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, asked: Generation
    ) -> Completions:
        return self._engine.generate(
            prompt_ids, prompt_mask, asked.params, num_completions=asked.num_completions,
            noises=[Noise(asked.seed, row) for row in asked.row_ids.tolist()],
        )  # fmt: skip

    def open_engine(
        self, version: int | None, *, load_weights: LoadWeights | None = None
    ) -> Engine:
        return self._engine.open_rows(version, load_weights)

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._engine.load_weights(dict(state))


class ServerPolicy(ForeignPolicy):
    """A server that generates, with weights that it has from elsewhere."""

    def __init__(self, server: ClientPolicy) -> None:
        super().__init__(server)
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

    def open_engine(
        self, version: int | None, *, load_weights: LoadWeights | None = None
    ) -> Engine:
        raise ValueError(
            "engine='openai' must be 'torch' or 'vllm' for conversations: a server is asked for "
            "whole batches of completions, not turn by turn. Set engine='torch'."
        )
