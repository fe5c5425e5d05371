"""Log-probs and entropy of given tokens under a causal language model, with gradient or without.

Padding, wherever it lies, never reaches the model, and a prompt that several rows share is read
once (`packing.py`; models whose attention cannot be laid out get right-padded rows). The
head runs only at the positions that predict a wanted token. When there are many such
positions the head runs in chunks whose logits are computed again in the backward pass, so that no
[tokens, vocab] tensor is held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rllib_llm.modules.images import Shown
from rllib_llm.modules.model_source import text_config
from rllib_llm.modules.packing import TokenRows, WantedTokens, completion_rows, text_rows
from rllib_llm.modules.routers import Routing
from rllib_llm.modules.towers import seen_hidden
from rllib_llm.modules.trunk import take_apart, wanted_hidden, wanted_tokens
from rllib_llm.numerics.kl import full_kl
from rllib_llm.numerics.token_stats import in_chunks, token_stats
from rllib_llm.shared.errors import require

# Logits that one chunk may hold when the caller does not say: 2^26 float32 are 256 MiB. In half
# precision four times as many, 512 MiB: beside fast products, computing them again weighs more.
_CHUNK_LOGITS = 2**26
_HALF_CHUNKS = 4


@dataclass
class CompletionOutputs:
    """A policy's outputs for completions; 0 wherever the completion mask is False.

    logprobs [batch, completion_len] float32; entropy [batch, completion_len] float32 in nats, or
    None; hidden [batch, completion_len, hidden], the trunk's last state at the position that
    predicts the token (the state that V_t judges), or None; full_kl [batch, completion_len]
    float32, the exact KL from a reference over the whole vocabulary, nats, or None; distillation:
    three such columns, see `numerics.distillation.divergence_stats`, or None; likeliest: ids and
    log-probs [batch, completion_len, k] of the k likeliest tokens, or None. num_computed:
    tokens that went through the trunk, num_padding of them padding.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    hidden: Tensor | None = None
    full_kl: Tensor | None = None
    distillation: tuple[Tensor, ...] | None = None
    likeliest: tuple[Tensor, Tensor] | None = None
    num_computed: int = 0
    num_padding: int = 0


@dataclass(frozen=True)
class ReferencePolicy:
    """A frozen policy: a causal LM, and the context in which it is the reference.

    The context is that of adapters switched off where the reference is the policy's own trunk.
    """

    model: nn.Module
    context: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True)
class Teacher:
    """A teacher, with which a student is compared token by token.

    beta: of `generalized_jsd`. policy: the teacher, or None where its likeliest tokens are known,
    `top_ids` and `top_logprobs` [batch, completion_len, k]. prompts: ids and mask [batch, length],
    left-padded, that it reads instead of the student's; None: the same.
    """

    beta: float
    policy: ReferencePolicy | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    prompts: tuple[Tensor, Tensor] | None = None


