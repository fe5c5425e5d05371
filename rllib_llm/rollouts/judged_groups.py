"""Judged groups as a ledger holds them, without unpacking: as bytes, or in process as indices into
the batch they were sampled in."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rllib_llm.rollouts.groups import UNJUDGED, Closed, JudgedGroup
from rllib_llm.rollouts.request import NO_VERSION, JudgedBatch, concatenate
from rllib_llm.shared import columns

_PROMPT_COLUMNS = (columns.PROMPT_IDS, columns.PROMPT_MASK)
TOO_FEW = "too_few"


@dataclass(frozen=True, eq=False)
class Places:
    """Rows `first .. last - 1` of a batch that stays whole; it is shared by all of its groups."""

    batch: JudgedBatch
    first: int
    last: int


def pack(batch: JudgedBatch) -> bytes:
    """The batch as bytes, its tensors as arrays, which are quicker to pickle."""
    held = dict(vars(batch))
    for name in ("columns", "components", "metrics"):
        held[name] = {key: column.numpy() for key, column in held[name].items()}
    held["rewards"] = batch.rewards.numpy()
    return pickle.dumps(held, protocol=5)


def unpack(payload: bytes) -> JudgedBatch:
    """The inverse of `pack`."""
    held = pickle.loads(payload)
    for name in ("columns", "components", "metrics"):
        held[name] = {key: torch.from_numpy(column) for key, column in held[name].items()}
    held["rewards"] = torch.from_numpy(held["rewards"])
    return JudgedBatch(**held)


def split(batch: JudgedBatch) -> list[JudgedBatch]:
    """One batch for each group, without padding that only other groups need. Metrics go with the
    first."""
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
    """One group as handed to the ledger; a group with too few valid members is not trained.

    Args:
        group: its rows.
        reason: a filter's, "" where all let it pass.
        min_valid: rows with a score that it needs.
        continues: see `JudgedGroup`.
    """
    valid, mask = group.columns[columns.VALID], group.sampled_mask
    # A policy's own tokens may be masked, see `RowStream`.
    sampled = mask | (group.columns[columns.WEIGHTS_VERSION] != NO_VERSION)
    return JudgedGroup(
        position=int(group.columns[columns.GROUP][0]),
        payload=pack(group),
        num_tokens=int(sampled.sum()),
        num_lost=int((sampled & ~(mask & valid.unsqueeze(1))).sum()),
        oldest_version=int(group.versions.min()) if bool(mask.any()) else -1,
        reason=_too_few(int(valid.sum()), min_valid) or reason,
        continues=continues,
        cause=group.cause,
    )


def judged_groups(batch: JudgedBatch, *, min_valid: int = 1) -> list[JudgedGroup]:
    """All groups of a batch with adjacent rows, without copying. Reads five numbers per row from
    the device at once."""
    valid, mask = batch.columns[columns.VALID], batch.sampled_mask
    versions = batch.columns[columns.WEIGHTS_VERSION]
    sampled = mask | (versions != NO_VERSION)
    latest = torch.iinfo(versions.dtype).max
    by_row = torch.stack([
        batch.columns[columns.GROUP],
        valid.long(),
        sampled.sum(dim=1),
        (sampled & ~(mask & valid.unsqueeze(1))).sum(dim=1),
        versions.masked_fill(~mask, latest).amin(dim=1),
    ])  # fmt: skip
    positions, *sums, oldest = by_row.tolist()
    groups, first = [], 0
    for position, of_group in itertools.groupby(positions):
        last = first + len(list(of_group))
        num_valid, num_tokens, num_lost = (sum(each[first:last]) for each in sums)
        version = min(oldest[first:last])
        groups.append(
            JudgedGroup(
                position, Places(batch, first, last), num_tokens, num_lost,
                -1 if version == latest else version, _too_few(num_valid, min_valid),
                cause=batch.cause,
            )
        )  # fmt: skip
        first = last
    return groups


def _too_few(num_valid: int, min_valid: int) -> str:
    """Why a group with so many scores is not learnt from, "" where it is."""
    if num_valid >= min_valid:
        return ""
    return TOO_FEW if num_valid else UNJUDGED


def as_bytes(group: JudgedGroup | None) -> JudgedGroup | None:
    """The group as bytes of its own, for a checkpoint."""
    if group is None or isinstance(group.payload, bytes):
        return group
    return dataclasses.replace(group, payload=pack(_opened(group.payload)))


def _opened(payload: Any) -> JudgedBatch:
    if isinstance(payload, bytes):
        return unpack(payload)
    return rows(payload.batch, torch.arange(payload.first, payload.last))


def rows_of(closed: Closed) -> JudgedBatch:
    """The rows of a group that is not trained; for a failed group, one row that names it."""
    if closed.group is not None:
        return _opened(closed.group.payload)
    return JudgedBatch(
        {columns.GROUP: torch.tensor([closed.position])}, rewards=torch.tensor([torch.nan])
    )


def batch_of(groups: Sequence[JudgedGroup]) -> JudgedBatch:
    """The rows of all groups, in this order."""
    parts = list(_parts(groups))
    batch = concatenate([part for part, _ in parts])
    if len(parts) > 1 and all(is_shared for _, is_shared in parts):
        batch.timings = _spent([part for part, _ in parts])
    return batch


def _parts(groups: Sequence[JudgedGroup]) -> Iterator[tuple[JudgedBatch, bool]]:
    """The rows of groups one after the other, those of a shared batch at once; and whether they are
    of such a batch."""
    waiting: list[Places] = []
    for group in [*groups, None]:
        place = group.payload if group is not None else None
        if waiting and not (isinstance(place, Places) and place.batch is waiting[0].batch):
            yield _taken(waiting), True
            waiting = []
        if isinstance(place, Places):
            waiting.append(place)
        elif place is not None:
            yield unpack(place), False


def _taken(places: list[Places]) -> JudgedBatch:
    """These rows of their batch: the batch itself where it is all of it."""
    batch = places[0].batch
    if sum(place.last - place.first for place in places) == batch.num_rows:
        return batch
    index = [torch.arange(place.first, place.last) for place in places]
    return rows(batch, torch.cat(index))


def _spent(batches: Sequence[JudgedBatch]) -> dict[str, float]:
    """Seconds by name: of samplers that work in parallel, those of the slowest."""
    spent: dict[int, Counter[str]] = {}
    for batch in batches:
        replica = int(batch.columns[columns.REPLICA][0])
        spent.setdefault(replica, Counter()).update(batch.timings)
    names = {name: None for each in spent.values() for name in each}
    return {name: max(float(each[name]) for each in spent.values()) for name in names}
