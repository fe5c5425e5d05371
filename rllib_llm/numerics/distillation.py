"""Divergences of a student from its teacher, per token: over the vocabulary, or over the teacher's
likeliest tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def generalized_jsd(logprobs: Tensor, teacher_logprobs: Tensor, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence over the last axis, nats, float32 [...].

    beta = 0: KL(teacher || student), 1: KL(student || teacher), else beta KL(teacher || m) +
    (1 - beta) KL(student || m) with m = (1 - beta) student + beta teacher (Agarwal et al. 2024,
    eq. 1, in TRL's orientation). Log-probs [..., vocab]; events of probability 0 add nothing.
    """
    assert 0 <= beta <= 1, beta
    if beta == 0:
        return _kl(teacher_logprobs, logprobs)
    if beta == 1:
        return _kl(logprobs, teacher_logprobs)
    mixture = torch.logaddexp(
        logprobs + math.log1p(-beta), teacher_logprobs + math.log(beta)
    )
    return beta * _kl(teacher_logprobs, mixture) + (1 - beta) * _kl(logprobs, mixture)


def _kl(logprobs: Tensor, others: Tensor) -> Tensor:
    probs = logprobs.exp()
    is_there = probs > 0
    # What is 0 must not reach the gradient as 0 * inf either.
    gap = logprobs.where(is_there, 0.0) - others.where(is_there, 0.0)
    return (probs * gap).sum(dim=-1)


def divergence_stats(
    logits: Tensor, teacher_logits: Tensor, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(divergence, KL(student || teacher), whether both like the same token best) [tokens] float32.

    Both logits [tokens, vocab], already divided by the temperature; where one model has more ids,
    which no tokenizer gives, these are left out. The last two are without gradient.
    """
    common = min(logits.shape[-1], teacher_logits.shape[-1])
    logprobs, teacher_logprobs = (
        each[..., :common].float().log_softmax(dim=-1) for each in (logits, teacher_logits)
    )
    divergence = generalized_jsd(logprobs, teacher_logprobs, beta)
    with torch.no_grad():
        kl = divergence.detach() if beta == 1 else _kl(logprobs, teacher_logprobs)
        agrees = logprobs.argmax(dim=-1) == teacher_logprobs.argmax(dim=-1)
    return divergence, kl, agrees.float()


def likeliest_stats(
    logits: Tensor, ids: Tensor, teacher_logprobs: Tensor, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `divergence_stats`, of the distributions over the teacher's likeliest tokens and one event
    for all others.

    ids, teacher_logprobs [tokens, k]: the teacher's, from the likeliest on; -inf where it named
    fewer. (TRL's `_add_tail_bucket`: without the rest two that agree on k tokens' odds would
    be the same, and with k = 1 any two.)
    """
    named = teacher_logprobs > -torch.inf
    all_logprobs = logits.float().log_softmax(dim=-1)
    own = all_logprobs.gather(-1, ids.long()).masked_fill(~named, -torch.inf)
    logprobs, teacher = _with_rest(own), _with_rest(teacher_logprobs.float())
    divergence = generalized_jsd(logprobs, teacher, beta)
    with torch.no_grad():
        kl = divergence.detach() if beta == 1 else _kl(logprobs, teacher)
        agrees = all_logprobs.argmax(dim=-1) == ids[..., 0]
    return divergence, kl, agrees.float()


def _with_rest(logprobs: Tensor) -> Tensor:
    """[..., k + 1]: the last is the log-probability of everything else."""
    total = logprobs.logsumexp(dim=-1, keepdim=True).clamp(max=-1e-7)
    rest = (-torch.expm1(total)).log()
    return torch.cat([logprobs, rest], dim=-1)


def sampled_advantages(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log teacher - log student of each sampled token, [batch, T], 0 where masked out: the reward
    whose policy gradient is that of -KL(student || teacher) token by token (Gu et al. 2024,
    MiniLLM, eq. 3, without what later tokens earn; Lu 2025, "On-Policy Distillation")."""
    return (teacher_logprobs - logprobs).where(mask, 0.0)
