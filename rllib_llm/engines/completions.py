"""Completions as they are handed back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from rllib_llm.engines.params import SamplingParams
from rllib_llm.shared import columns
from rllib_llm.shared.padding import pad_right


@dataclass
class Completions:
    """Completions of a batch, rows of a group adjacent. T = the longest completion of the batch."""

    completion_ids: torch.Tensor
    """[batch, T] int64, right-padded with the pad token."""
    completion_mask: torch.Tensor
    """[batch, T] bool, True for sampled tokens, the stop token among them."""
    logprobs: torch.Tensor
    """[batch, T] float32, log_softmax(logits / temperature) of each token, 0 behind the end."""
    finished: torch.Tensor
    """[batch] bool, True where a stop token ended the completion."""
    values: torch.Tensor | None = None
    """[batch, T] float32, of the state before each token, 0 behind the end; where a critic was."""
    versions: torch.Tensor | None = None
    """[batch, T] int32, of the weights that sampled each token, -1 where that is unknown or there
    is none; where the caller says so."""

    def columns(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """The columns of a training batch, on `device`, or where they are."""
        held = {
            columns.COMPLETION_IDS: self.completion_ids,
            columns.COMPLETION_MASK: self.completion_mask,
            columns.SAMPLER_LOGPROBS: self.logprobs,
            columns.FINISHED: self.finished,
        }
        if self.values is not None:
            held[columns.SAMPLER_VALUES] = self.values
        if self.versions is not None:
            held[columns.WEIGHTS_VERSION] = self.versions
        return {name: column.to(device) for name, column in held.items()}


Finish = Literal["stop", "length", "aborted", "error"]
"""A stop token was sampled; max_new_tokens were; the row was taken out; its logits were not finite.
"""
Likeliest = list[tuple[int, float]]
"""Tokens and their log-probs, the likeliest first."""


class Tokens(NamedTuple):
    """Tokens of one completion, with their log-probs and the weights' versions, if kept."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    likeliest: list[Likeliest] = []  # noqa: RUF012  (never written to)
    """The likeliest tokens at the place of each, where the row's settings ask for them."""
    finish: Finish | None = None
    """Why there will be no more of them; None where there may be."""

    def behind(self, start: int) -> Tokens:
        """Those from the token `start` on."""
        return Tokens(
            self.token_ids[start:], self.logprobs[start:], self.versions[start:],
            self.likeliest[start:], self.finish,
        )  # fmt: skip


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
    ids, mask = pad_right(token_ids, params.pad_token_id)
    values, _ = pad_right(logprobs, 0.0, torch.float32)
    stops = set(params.stop_token_ids)
    finished = torch.tensor([row[-1] in stops for row in token_ids])
    return Completions(ids, mask, values, finished)
