"""Asking for completions one by one, and batches of them, of whoever gives them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from rllib_llm.engines.completions import Completions
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended, Noise


class CompletionClient(Protocol):
    """Gives completions one by one: a server."""

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        noise: Noise,
        weights: tuple[int, int] | None = None,
    ) -> Future[Ended]:
        """Starts a completion of a prompt; the same noise gives the same one, where it can.

        Args:
            token_ids: the prompt.
            params: what to sample.
            noise: names the randomness.
            weights: (epoch, version) of the run's newest, for a server that follows it.
        """

    def close(self) -> None:
        """Frees what it holds."""


class ClientPolicy:
    """Batches of completions by a client.

    Args:
        client: gives the completions; closed with this.
        tokenizer: the policy's.
        stop_token_ids: all EOS ids of the policy.
    """

    def __init__(
        self, client: CompletionClient, tokenizer: Any, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._client = client
        self.tokenizer, self.stop_token_ids = tokenizer, stop_token_ids

    def generate(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        params: SamplingParams,
        *,
        num_completions: int,
        noises: Sequence[Noise],
        weights: tuple[int, int] | None = None,
    ) -> Completions:
        """Completions of each prompt, one for each of `noises`; see `CompletionClient.submit`."""
        prompts = prompts_of(prompt_ids, prompt_mask)
        rows = [prompt for prompt in prompts for _ in range(num_completions)]
        started = [
            self._client.submit(row, params, noise=noise, weights=weights)
            for row, noise in zip(rows, noises, strict=True)
        ]
        ended = [future.result() for future in started]
        made = pad_completions(
            [row.token_ids for row in ended], [row.logprobs for row in ended], params
        )
        made.versions = torch.full(made.completion_mask.shape, -1, dtype=torch.int32)
        versions = [version for row in ended for version in row.versions]
        made.versions[made.completion_mask] = torch.tensor(versions, dtype=torch.int32)
        return made

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
