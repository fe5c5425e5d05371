"""The next token of each row of a batch: pure functions of logits, and what they need of the rows.

    logits ─ bias, penalties ─ temperature ─▶ log-probs ─ forbidden, min-p, top-k, top-p ─▶ token

One exponential per logit serves both the log-probs and the draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rllib_llm.engines.batch_rows import BatchRows, RowSettings
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Guide

Likeliest = tuple[torch.Tensor, torch.Tensor]
"""Ids [n, k] int64 and log-probs [n, k] float32 of the likeliest tokens."""


class Chosen(NamedTuple):
    """The next tokens of n rows."""

    tokens: torch.Tensor
    """[n] int64."""
    logprobs: torch.Tensor
    """[n] float32."""
    ended: torch.Tensor | None
    """[n] bool, which of them are stop tokens; None where no row has any."""
    likeliest: list[tuple[torch.Tensor | None, Likeliest]]
    """Which rows ask for the likeliest tokens, [m] int64 or None for all, and these."""


def choose_for_rows(
    rows: BatchRows, logits: torch.Tensor, noise: torch.Tensor | None, start: int, clock: int,
    guides: Mapping[int, Guide], counts: TokenCounts,
) -> Chosen:  # fmt: skip
    """Tokens of the rows from `start` on, by the settings and the guide that each has.

    Args:
        logits: [n, vocab], of these rows.
        noise: [n] uniforms, None where all rows are greedy.
        start: the first row.
        guides: of rows that have one, by their columns of the buffers.
        counts: of rows with penalties.
    """
    columns, born, alive = rows.columns[start:], rows.born[start:], rows.alive[start:]
    guided, allowed = [], None
    if guides:
        is_alive = alive.tolist()
        guided = [
            (i, guides[column]) for i, column in enumerate(columns.tolist())
            if column in guides and is_alive[i]
        ]  # fmt: skip
    if guided:
        allowed = torch.ones(logits.shape, dtype=torch.bool)
        for i, guide in guided:
            own = guide.allowed()
            allowed[i, : len(own)] = own[: allowed.shape[1]]
            allowed[i, len(own) :] = False
        allowed = allowed.to(logits.device)
    parts = list(rows.by_settings(start))
    if parts[0][1] is None:
        age = clock - born
        chosen = _choose_alike(parts[0][0], columns, logits, noise, age, allowed, counts)
    else:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=rows.device)
        ended = torch.zeros(len(logits), dtype=torch.bool, device=rows.device)
        chosen = Chosen(tokens, torch.empty(len(logits), device=rows.device), ended, [])
        for setting, index in parts:
            place = torch.from_numpy(index).to(rows.device)
            own_noise = None if noise is None else noise[place]
            masks = None if allowed is None else allowed[place]
            part = _choose_alike(
                setting, columns[index], logits[place], own_noise, clock - born[index], masks,
                counts,
            )  # fmt: skip
            chosen.tokens[place], chosen.logprobs[place] = part.tokens, part.logprobs
            if part.ended is not None:
                ended[place] = part.ended
            chosen.likeliest.extend((place, found) for _, found in part.likeliest)
    if guided:
        taken = chosen.tokens.tolist()
        for i, guide in guided:
            guide.take(taken[i])
    if counts:
        counts.record(columns, chosen.tokens, alive)
    return chosen


def _choose_alike(
    setting: RowSettings, columns: np.ndarray, logits: torch.Tensor, noise: torch.Tensor | None,
    age: np.ndarray, allowed: torch.Tensor | None, counts: TokenCounts,
) -> Chosen:  # fmt: skip
    """`choose_for_rows`, for rows with the same settings, which have sampled `age` [n] tokens."""
    params, stops = setting.params, setting.stops
    if setting.adjusts:
        logits = counts.adjusted(columns, logits, setting)
    forbidden = forbidden_rows = None
    if stops is not None:
        young = age < params.min_new_tokens
        if young.any():
            forbidden = stops
            if not young.all():
                forbidden_rows = torch.from_numpy(young).to(logits.device)
    tokens, logprobs, found = choose_tokens(
        logits, noise, params, forbidden, forbidden_rows, allowed
    )
    ended = None if stops is None else (tokens.unsqueeze(1) == stops).any(dim=1)
    return Chosen(tokens, logprobs, ended, [] if found is None else [(None, found)])


# --- penalties -----------------------------------------------------------------------------------


class TokenCounts:
    """Counts of the tokens that have occurred in rows with penalties; false without such rows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._slots: dict[int, int] = {}  # lines of the tensors, by column of the buffers
        self._free: list[int] = []
        # [slots, vocab]: how often a token was sampled, and whether it stands in the prompt.
        self._sampled = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompted = self._sampled.bool()

    def __bool__(self) -> bool:
        return bool(self._slots)

    def begin(self, column: int, prompt: torch.Tensor, sampled: torch.Tensor) -> None:
        """Counts a row from now on.

        Args:
            column: of the buffers, which names the row.
            prompt, sampled: its token ids so far, [p] and [t] int64.
        """
        if not self._free:
            held = len(self._sampled)
            more = max(8, held)
            self._sampled, self._prompted = (
                torch.cat([lines, lines.new_zeros(more, lines.shape[1])])
                for lines in (self._sampled, self._prompted)
            )
            self._free += range(held, held + more)
        self._slots[column] = slot = self._free.pop()
        self._prompted[slot] = False
        self._prompted[slot, prompt] = True
        self._sampled[slot] = torch.bincount(sampled, minlength=self._sampled.shape[1])

    def record(self, columns: np.ndarray, tokens: torch.Tensor, alive: torch.Tensor) -> None:
        """Counts tokens [n] that were sampled for rows [n], where these are alive [n]."""
        counted = [i for i, column in enumerate(columns.tolist()) if column in self._slots]
        place = torch.tensor(counted, device=tokens.device)
        slots = self._lines(columns[counted])
        ones = alive[place].to(torch.int32)
        self._sampled.index_put_((slots, tokens[place]), ones, accumulate=True)

    def adjusted(
        self, columns: np.ndarray, logits: torch.Tensor, setting: RowSettings
    ) -> torch.Tensor:
        """A copy of logits [n, vocab] of rows with the same settings, as these change them."""
        sampled = prompted = None
        if setting.params.has_penalties:
            slots = self._lines(columns)
            sampled, prompted = self._sampled[slots], self._prompted[slots]
        return adjust_logits(logits, setting.params, setting.bias, sampled, prompted)

    def _lines(self, columns: np.ndarray) -> torch.Tensor:
        slots = [self._slots[column] for column in columns.tolist()]
        return torch.tensor(slots, device=self._sampled.device)

    def end(self, columns: Sequence[int]) -> None:
        """Forgets rows; others than those that were begun are passed over."""
        self._free += [self._slots.pop(column) for column in columns if column in self._slots]

    def clear(self) -> None:
        """Forgets all rows."""
        self.end(list(self._slots))


