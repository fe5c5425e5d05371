"""Log-prob and entropy of single tokens, holding as little of the logits as possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


def token_stats(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target [tokens] and, on request, entropy of its distribution, nats.

    float32 of logits / temperature, whatever the dtype of `logits` [tokens, vocab].
    """
    logprobs, entropies = _TokenStats.apply(logits, targets, temperature, entropy)
    return logprobs, entropies


def in_chunks(
    function: Callable[..., tuple[Tensor, ...]], per_token: tuple[Tensor, ...], chunk_tokens: int
) -> tuple[Tensor, ...]:
    """`function` of tensors [tokens, ...], applied to `chunk_tokens` tokens at a time.

    With more than one chunk, each is computed again in the backward pass instead of being held.
    """
    if chunk_tokens < 1:
        raise ValueError(
            f"logits_chunk_tokens={chunk_tokens!r} must be at least 1: it is the number of "
            "positions whose logits exist at one time. Use None to have it chosen."
        )
    if len(per_token[0]) <= chunk_tokens:
        return function(*per_token)
    chunks = zip(*(tensor.split(chunk_tokens) for tensor in per_token), strict=True)
    parts = [
        checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


class _TokenStats(torch.autograd.Function):
    """One float32 [tokens, vocab] tensor is kept for the backward pass; autograd would keep three.

    With lp = log_softmax(logits / temperature), p = exp(lp), y the target, H the entropy:
    d lp_y / d logits_v = (1[v = y] - p_v) / temperature,
    d H / d logits_v = -p_v (lp_v + H) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
        all_logprobs = torch.log_softmax(scaled, dim=-1)
        logprobs = all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        entropies = None
        if entropy:
            entropies = torch.special.entr(all_logprobs.exp()).sum(dim=-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(all_logprobs, targets, entropies)
        ctx.temperature, ctx.logits_dtype = temperature, logits.dtype
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        all_logprobs, targets, entropies = ctx.saved_tensors
        probs = all_logprobs.exp()
        grad = None
        if grad_entropies is not None:
            grad = torch.special.entr(probs) - probs * entropies.unsqueeze(-1)
            grad.mul_(grad_entropies.unsqueeze(-1))
        if grad_logprobs is not None:
            upstream = grad_logprobs.unsqueeze(-1)
            logprob_grad = probs.mul_(-upstream).scatter_add_(-1, targets.unsqueeze(-1), upstream)
            grad = logprob_grad if grad is None else grad.add_(logprob_grad)
        if grad is not None:
            grad = grad.div_(ctx.temperature).to(ctx.logits_dtype)
        return grad, None, None, None
