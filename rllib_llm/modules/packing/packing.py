"""Rows cut into batches of like length, brought to the form in which a model reads them, and its
answers brought back.

Two forms: rows of the longest's length (`pack`), which every model reads, and tokens one behind
another without any padding (`dense_packing.py`), for models whose attention can be laid out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rllib_llm.modules.packing.packed_attention import Layout


@dataclass(frozen=True)
class WantedTokens:
    """The model's packed input, and the positions that predict the tokens to be scored.

    input_ids [batch, length], right-padded, or [1, tokens] with `position_ids` [1, tokens] and the
    `layout` of their attention; num_padding: how many of them are padding; targets, predicted_at
    (index into the flattened input_ids) and places (index into the flattened result) int64
    [tokens], in the order of rows and columns; shape: (batch, result length). Behind its targets
    and predicted_at there may be surplus ones, of which `places` has none.
    """

    input_ids: Tensor
    targets: Tensor
    predicted_at: Tensor
    places: Tensor
    shape: tuple[int, int]
    num_padding: int
    position_ids: Tensor | None = None
    layout: Layout | None = None

    def pick(self, per_position: Tensor) -> Tensor:
        """[batch, length, ...] -> [tokens, ...] at the positions that predict the wanted tokens,
        and at the surplus ones behind them."""
        return per_position.flatten(0, 1).index_select(0, self.predicted_at)

    def without_surplus(self, per_token: Tensor) -> Tensor:
        """[tokens and surplus ones, ...] -> [tokens, ...]."""
        return per_token[: len(self.places)]

    def unpack(self, per_token: Tensor) -> Tensor:
        """[tokens, ...], perhaps with surplus ones, -> [batch, result length, ...], 0 elsewhere."""
        batch, length = self.shape
        per_token = self.without_surplus(per_token)
        whole = per_token.new_zeros((batch * length, *per_token.shape[1:]))
        return whole.index_copy(0, self.places, per_token).unflatten(0, self.shape)


@dataclass(frozen=True)
class Rows:
    """Padded rows: ids [batch, length], which tokens the model reads and which are scored.

    A wanted token is attended and not the first such of its row. The first `num_leading` columns,
    the prompts, are no part of the result and hold no wanted token.
    """

    ids: Tensor
    attended: Tensor
    wanted: Tensor
    num_leading: int = 0


def completion_rows(
    prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor
) -> Rows:
    """Every masked-in completion token, after its prompt; the result is [batch, completion_len].

    Raises ValueError for a row without a prompt token.
    """
    prompt_mask, completion_mask = prompt_mask.bool(), completion_mask.bool()
    has_prompt = prompt_mask.any(dim=1)
    if not bool(has_prompt.all()):
        row = int((~has_prompt).nonzero()[0])
        raise ValueError(
            f"prompt_mask[{row}]=all False must have a True: a completion's first token is "
            "predicted by the prompt's last. Put a BOS token into empty prompts."
        )
    # Everything up to the last masked-in token is context, tool output between them included.
    is_context = completion_mask.flip(1).cumsum(dim=1).flip(1) > 0
    return Rows(
        torch.cat([prompt_ids, completion_ids], dim=1),
        torch.cat([prompt_mask, is_context], dim=1),
        torch.cat([torch.zeros_like(prompt_mask), completion_mask], dim=1),
        num_leading=prompt_ids.shape[1],
    )


def text_rows(input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor | None) -> Rows:
    """Every target of a text but its first token, which nothing predicts; the result is
    [texts, length]."""
    attended = attention_mask.bool()
    targets = attended if loss_mask is None else attended & loss_mask.bool()
    has_past = attended.cumsum(dim=1) > 1
    return Rows(input_ids, attended, targets & has_past)


def pack(rows: Rows) -> WantedTokens:
    """Rows with their attended tokens moved to the left and the longest row's length."""
    ids, attended = rows.ids, rows.attended
    lengths = attended.sum(dim=1)
    longest = max(1, int(lengths.max()))
    order = (~attended).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    input_ids = ids.gather(1, order)
    # Any id will do, but models warn about a pad id that comes without an attention mask.
    filler = input_ids[:, :1].masked_fill(lengths.unsqueeze(1) == 0, 0)
    is_padding = torch.arange(longest, device=ids.device) >= lengths.unsqueeze(1)
    input_ids = torch.where(is_padding, filler, input_ids)

    at_row, at_col = rows.wanted.nonzero(as_tuple=True)
    packed_at = attended.cumsum(dim=1)[at_row, at_col] - 1
    result_length = ids.shape[1] - rows.num_leading
    return WantedTokens(
        input_ids=input_ids,
        targets=ids[at_row, at_col],
        predicted_at=at_row * longest + packed_at - 1,
        places=at_row * result_length + at_col - rows.num_leading,
        shape=(ids.shape[0], result_length),
        num_padding=input_ids.numel() - int(lengths.sum()),
    )


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