def adjust_logits(
    logits: torch.Tensor, params: SamplingParams,
    bias: tuple[torch.Tensor, torch.Tensor] | None = None,
    sampled: torch.Tensor | None = None, prompted: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A copy of logits [n, vocab] in float32 with bias and penalties, in vLLM's order.

    With c the times that a token was sampled, and s whether it occurred in prompt or completion:
    l += bias; l = l / r if l > 0 else l * r, where s; l -= frequency * c + presence * (c > 0).

    Args:
        logits: any float dtype.
        params: its penalties are read.
        bias: ids [k] int64 and what is added to their logits, [k] float32.
        sampled: [n, vocab] int32, how often each token was sampled; None without penalties.
        prompted: [n, vocab] bool, which tokens stand in the prompt; None without penalties.
    """
    adjusted = logits.to(torch.float32, copy=True)
    if bias is not None:
        adjusted.index_add_(1, bias[0], bias[1].expand(len(logits), -1))
    if sampled is None or prompted is None:
        return adjusted
    if params.repetition_penalty != 1.0:
        r = params.repetition_penalty
        scaled = torch.where(adjusted > 0, adjusted / r, adjusted * r)
        adjusted = torch.where(prompted | (sampled > 0), scaled, adjusted)
    adjusted -= params.frequency_penalty * sampled
    adjusted -= params.presence_penalty * (sampled > 0)
    return adjusted


# --- logits to tokens ----------------------------------------------------------------------------


def choose_tokens(
    logits: torch.Tensor, noise: torch.Tensor | None, params: SamplingParams,
    forbidden: torch.Tensor | None = None, forbidden_rows: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Likeliest | None]:  # fmt: skip
    """The next token of each row and its log-prob under the untruncated distribution.

    Sampling inverts the distribution function: the token is the first, in vocabulary order, whose
    cumulative weight passes noise * total. Row i therefore depends on logits[i] and noise[i] only.

    Args:
        logits: [batch, vocab], any float dtype, with bias and penalties already.
        noise: [batch] float32 in [0, 1); None when params.greedy.
        params: temperature, min_p, top_k, top_p, greedy and top_logprobs are read.
        forbidden: [k] int64 token ids that must not be chosen, or None.
        forbidden_rows: [batch] bool, the rows that `forbidden` is about; None: all.
        allowed: [batch, vocab] bool, the tokens of each row that may be chosen; None: all.

    Returns:
        tokens [batch] int64; logprobs [batch] float32, log_softmax(logits / temperature) of the
        token before anything is forbidden or truncated; the `top_logprobs` likeliest tokens of
        the same distribution, None where none are asked for.
    """
    logits = logits.float()
    top = logits.amax(dim=-1, keepdim=True)
    weights = logits - top
    if params.temperature != 1.0:
        weights /= params.temperature
    weights.exp_()
    log_total = weights.sum(dim=-1, keepdim=True).log_()
    permitted = logits
    if forbidden is not None or allowed is not None:
        permitted = logits.clone()
        if forbidden is not None and forbidden_rows is None:
            permitted.index_fill_(-1, forbidden, -torch.inf)
        elif forbidden is not None and forbidden_rows is not None:
            rows = forbidden_rows.unsqueeze(1)
            permitted[:, forbidden] = permitted[:, forbidden].masked_fill(rows, -torch.inf)
        if allowed is not None:
            permitted.masked_fill_(~allowed, -torch.inf)
        if not params.greedy:
            # From the likeliest that may be chosen: below a likelier one all might underflow.
            weights = permitted - permitted.amax(dim=-1, keepdim=True)
            if params.temperature != 1.0:
                weights /= params.temperature
            weights.exp_()
    if params.greedy:
        tokens = permitted.argmax(dim=-1, keepdim=True)
    else:
        assert noise is not None, "sampling needs one uniform per row"
        tokens = invert_cdf(truncate(weights, params), noise)
    logprobs = (logits.gather(-1, tokens) - top) / params.temperature - log_total
    likeliest = None
    if params.top_logprobs:
        # By the same operations, so that a token's log-prob is that of its entry among these.
        scores = (logits - top) / params.temperature - log_total
        values, ids = scores.topk(min(params.top_logprobs, scores.shape[1]), dim=-1)
        likeliest = ids, values
    return tokens.squeeze(-1), logprobs.squeeze(-1), likeliest


def invert_cdf(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The token ids at which the cumulative weight passes noise * total weight.

    Args:
        weights: [batch, vocab] float32, >= 0, not necessarily summing to 1.
        noise: [batch] float32 in [0, 1).

    Returns:
        [batch, 1] int64. A token of weight 0 is never chosen: the cumulative weight passes the
        target only where it grows.
    """
    cdf = weights.cumsum(dim=-1)
    target = noise.unsqueeze(-1) * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, target, right=True)
    # Weights that are not finite give vocab here: kept in range so that the caller can report them.
    return tokens.clamp_(max=weights.shape[-1] - 1)


