"""Log-probs and entropy of given tokens under a causal language model, with gradient or without.

Padding, wherever it lies, never reaches the model: rows are packed to the left, the trunk runs once
over them, and the head only at the positions that predict a wanted token. When there are many such
positions the head runs in chunks whose logits are computed again in the backward pass, so that no
[tokens, vocab] tensor is held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rllib_llm.modules.lm_head import take_apart, trunk_hidden

# Logits that one chunk may hold when the caller does not say: 2^26 float32 are 256 MiB.
_CHUNK_LOGITS = 2**26


@dataclass
class CompletionOutputs:
    """What a policy says about completions; 0 wherever the completion mask is False.

    logprobs [batch, completion_len] float32; entropy [batch, completion_len] float32 in nats, or
    None; hidden [batch, completion_len, hidden], the trunk's last state at the position that
    predicts the token (the state that V_t judges), or None.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    hidden: Tensor | None = None


def score_completions(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    hidden: bool = False,
    logits_chunk_tokens: int | None = None,
) -> CompletionOutputs:
    """Log-probs (entropy, hidden states) of completions under `model`, an `AutoModelForCausalLM`.

    Prompts [batch, prompt_len] are left-padded, completions [batch, completion_len] right-padded,
    masks bool. Tokens masked out between masked-in ones (tool output) are read but not scored.
    Logits are divided by `temperature`; log-softmax is float32. `logits_chunk_tokens` is the number
    of positions whose logits exist at one time, by default as many as make 256 MiB. Dropout is as
    the model's mode says. Works under grad and no_grad; the result does not depend on padding or
    chunks beyond rounding.

    Raises ValueError for a row without a prompt token.
    """
    wanted = _completion_tokens(prompt_ids, prompt_mask, completion_ids, completion_mask)
    logprobs, entropies, states = _score(model, wanted, temperature, entropy, logits_chunk_tokens)
    return CompletionOutputs(
        logprobs=wanted.unpack(logprobs),
        entropy=None if entropies is None else wanted.unpack(entropies),
        hidden=wanted.unpack(states) if hidden else None,
    )


def text_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    loss_mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    logits_chunk_tokens: int | None = None,
) -> Tensor:
    """Log-prob of each token of given texts after those before it, float32 [texts, length].

    `input_ids` [texts, length], padded on either side, `attention_mask` and `loss_mask` bool. 0
    where the loss mask is False and at each text's first token, which nothing predicts.
    """
    attended = attention_mask.bool()
    targets = attended if loss_mask is None else attended & loss_mask.bool()
    has_past = attended.cumsum(dim=1) > 1
    wanted = _pack(input_ids, attended, targets & has_past)
    logprobs, _, _ = _score(model, wanted, temperature, False, logits_chunk_tokens)
    return wanted.unpack(logprobs)


def completion_hidden(
    trunk: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
) -> Tensor:
    """The state of a bare trunk (`AutoModel`) that V_t judges, [batch, completion_len, hidden].

    The same as `score_completions(..., hidden=True).hidden`, for a critic with a trunk of its own.
    """
    wanted = _completion_tokens(prompt_ids, prompt_mask, completion_ids, completion_mask)
    return wanted.unpack(wanted.pick(trunk_hidden(trunk, wanted.input_ids)))


@dataclass(frozen=True)
class _WantedTokens:
    """Right-padded rows for the model, and where in them (and in the result) the wanted tokens are.

    input_ids [batch, length]; targets, predicted_at (index into the flattened input_ids) and
    places (index into the flattened result): int64 [tokens].
    """

    input_ids: Tensor
    targets: Tensor
    predicted_at: Tensor
    places: Tensor
    shape: tuple[int, int]

    def pick(self, per_position: Tensor) -> Tensor:
        """[batch, length, ...] -> [tokens, ...] at the positions that predict the wanted tokens."""
        return per_position.flatten(0, 1).index_select(0, self.predicted_at)

    def unpack(self, per_token: Tensor) -> Tensor:
        """[tokens, ...] -> [batch, result length, ...], 0 elsewhere."""
        batch, length = self.shape
        whole = per_token.new_zeros((batch * length, *per_token.shape[1:]))
        return whole.index_copy(0, self.places, per_token).unflatten(0, self.shape)


