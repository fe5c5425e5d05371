"""Log-prob and entropy of single tokens, holding as little of the logits as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


def token_stats(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    consume: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target [tokens] and, on request, entropy of its distribution, nats.

    Of logits / temperature in float32, whatever the dtype of `logits` [tokens, vocab] (float64
    stays). With `consume` the backward pass writes the gradient over the logits, which nothing else
    may need: half the memory. Autograd refuses a second backward pass then.
    """
    logprobs, entropies = _TokenStats.apply(logits, targets, temperature, entropy, consume)
    return logprobs, entropies


def in_chunks(
    function: Callable[..., tuple[Tensor, ...]], per_token: tuple[Tensor, ...], chunk_tokens: int
) -> tuple[Tensor, ...]:
    """`function` of tensors [tokens, ...], applied to `chunk_tokens` tokens at a time.

    With more than one chunk, each is computed again in the backward pass instead of being held.
    """
    assert chunk_tokens >= 1, chunk_tokens
    if len(per_token[0]) <= chunk_tokens:
        return function(*per_token)
    chunks = zip(*(tensor.split(chunk_tokens) for tensor in per_token), strict=True)
    parts = [
        checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


class _TokenStats(torch.autograd.Function):
    """Keeps the logits, in their own dtype, and goes through them in blocks that fit a cache.

    Autograd would keep three float32 copies. (torch's log_softmax is one operation, but casts
    bfloat16 before it, and on a processor adds up less exactly: of 150,000 tokens, 2e-5 nats
    instead of 2e-6.) With x = logits / temperature, lse = logsumexp(x), lp = x - lse, p = exp(lp),
    y the target and H the entropy:
    d lp_y / d logits_v = (1[v = y] - p_v) / temperature,
    d H / d logits_v = -p_v (lp_v + H) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        consume: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        lse = logits.new_empty(len(logits), dtype=dtype)
        logprobs, entropies = torch.empty_like(lse), torch.empty_like(lse)
        for rows in _blocks(logits):
            scaled = _scaled(logits[rows], temperature, dtype)
            chosen = scaled.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1)
            largest = scaled.amax(dim=-1)
            below = scaled.sub_(largest.unsqueeze(-1)).clamp_(min=_LEAST)
            weights = below.exp()
            total = weights.sum(dim=-1)
            log_total = total.log()
            lse[rows] = largest + log_total
            logprobs[rows] = chosen - largest - log_total
            if entropy:
                entropies[rows] = log_total - weights.mul_(below).sum(dim=-1) / total
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, lse, entropies)
        ctx.temperature, ctx.consume = temperature, consume
        return logprobs, entropies if entropy else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        logits, targets, lse, entropies = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        grad = logits.detach() if ctx.consume else torch.empty_like(logits)
        for rows in _blocks(logits):
            if ctx.temperature == 1.0:
                all_logprobs = logits[rows] - lse[rows].unsqueeze(-1)
            else:
                all_logprobs = _scaled(logits[rows], ctx.temperature, lse.dtype)
                all_logprobs.sub_(lse[rows].unsqueeze(-1))
            upstream = grad_logprobs[rows].unsqueeze(-1)
            if grad_entropies is None:
                block = all_logprobs.exp_().mul_(-upstream)
            else:
                entropy_grad = grad_entropies[rows].unsqueeze(-1)
                probs = all_logprobs.clamp_(min=_LEAST).exp()
                surplus = all_logprobs.add_(entropies[rows].unsqueeze(-1)).mul_(entropy_grad)
                block = probs.mul_(surplus.add_(upstream).neg_())
            # One number a row: `scatter_add_` would take twenty times as long.
            chosen = targets[rows].unsqueeze(-1)
            block.scatter_(-1, chosen, block.gather(-1, chosen).add_(upstream))
            grad[rows] = block if ctx.temperature == 1.0 else block.div_(ctx.temperature)
        return grad, None, None, None, None


def _scaled(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """logits / temperature in `dtype`, which may be overwritten; a pass less where it is 1."""
    if temperature == 1.0:
        return logits.to(dtype, copy=True)
    return logits.to(dtype) / temperature


# Log-probs below this are 0 as probabilities; it keeps 0 * log 0 at 0 for forbidden tokens.
_LEAST = -1e4


def _blocks(logits: Tensor) -> Iterator[slice]:
    num_rows, vocab = logits.shape
    rows_per_block = max(1, (2**18 if logits.device.type == "cpu" else 2**25) // vocab)
    for start in range(0, num_rows, rows_per_block):
        yield slice(start, start + rows_per_block)
