"""Judged groups as bytes: what a ledger holds without opening it."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence

import torch

from rllib_llm.rollouts.request import NO_VERSION, JudgedBatch, concatenate
from rllib_llm.rollouts.streaming.entry import UNJUDGED, Closed, JudgedGroup
from rllib_llm.shared import columns

_PROMPT_COLUMNS = (columns.PROMPT_IDS, columns.PROMPT_MASK)
TOO_FEW = "too_few"


def pack(batch: JudgedBatch) -> bytes:
    """The batch as bytes, its tensors as arrays, which are quicker to pickle."""
    held = dict(vars(batch))
    for name in ("columns", "components", "metrics"):
        held[name] = {key: column.numpy() for key, column in held[name].items()}
    held["rewards"] = batch.rewards.numpy()
    return pickle.dumps(held, protocol=5)


def unpack(payload: bytes) -> JudgedBatch:
    """What `pack` was given."""
    held = pickle.loads(payload)
    for name in ("columns", "components", "metrics"):
        held[name] = {key: torch.from_numpy(column) for key, column in held[name].items()}
    held["rewards"] = torch.from_numpy(held["rewards"])
    return JudgedBatch(**held)


def split(batch: JudgedBatch) -> list[JudgedBatch]:
    """One batch for each group, without the padding that only other groups need. What was said on
    the way goes with the first."""
    groups = batch.columns[columns.GROUP]
    parts = [rows(batch, (groups == g).nonzero().squeeze(1)) for g in groups.unique().tolist()]
    for part in parts[1:]:
        part.messages = []
    return parts


def rows(batch: JudgedBatch, index: torch.Tensor) -> JudgedBatch:
    """Rows `index` [k] of a batch, cut to the longest prompt and completion among them."""

    def of(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in held.items()}

    taken = of(batch.columns)
    prompt_len = max(1, int(taken[columns.PROMPT_MASK].any(dim=0).sum()))
    completion_len = max(1, int(taken[columns.COMPLETION_MASK].any(dim=0).sum()))
    for name, column in taken.items():
        if column.ndim == 2:
            is_prompt = name in _PROMPT_COLUMNS
            taken[name] = column[:, -prompt_len:] if is_prompt else column[:, :completion_len]
    chosen = index.tolist()
    return dataclasses.replace(
        batch,
        columns=taken,
        rewards=batch.rewards[index],
        components=of(batch.components),
        metrics=of(batch.metrics),
        texts={name: [texts[i] for i in chosen] for name, texts in batch.texts.items()},
    )


def judged_group(
    group: JudgedBatch, *, reason: str = "", min_valid: int = 1, continues: bool = False
) -> JudgedGroup:
    """What is handed in of one group; one that lost too many members is not learnt from.

    Args:
        group: its rows.
        reason: a filter's, "" where all let it pass.
        min_valid: rows with a score that it needs.
        continues: see `JudgedGroup`.
    """
    valid, mask = group.columns[columns.VALID], group.sampled_mask
    # A policy's own tokens may be masked, see `RowStream`.
    sampled = mask | (group.columns[columns.WEIGHTS_VERSION] != NO_VERSION)
    num_valid = int(valid.sum())
    if num_valid < min_valid:
        reason = TOO_FEW if num_valid else UNJUDGED
    return JudgedGroup(
        position=int(group.columns[columns.GROUP][0]),
        payload=pack(group),
        num_tokens=int(sampled.sum()),
        num_lost=int((sampled & ~(mask & valid.unsqueeze(1))).sum()),
        oldest_version=int(group.versions.min()) if bool(mask.any()) else -1,
        reason=reason,
        continues=continues,
        cause=group.cause,
    )


def rows_of(closed: Closed) -> JudgedBatch:
    """The rows of a group that is not learnt from; of one that failed, one row that says which."""
    if closed.group is not None:
        return unpack(closed.group.payload)
    return JudgedBatch(
        {columns.GROUP: torch.tensor([closed.position])}, rewards=torch.tensor([torch.nan])
    )


def batch_of(groups: Sequence[JudgedGroup]) -> JudgedBatch:
    """The rows of all groups, in this order."""
    return concatenate([unpack(group.payload) for group in groups])
