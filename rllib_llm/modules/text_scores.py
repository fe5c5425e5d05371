"""Log-probs of given texts: what `echo` of a server returns of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from rllib_llm.modules.model_source import text_config
from rllib_llm.modules.packing import recurring_size
from rllib_llm.modules.trunk import padded_hidden, take_apart, wants_recurring_sizes

# Logits of so many positions at once: of a long text they need more memory than the model.
_BLOCK = 512


@dataclass(frozen=True)
class TextScores:
    """Log-probs of a text's tokens from the second on."""

    logprobs: list[float]
    """log_softmax(logits) of each token."""
    ranks: list[int]
    """Of each token among all at its place, 1 the likeliest."""
    top_ids: np.ndarray
    """[tokens, top] int64, the likeliest tokens at the place of each."""
    top_logprobs: np.ndarray
    """[tokens, top] float32, of the likeliest."""

    @property
    def likeliest(self) -> list[list[tuple[int, float]]]:
        """The likeliest tokens at the place of each: lists, which would be slow to pickle."""
        pairs = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        return [list(zip(*pair, strict=True)) for pair in pairs]


@torch.inference_mode()
def score_text(model: nn.Module, token_ids: Sequence[int], top: int) -> TextScores:
    """One forward pass over a text.

    Args:
        token_ids: at least one.
    """
    device = next(model.parameters()).device
    num = len(token_ids)
    ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=device)
    if wants_recurring_sizes(model):  # attention is causal: what follows changes nothing
        config = text_config(model)
        most = getattr(config, "max_position_embeddings", None) or num
        ids = F.pad(ids, (0, max(0, min(recurring_size(num), most) - num)))
    halves = take_apart(model)  # None: the model computes all logits at once
    if halves is None:
        outputs = model(input_ids=ids, use_cache=False).logits[0, : num - 1]
    else:
        outputs = padded_hidden(halves.trunk, ids)[0, : num - 1]
    logprobs: list[float] = []
    ranks: list[int] = []
    top_ids, top_logprobs = [], []
    for start in range(0, len(outputs), _BLOCK):
        part = outputs[start : start + _BLOCK]
        logits = part if halves is None else halves.logits(part)
        scores = torch.log_softmax(logits.float(), dim=-1)
        targets = ids[0, start + 1 : start + 1 + len(scores), None]
        own = scores.gather(1, targets)
        logprobs += own.squeeze(1).tolist()
        ranks += (1 + (scores > own).sum(dim=1)).tolist()
        values, tokens = scores.topk(min(top, scores.shape[1]), dim=-1)
        top_ids.append(tokens.cpu())
        top_logprobs.append(values.cpu())
    none = torch.empty(0, 0)
    ids_found, values_found = torch.cat(top_ids or [none]), torch.cat(top_logprobs or [none])
    return TextScores(logprobs, ranks, ids_found.numpy(), values_found.numpy())