def score_completions(
    model: nn.Module, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
    completion_mask: Tensor, *, temperature: float | Tensor = 1.0, entropy: bool = False,
    hidden: bool = False, full_kl_to: ReferencePolicy | None = None,
    distill_to: Teacher | None = None, likeliest: int = 0, logits_chunk_tokens: int | None = None,
    shown: Shown | None = None, routing: Routing | None = None,
) -> CompletionOutputs:  # fmt: skip
    """Log-probs (entropy, hidden states) of completions under `model`, an `AutoModelForCausalLM`.

    Prompts [batch, prompt_len] are left-padded, completions [batch, completion_len] right-padded,
    masks bool. Tokens masked out between masked-in ones (tool output) are read but not scored.
    Logits are divided by `temperature`, of all or [batch] of each row; where rows have theirs, no
    distributions are compared. Log-softmax is float32. `logits_chunk_tokens` is the number
    of positions whose logits exist at one time, by default as many as make 256 MiB, in half
    precision 512. Dropout is as the model's mode says. Works under grad and no_grad; the result
    does not depend on padding or chunks beyond rounding. The gradients of `full_kl` and of the
    divergence from the teacher flow into `model` only. `shown`: what the prompts show. `routing`:
    of a mixture of experts, in the pass of `model` alone.

    Raises ValueError for a row without a prompt token.
    """
    rows = completion_rows(prompt_ids, prompt_mask, completion_ids, completion_mask)
    rows = replace(rows, shown=shown, is_traced=routing is not None)
    run = replace(_run(model, rows, hidden, routing), asked_chunk_tokens=logits_chunk_tokens)
    wanted = run.wanted
    logprobs, entropies = _stats(run, temperature, entropy)
    full, distilled = None, None
    if isinstance(temperature, Tensor):
        assert full_kl_to is None and distill_to is None and not likeliest, "one for all rows"
        temperature = 1.0
    if full_kl_to is not None:
        (kl,) = _beside(run, full_kl_to, rows, temperature,
                        lambda logits, others: (full_kl(logits, others),))  # fmt: skip
        full = wanted.unpack(kl)
    if distill_to is not None:
        if distill_to.prompts is not None:
            rows = completion_rows(*distill_to.prompts, completion_ids, completion_mask)
        stats = _distillation(run, distill_to, rows, temperature)
        distilled = tuple(map(wanted.unpack, stats))
    top = _likeliest(run, likeliest, temperature) if likeliest else None
    return CompletionOutputs(
        likeliest=top and (wanted.unpack(top[0]), wanted.unpack(top[1])),
        logprobs=wanted.unpack(logprobs),
        entropy=None if entropies is None else wanted.unpack(entropies),
        hidden=None if run.hidden is None else wanted.unpack(run.hidden),
        full_kl=full,
        distillation=distilled,
        num_computed=wanted.input_ids.numel(),
        num_padding=wanted.num_padding,
    )


def text_logprobs(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor | None = None,
    *, logits_chunk_tokens: int | None = None, shown: Shown | None = None,
    routing: Routing | None = None,
) -> Tensor:  # fmt: skip
    """Log-prob of each token of given texts after those before it, float32 [texts, length].

    `input_ids` [texts, length], padded on either side, `attention_mask` and `loss_mask` bool. 0
    where the loss mask is False and at each text's first token, which nothing predicts: a mean over
    targets must not count it. `routing`: as in `score_completions`.
    """
    rows = text_rows(input_ids, attention_mask, loss_mask)
    rows = replace(rows, shown=shown, is_traced=routing is not None)
    run = replace(_run(model, rows, False, routing), asked_chunk_tokens=logits_chunk_tokens)
    logprobs, _ = _stats(run, 1.0, False)
    return run.wanted.unpack(logprobs)


def completion_hidden(
    trunk: nn.Module, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
    completion_mask: Tensor,
) -> Tensor:  # fmt: skip
    """The state of a bare trunk (`AutoModel`) that V_t judges, [batch, completion_len, hidden].

    The same as `score_completions(..., hidden=True).hidden`, for a critic with its own trunk.
    """
    rows = completion_rows(prompt_ids, prompt_mask, completion_ids, completion_mask)
    wanted = wanted_tokens(trunk, rows)
    return wanted.unpack(wanted_hidden(trunk, wanted))


@dataclass(frozen=True)
class _Run:
    """One pass's outputs at the positions that predict the wanted tokens.

    `logits_of` turns any slice of `states` [tokens, ...] into logits [tokens, vocab], which are
    free to be overwritten where `makes_logits`; else the states are logits themselves.
    asked_chunk_tokens: `logits_chunk_tokens` of `score_completions`.
    """

    wanted: WantedTokens
    states: Tensor
    logits_of: Callable[[Tensor], Tensor]
    makes_logits: bool
    hidden: Tensor | None
    default_chunk_tokens: int
    asked_chunk_tokens: int | None = None

    @property
    def chunk_tokens(self) -> int:
        """Positions whose logits exist at one time."""
        return self.asked_chunk_tokens or self.default_chunk_tokens