def truncate(weights: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Weights with everything below min-p, then outside the top-k and the top-p set, put to 0.

    Args:
        weights: [batch, vocab] float32, >= 0, 1 for the likeliest token of each row.
        params: min_p, top_k and top_p are read, the last as a share of what top-k left. Ties with
            the k-th token, and with the last of the top-p set, stay.

    Returns:
        [batch, vocab] float32, the same tensor when nothing is cut.
    """
    vocab = weights.shape[-1]
    if params.min_p:
        weights = weights.where(weights >= params.min_p, 0.0)
    if 0 < params.top_k < vocab:
        kth = weights.topk(params.top_k, dim=-1).values[:, -1:]
        weights = weights.where(weights >= kth, 0.0)
    if params.top_p < 1.0:
        wanted = params.top_p * weights.sum(dim=-1, keepdim=True)
        if weights.device.type == "cpu":
            # CPU-milliseconds of 64 rows of 32 000, one core with AVX512: torch's sort 250, its 512
            # largest 38, bit by bit 240 to 360, and 26 by NumPy's sort, which uses AVX512.
            ordered = torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
            last = torch.searchsorted(ordered.cumsum(dim=-1), wanted)
            least = ordered.gather(-1, last.clamp_(max=vocab - 1))
        else:
            least = _largest_with_mass(weights, wanted)
        weights = weights.where(weights >= least, 0.0)
    return weights


def _largest_with_mass(weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The largest number [batch, 1] such that weights of at least that hold the mass `wanted`.

    Found bit by bit: as integers, the bits of floats that are not negative have the floats' order.
    So a vocabulary is read 31 times and never sorted, and no device is waited for.
    """
    least = torch.zeros_like(wanted, dtype=torch.int32)
    for bit in reversed(range(31)):
        higher = least | (1 << bit)
        mass = weights.where(weights >= higher.view(torch.float32), 0.0).sum(dim=-1, keepdim=True)
        least = torch.where(mass >= wanted, higher, least)
    return least.view(torch.float32)
