"""Cutting a batch: shuffled mini-batches, micro-batches by rows or tokens, dead columns off."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import torch
from torch import Tensor

from rllib_llm.modules.images import is_image
from rllib_llm.modules.packing import token_batches
from rllib_llm.shared import columns

# Per-token columns, by the mask that says which of their columns are alive.
_LEFT_PADDED: dict[str, tuple[str, ...]] = {
    columns.PROMPT_MASK: (columns.PROMPT_IDS, columns.PROMPT_MASK, columns.PROMPT_EXPERTS),
    columns.TEACHER_PROMPT_MASK: (columns.TEACHER_PROMPT_IDS, columns.TEACHER_PROMPT_MASK),
}
_RIGHT_PADDED: dict[str, tuple[str, ...]] = {
    columns.COMPLETION_MASK: (
        columns.COMPLETION_IDS, columns.COMPLETION_MASK, columns.LOSS_MASK, columns.WEIGHTS_VERSION,
        columns.SAMPLER_LOGPROBS, columns.SAMPLER_VALUES, columns.REF_LOGPROBS, columns.REWARDS,
        columns.OLD_LOGPROBS, columns.OLD_VALUES, columns.ADVANTAGES, columns.RETURNS,
        columns.LOGPROBS, columns.ENTROPY, columns.VALUES, columns.TEACHER_LOGPROBS,
        columns.TEACHER_TOP_IDS, columns.TEACHER_TOP_LOGPROBS, columns.COMPLETION_EXPERTS,
    ),
    columns.ATTENTION_MASK: (columns.INPUT_IDS, columns.LOSS_MASK, columns.ATTENTION_MASK),
    columns.CHOSEN_MASK: (columns.CHOSEN_IDS, columns.CHOSEN_MASK, columns.CHOSEN_LOSS_MASK),
    columns.REJECTED_MASK: (
        columns.REJECTED_IDS, columns.REJECTED_MASK, columns.REJECTED_LOSS_MASK
    ),
}  # fmt: skip


def minibatch_indices(
    num_rows: int, minibatch_size: int | None, num_epochs: int = 1,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Row indices (int64) of each mini-batch, shuffled in each epoch.

    Every row comes once per epoch; the last mini-batch of an epoch may be smaller. `None` takes
    all rows at once.
    """
    minibatch_size = minibatch_size or num_rows
    assert num_rows > 0 and minibatch_size > 0, (num_rows, minibatch_size)
    for _ in range(num_epochs):
        yield from torch.randperm(num_rows, generator=generator).split(minibatch_size)


def balanced_shares(lengths: Tensor, num_shares: int) -> list[Tensor]:
    """Row indices of each share, int64 in ascending order; the shares have about as many tokens.

    `lengths` [batch]: tokens of each row. Rows are dealt from the longest on, each to the share
    with the fewest tokens so far (Graham 1969: at most 4/3 of the best that can be had).
    """
    if num_shares == 1:
        return [torch.arange(len(lengths))]
    order = lengths.argsort(descending=True, stable=True).tolist()
    shares = _dealt(order, lengths.tolist(), num_shares, len(order))
    return [torch.tensor(sorted(share), dtype=torch.int64) for share in shares]