def _run(model: Any, rows: TokenRows, hidden: bool, routing: Routing | None = None) -> _Run:
    chunk_tokens = max(1, _CHUNK_LOGITS // text_config(model).vocab_size)
    halves = take_apart(model)
    if rows.shown is not None:
        require(routing is None, "images", ..., "be left out with a mixture's routers",
                "their experts are neither stored nor balanced",
                "Leave out router_aux_coeff and routing_replay")  # fmt: skip
        assert halves is not None, "a model that sees is taken apart, or refused"
        wanted, states = seen_hidden(model, rows)
        return _Run(wanted, states, halves.logits, True, states if hidden else None, chunk_tokens)
    trunk = model if halves is None else halves.trunk
    wanted = wanted_tokens(trunk, rows, dense=halves is not None)
    with nullcontext() if routing is None else routing.around(model, wanted):
        if halves is not None:
            states = wanted_hidden(trunk, wanted)
        else:
            output = model(input_ids=wanted.input_ids, use_cache=False, output_hidden_states=hidden)
    if halves is not None:
        return _Run(wanted, states, halves.logits, True, states if hidden else None, chunk_tokens)
    last = wanted.pick(output.hidden_states[-1]) if hidden else None
    logits = wanted.pick(output.logits)
    return _Run(wanted, logits, lambda states: states, False, last, chunk_tokens)


def _stats(
    run: _Run, temperature: float | Tensor, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [tokens] and entropies [tokens] or None."""
    of_tokens: tuple[Tensor, ...] = ()
    if isinstance(temperature, Tensor):
        rows = run.wanted.places // run.wanted.shape[1]
        each = run.states.new_ones(len(run.wanted.targets), 1, dtype=torch.float32)
        each[: len(rows), 0] = temperature.to(each)[rows]
        of_tokens, temperature = (each,), 1.0
    assert temperature > 0, temperature
    of_all = temperature

    def stats_of(states: Tensor, targets: Tensor, *divisor: Tensor) -> tuple[Tensor, ...]:
        logits = run.logits_of(states)
        if divisor:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / divisor[0]
        logprobs, entropies = token_stats(
            logits, targets, of_all, entropy, consume=run.makes_logits or bool(divisor)
        )
        return (logprobs,) if entropies is None else (logprobs, entropies)

    is_large = run.asked_chunk_tokens is None and run.states.element_size() == 2
    per_token = (run.states, run.wanted.targets, *of_tokens)
    results = in_chunks(stats_of, per_token, run.chunk_tokens * (_HALF_CHUNKS if is_large else 1))
    return results[0], (results[1] if entropy else None)


def _likeliest(run: _Run, count: int, temperature: float) -> tuple[Tensor, ...]:
    """Ids and log-probs [tokens, count] of the likeliest tokens."""

    def top_of(states: Tensor) -> tuple[Tensor, ...]:
        logprobs = (run.logits_of(states).float() / temperature).log_softmax(dim=-1)
        values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
        return ids.int(), values

    return in_chunks(top_of, (run.states,), run.chunk_tokens)


def _distillation(
    run: _Run, teacher: Teacher, rows: TokenRows, temperature: float
) -> tuple[Tensor, ...]:
    """`divergence_stats` [tokens] of what `run` computed, or `likeliest_stats`."""
    from rllib_llm.numerics.distillation import divergence_stats, likeliest_stats  # few need it

    if teacher.policy is not None:
        compare = functools.partial(divergence_stats, beta=teacher.beta)
        return _beside(run, teacher.policy, rows, temperature, compare)
    assert teacher.top_ids is not None and teacher.top_logprobs is not None

    def stats_of(states: Tensor, ids: Tensor, logprobs: Tensor) -> tuple[Tensor, ...]:
        logits = run.logits_of(states).float() / temperature
        return likeliest_stats(logits, ids, logprobs, teacher.beta)

    likeliest = (
        each.flatten(0, 1).index_select(0, run.wanted.places)
        for each in (teacher.top_ids, teacher.top_logprobs)
    )
    states = run.wanted.without_surplus(run.states)
    return in_chunks(stats_of, (states, *likeliest), run.chunk_tokens)


def _beside(
    run: _Run, reference: ReferencePolicy, rows: TokenRows, temperature: float,
    compare: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:  # fmt: skip
    """`compare(logits, the reference's)`, each [tokens], of what `run` computed and of the same
    tokens in `rows`; no gradient in the reference."""
    with torch.no_grad(), reference.context():
        ref_run = _run(reference.model, rows, False)

    def compared(states: Tensor, ref_states: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad(), reference.context():
            ref_logits = ref_run.logits_of(ref_states).float() / temperature
        return compare(run.logits_of(states).float() / temperature, ref_logits)

    # The reference may read its rows in the other form, and have no surplus or more.
    both = (each.wanted.without_surplus(each.states) for each in (run, ref_run))
    return in_chunks(compared, tuple(both), run.chunk_tokens)
