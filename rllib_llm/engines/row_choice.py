"""The next token of each row of a batch, by the settings and the guide that the row has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from rllib_llm.engines.batch_rows import BatchRows
from rllib_llm.engines.completions import CompletionBuffers
from rllib_llm.engines.guide import Guide
from rllib_llm.engines.token_sampling import choose_tokens

# Tokens [n] int64, log-probs [n] float32, and which tokens are stop tokens, None if there are none.
Chosen = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def choose_for_rows(
    rows: BatchRows,
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    start: int,
    clock: int,
    guides: Mapping[int, Guide],
) -> Chosen:
    """Tokens of the rows from `start` on.

    Args:
        rows: of the batch.
        logits: [n, vocab], of these rows.
        noise: [n] uniforms, None where all rows are greedy.
        start: the first row.
        clock: the decoder's.
        guides: of rows that have one, by their columns of the buffers.
    """
    allowed = _allowed_by_guides(rows, start, guides, logits) if guides else None
    chosen = _choose(rows, logits, noise, start, clock, allowed)
    if allowed is not None:
        tokens = chosen[0].tolist()
        alive = rows.alive[start:].tolist()
        for i, column in enumerate(rows.columns[start:].tolist()):
            if column in guides and alive[i]:
                guides[column].take(tokens[i])
    return chosen


def _choose(
    rows: BatchRows,
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    start: int,
    clock: int,
    allowed: torch.Tensor | None,
) -> Chosen:
    parts = []
    born = rows.born[start:]
    for setting, index in rows.by_settings(start):
        if index is None:
            return _choose_alike(rows, logits, noise, setting, clock - born, allowed)
        place = torch.from_numpy(index).to(rows.device)
        own = None if noise is None else noise[place]
        masks = None if allowed is None else allowed[place]
        age = clock - born[index]
        parts.append((place, _choose_alike(rows, logits[place], own, setting, age, masks)))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=rows.device)
    logprobs = torch.empty(len(logits), device=rows.device)
    ended = torch.zeros(len(logits), dtype=torch.bool, device=rows.device)
    for place, (part_tokens, part_logprobs, part_ended) in parts:
        tokens[place], logprobs[place] = part_tokens, part_logprobs
        if part_ended is not None:
            ended[place] = part_ended
    return tokens, logprobs, ended


def _choose_alike(
    rows: BatchRows,
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    setting: int,
    age: np.ndarray,
    allowed: torch.Tensor | None,
) -> Chosen:
    """As `_choose`, of rows with the same settings, which have sampled `age` [n] tokens."""
    params, stops = rows.settings[setting], rows.stops[setting]
    if not len(stops):
        return *choose_tokens(logits, noise, params, allowed=allowed), None
    young = age < params.min_new_tokens
    forbidden_rows = None
    if young.any() and not young.all():
        forbidden_rows = torch.from_numpy(young).to(rows.device)
    forbidden = stops if young.any() else None
    tokens, logprobs = choose_tokens(logits, noise, params, forbidden, forbidden_rows, allowed)
    return tokens, logprobs, (tokens.unsqueeze(1) == stops).any(dim=1)


def _allowed_by_guides(
    rows: BatchRows, start: int, guides: Mapping[int, Guide], logits: torch.Tensor
) -> torch.Tensor | None:
    """[n, vocab] bool, all True for rows without a guide; None where none of them has one."""
    columns = rows.columns[start:].tolist()
    if not any(column in guides for column in columns):
        return None
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    alive = rows.alive[start:].tolist()
    for i, column in enumerate(columns):
        if column in guides and alive[i]:
            own = guides[column].allowed()
            allowed[i, : len(own)] = own[: allowed.shape[1]]
            allowed[i, len(own) :] = False
    return allowed.to(logits.device)


def note_likeliest(
    rows: BatchRows, buffers: CompletionBuffers, logits: torch.Tensor, start: int, clock: int
) -> None:
    """Records the likeliest tokens at this place of the rows from `start` on that ask for them."""
    for setting, index in rows.by_settings(start):
        params = rows.settings[setting]
        if not params.top_logprobs:
            continue
        place = slice(None) if index is None else torch.from_numpy(index).to(rows.device)
        scores = torch.log_softmax(logits[place].float() / params.temperature, dim=-1)
        values, ids = scores.topk(min(params.top_logprobs, scores.shape[1]), dim=-1)
        alive = rows.alive[start:][place]
        places = (clock - rows.births[start:][place]).where(alive, buffers.steps)
        buffers.write_likeliest(places, rows.lines[start:][place], ids, values)