def _dealt(order: list[int], lengths: list[int], num_shares: int, most: int) -> list[list[int]]:
    """The rows of `order`, each in the share with the fewest tokens so far of those that have not
    `most` rows yet."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [(0, number) for number in range(num_shares)]
    for row in order:
        tokens, number = heapq.heappop(loads)
        shares[number].append(row)
        if len(shares[number]) < most:
            heapq.heappush(loads, (tokens + max(1, lengths[row]), number))
    return shares


def even_micro_batches(
    lengths: Tensor, num_shares: int, *, micro_batch_size: int | None = None,
    token_budget: int | None = None,
) -> list[list[Tensor]]:  # fmt: skip
    """Row indices of each micro-batch of each share, for learners that meet in every micro-batch.

    The i-th micro-batches of all shares have rows of similar length and about as many tokens; some
    shares may have one micro-batch fewer. `lengths` [batch] in tokens. A micro-batch has at most
    `micro_batch_size` rows, or `token_budget` tokens with padding, or is one row.
    """
    assert None in (micro_batch_size, token_budget), "each says alone where to cut"
    order = lengths.argsort(descending=True, stable=True).tolist()
    sizes = lengths.tolist()
    shares: list[list[Tensor]] = [[] for _ in range(num_shares)]
    while order:
        fits = (token_budget or 0) // max(1, sizes[order[0]])
        most = micro_batch_size or (max(1, fits) if token_budget else len(order))
        dealt, order = order[: most * num_shares], order[most * num_shares :]
        parts = _dealt(dealt, sizes, num_shares, most)
        for share, part in zip(shares, parts, strict=True):
            share += [torch.tensor(part)] if part else []
    return shares


def micro_batch_indices(
    lengths: Tensor, *, micro_batch_size: int | None = None, token_budget: int | None = None
) -> list[Tensor]:
    """Row indices of each micro-batch, rows of similar length (`lengths` [batch], in tokens)
    together.

    By `micro_batch_size` rows, by `token_budget` (see `token_batches`), or one with all rows.
    """
    assert None in (micro_batch_size, token_budget), "each says alone where to cut"
    if token_budget is not None:
        return token_batches(lengths, token_budget)
    if micro_batch_size is None or micro_batch_size >= len(lengths):
        return [torch.arange(len(lengths), device=lengths.device)]
    return list(lengths.argsort(descending=True, stable=True).split(micro_batch_size))


def take_rows(batch: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """The batch with these rows only, in this order."""
    devices = {column.device for column in batch.values()} | {torch.device("cpu")}
    on_device = {device: rows.to(device, non_blocking=True) for device in devices}
    return {
        name: column if is_image(name) else columns.same_cut(
            column, lambda c: c.index_select(0, on_device[c.device])
        )
        for name, column in batch.items()
    }


def restore_rows(whole: Tensor, parts: list[Tensor], rows: list[Tensor]) -> Tensor:
    """Puts per-token results of micro-batches at their rows of `whole` [batch, length, ...], which
    is returned.

    `parts[i]` [rows, at most length, ...], right-padded, belongs to the rows `rows[i]`; what was
    cut off by `trim` stays as it was.
    """
    for part, index in zip(parts, rows, strict=True):
        whole[index.to(whole.device, non_blocking=True), : part.shape[1]] = part
    return whole


def row_lengths(batch: dict[str, Tensor]) -> Tensor:
    """Number of tokens that a model reads of each row over all its sequences, int64 [batch] on the
    host."""
    lengths = []
    for name in (*_LEFT_PADDED, *_RIGHT_PADDED):
        if name in batch:
            read = _last_read(batch, name)
            (mask,) = columns.fetched([read])
            whole = read is batch[name]
            lengths.append(mask.sum(dim=1) if whole else _num_up_to_last(mask))
    assert lengths, f"a batch has a mask, and this has {sorted(batch)}"
    return torch.stack(lengths).sum(dim=0)


def trim(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch without the padding columns that no row needs; at least one column stays.

    Prompts are cut on the left, completions and texts on the right. Columns that are not in
    `rllib_llm.shared.columns` are left alone.
    """
    trimmed = dict(batch)
    for mask_name, names in _LEFT_PADDED.items():
        if mask_name in batch:
            (mask,) = columns.fetched([batch[mask_name]])
            dead = mask.shape[1] - _largest(_num_up_to_last(mask.flip(1)))
            _cut(trimmed, names, slice(dead, None))
    for mask_name, names in _RIGHT_PADDED.items():
        if mask_name in batch:
            (mask,) = columns.fetched([_last_read(batch, mask_name)])
            _cut(trimmed, names, slice(None, _largest(_num_up_to_last(mask))))
    return trimmed


def _last_read(batch: dict[str, Tensor], mask_name: str) -> Tensor:
    """The mask whose last True ends what a model reads: of completions that of sampled tokens,
    since what follows from those after it is of no use."""
    of_completions = mask_name == columns.COMPLETION_MASK and columns.LOSS_MASK in batch
    return columns.sampled_mask(batch) if of_completions else batch[mask_name]


def _num_up_to_last(mask: Tensor) -> Tensor:
    """How many columns of each row end with its last True, int64 [batch]; 0 without one."""
    if not mask.shape[1]:
        return mask.sum(dim=1)
    return (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)


def _largest(lengths: Tensor) -> int:
    """At least 1: a column stays."""
    return max(1, int(lengths.amax())) if len(lengths) else 1


def _cut(batch: dict[str, Tensor], names: tuple[str, ...], keep: slice) -> None:
    for name in names:
        if name in batch:
            batch[name] = columns.same_cut(batch[name], lambda column: column[:, keep])
