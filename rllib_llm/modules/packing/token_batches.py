"""Rows cut into batches of like length, so that padding costs little and memory is bounded."""

from __future__ import annotations

import torch
from torch import Tensor


def token_batches(lengths: Tensor, batch_tokens: int) -> list[Tensor]:
    """Returns row indices [rows of the batch] int64, one tensor for each batch, longest rows first.

    lengths: tokens of each row, [N]. A batch of n rows whose longest has L tokens holds
    n * L <= batch_tokens tokens, padding included; a row longer than that comes alone.

    Raises:
        ValueError: batch_tokens below 1.
    """
    if batch_tokens < 1:
        raise ValueError(
            f"batch_tokens={batch_tokens!r} must be at least 1: it bounds the tokens of one "
            "forward pass. Use some thousands on a CPU, more on a GPU."
        )
    order = lengths.argsort(descending=True, stable=True).cpu()
    sorted_lengths = lengths.cpu()[order].tolist()
    batches, start = [], 0
    while start < len(order):
        num_rows = max(1, batch_tokens // max(1, int(sorted_lengths[start])))
        batches.append(order[start : start + num_rows])
        start += num_rows
    return batches


def pack_right(
    prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Prompt and completion of each row as one right-padded text: ids [B, L] and mask [B, L].

    Takes prompts [B, P] left-padded and completions [B, T] right-padded, masks bool; L is the
    longest text. A completion reaches to its last token with mask True: tokens masked out before
    it (tool output) were read by the policy and belong to the text. Padding is filled with id 0.
    """
    reached = completion_mask.bool().flip(1).cumsum(dim=1).flip(1) > 0
    ids = torch.cat([prompt_ids, completion_ids], dim=1)
    mask = torch.cat([prompt_mask.bool(), reached], dim=1)
    longest = max(1, int(mask.sum(dim=1).max()))
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    packed_mask = mask.gather(1, order)
    return ids.gather(1, order).masked_fill(~packed_mask, 0), packed_mask