def _completion_tokens(
    prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor
) -> _WantedTokens:
    prompt_mask, completion_mask = prompt_mask.bool(), completion_mask.bool()
    if not bool(prompt_mask.any(dim=1).all()):
        row = int((~prompt_mask.any(dim=1)).nonzero()[0])
        raise ValueError(
            f"prompt_mask[{row}]=all False must have a True: a completion's first token is "
            "predicted by the prompt's last. Put a BOS token into empty prompts."
        )
    # Everything up to the last masked-in token is context, tool output between them included.
    is_context = completion_mask.flip(1).cumsum(dim=1).flip(1) > 0
    return _pack(
        torch.cat([prompt_ids, completion_ids], dim=1),
        torch.cat([prompt_mask, is_context], dim=1),
        torch.cat([torch.zeros_like(prompt_mask), completion_mask], dim=1),
        num_leading=prompt_ids.shape[1],
    )


def _pack(ids: Tensor, attended: Tensor, wanted: Tensor, num_leading: int = 0) -> _WantedTokens:
    """Rows with their attended tokens moved to the left; the first `num_leading` columns are not
    part of the result."""
    lengths = attended.sum(dim=1)
    longest = max(1, int(lengths.max()))
    order = (~attended).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    is_padding = torch.arange(longest, device=ids.device) >= lengths.unsqueeze(1)
    input_ids = ids.gather(1, order)
    # Any id will do, but models warn about a pad id that comes without an attention mask.
    filler = input_ids[:, :1].masked_fill(lengths.unsqueeze(1) == 0, 0)
    input_ids = torch.where(is_padding, filler, input_ids)

    rows, cols = wanted.nonzero(as_tuple=True)
    packed_at = attended.cumsum(dim=1)[rows, cols] - 1
    result_length = ids.shape[1] - num_leading
    return _WantedTokens(
        input_ids=input_ids,
        targets=ids[rows, cols],
        predicted_at=rows * longest + packed_at - 1,
        places=rows * result_length + cols - num_leading,
        shape=(ids.shape[0], result_length),
    )


def _score(
    model: nn.Module,
    wanted: _WantedTokens,
    temperature: float,
    entropy: bool,
    logits_chunk_tokens: int | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probs [tokens], entropies [tokens] or None, and hidden states [tokens, hidden]."""
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature!r} must be above 0: logits are divided by it. "
            "Use the temperature that the completions were sampled with."
        )
    halves = take_apart(model)
    if halves is None:
        whole = model(input_ids=wanted.input_ids, use_cache=False, output_hidden_states=True)
        logits = wanted.pick(whole.logits)
        return *_token_stats(logits, wanted.targets, temperature, entropy), wanted.pick(
            whole.hidden_states[-1]
        )

    def stats_of(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        return _token_stats(halves.logits(states), targets, temperature, entropy)

    states = wanted.pick(halves.hidden(wanted.input_ids))
    if logits_chunk_tokens is None:
        logits_chunk_tokens = max(1, _CHUNK_LOGITS // model.config.get_text_config().vocab_size)
    return *_in_chunks(stats_of, states, wanted.targets, logits_chunk_tokens), states


def _in_chunks(
    stats_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]],
    states: Tensor,
    targets: Tensor,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor | None]:
    """`stats_of` applied to chunks of tokens, each computed again in the backward pass."""
    if chunk_tokens < 1:
        raise ValueError(
            f"logits_chunk_tokens={chunk_tokens!r} must be at least 1: it is the number of "
            "positions whose logits exist at one time. Use None to have it chosen."
        )
    if len(targets) <= chunk_tokens:
        return stats_of(states, targets)
    parts = [
        checkpoint(stats_of, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(states.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), None if entropies[0] is None else torch.cat(entropies)


def _token_stats(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logprobs, entropies = _TokenStats.apply(logits, targets, temperature, entropy)
    return logprobs, entropies


class _TokenStats(torch.autograd.Function):
    """Log-prob of each target, and entropy of its distribution, from logits [tokens, vocab].

    One float32 [tokens, vocab] tensor is kept for the backward pass, where autograd would keep
    three. With lp = log_softmax(logits / temperature), p = exp(lp), H = entropy:
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
