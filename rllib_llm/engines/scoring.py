"""Log-probs of texts that nobody samples: what `echo` of a server shows of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rllib_llm.engines.completions import Likeliest

# Logits of so many positions at once: of a long text they need more memory than the model.
_BLOCK = 512


@dataclass(frozen=True)
class Scores:
    """Of the tokens of a text from the second on: the first has nothing before it."""

    logprobs: list[float]
    """log_softmax(logits) of each token."""
    likeliest: list[Likeliest]
    """The likeliest tokens at the place of each."""


@torch.inference_mode()
def score_text(model: nn.Module, token_ids: Sequence[int], top: int) -> Scores:
    """One forward pass over a text.

    Args:
        model: causal LM of transformers.
        token_ids: at least one.
        top: how many of the likeliest tokens to tell.
    """
    device = next(model.parameters()).device
    ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    logprobs: list[float] = []
    likeliest: list[Likeliest] = []
    for start in range(0, len(logits), _BLOCK):
        scores = torch.log_softmax(logits[start : start + _BLOCK].float(), dim=-1)
        targets = ids[0, start + 1 : start + 1 + len(scores), None]
        logprobs += scores.gather(1, targets).squeeze(1).tolist()
        values, tokens = scores.topk(min(top, scores.shape[1]), dim=-1)
        likeliest += [
            list(zip(*pair, strict=True))
            for pair in zip(tokens.tolist(), values.tolist(), strict=True)
        ]
    return Scores(logprobs, likeliest)
