"""How far a quantised model has drifted from the model it was made from."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def next_token_drift(
    model: PreTrainedModel, exact_model: PreTrainedModel, ids: Tensor, mask: Tensor
) -> dict[str, float]:
    """Drift of the next-token distributions of a causal LM on right-padded texts.

    ids [N, L] int64, mask [N, L] bool; means over all tokens with mask True.

    Returns:
        kl: KL(exact || model) [nats]; top1: share of tokens at which both rank the same token
        first.
    """
    attention_mask = mask.long()
    logprobs, exact_logprobs = (
        m(
            input_ids=ids.to(m.device),
            attention_mask=attention_mask.to(m.device),
            use_cache=False,
        )
        .logits.to(ids.device)[mask]
        .float()
        .log_softmax(-1)
        for m in (model, exact_model)
    )
    kl = (exact_logprobs.exp() * (exact_logprobs - logprobs)).sum(-1)
    same = logprobs.argmax(-1) == exact_logprobs.argmax(-1)
    return {"kl": kl.mean().item(), "top1": same.float().mean().item()}


def score_drift(scores: Tensor, exact_scores: Tensor) -> dict[str, float]:
    """Drift of a reward model's scores [N] from the exact ones [N].

    Returns:
        rank_corr: Spearman's rank correlation (ties share their mean rank; NaN where all scores of
        one side are equal); max_abs: largest difference of two scores of one text.
    """
    return {
        "rank_corr": rank_correlation(scores, exact_scores),
        "max_abs": (scores - exact_scores).abs().max().item(),
    }


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's rank correlation of x [N] and y [N]: Pearson's of their ranks."""
    x, y = (_ranks(v) - (len(v) + 1) / 2 for v in (x, y))
    return ((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt()).item()


def _ranks(values: Tensor) -> Tensor:
    """Ranks 1..N [N] float64; equal values share the mean of their ranks."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts - 1) / 2)[inverse]
