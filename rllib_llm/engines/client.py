"""Asking for completions one by one, and batches of them, of whoever gives them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from rllib_llm.engines.completions import Completions
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended


class CompletionClient(Protocol):
    """Gives completions: an engine in another thread (`EngineLoop`), or a server."""

    def submit(
        self, token_ids: Sequence[int], params: SamplingParams, *, seed: int = 0
    ) -> Future[Ended]:
        """Starts a completion of a prompt; the same seed gives the same one, where it can."""

    def close(self) -> None:
        """Frees what it holds."""


class ClientPolicy:
    """Batches of completions by a client, for a sampler that evaluates: see `ExternalEngine`.

    Args:
        client: gives the completions; closed with this.
        tokenizer: the policy's.
        stop_token_ids: all EOS ids of the policy.
    """

    takes_weights = False

    def __init__(
        self, client: CompletionClient, tokenizer: Any, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._client = client
        self.tokenizer, self.stop_token_ids = tokenizer, stop_token_ids

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Raises TypeError: who completes has weights of its own."""
        raise TypeError("engine='openai' must not be given weights: the server has its own.")

    def generate(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        params: SamplingParams,
        *,
        num_completions: int,
        seeds: list[int],
    ) -> Completions:
        """Completions of each prompt; args as `ExternalEngine.generate`."""
        prompts = prompts_of(prompt_ids, prompt_mask)
        rows = [prompt for prompt in prompts for _ in range(num_completions)]
        started = [
            self._client.submit(row, params, seed=seed)
            for row, seed in zip(rows, seeds, strict=True)
        ]
        ended = [future.result() for future in started]
        return pad_completions(
            [row.token_ids for row in ended], [row.logprobs for row in ended], params
        )

    def close(self) -> None:
        """Closes the client."""
        self._client.close()


def prompts_of(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> list[list[int]]:
    """The prompts' ids without their padding."""
    return [ids[mask].tolist() for ids, mask in zip(prompt_ids, prompt_mask, strict=True)]


def pad_completions(
    token_ids: list[list[int]], logprobs: list[list[float]], params: SamplingParams
) -> Completions:
    """Ragged rows as `Completions`; a row is finished where it ends with a stop token.

    Args:
        token_ids: of each row, stop token included, at least one.
        logprobs: of each row, as many as it has tokens.
        params: its pad and stop tokens are read.
    """
    longest = max(map(len, token_ids))
    lengths = torch.tensor([len(row) for row in token_ids])
    mask = torch.arange(longest) < lengths.unsqueeze(1)
    ids = torch.full(mask.shape, params.pad_token_id, dtype=torch.int64)
    values = torch.zeros(mask.shape, dtype=torch.float32)
    ids[mask] = torch.tensor([token for row in token_ids for token in row])
    values[mask] = torch.tensor([value for row in logprobs for value in row])
    stops = set(params.stop_token_ids)
    finished = torch.tensor([row[-1] in stops for row in token_ids])
    return Completions(ids, mask, values, finished)
