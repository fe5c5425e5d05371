"""Rows cut into batches of like length, brought to the form in which a model reads them, and its
answers brought back.

All of it is computed on the host, where sizes are known without waiting for a device, then sent.
Every model reads rows of the longest's length (`pack`). Models whose attention can be laid out read
concatenated tokens, what rows have in common only once (`pack_dense`):

    [prompt a | prompt b | completion a1 | completion a2 | completion b1 | ...]

Rows with the same prompt share it, wherever in the batch they lie. Tokens that nothing wanted comes
after (a completion's last) are left out: their states would not be read.

Some processors' products want sizes that come again (`recurring_size`). Rows are then lengthened
by filler, shortest first, and wanted tokens are followed by surplus ones:

    tokens   [prompt a | completion a1 + filler | completion a2 | ...]
    wanted   [a1's tokens | a2's tokens | ... | surplus: the first one again]

Attention looks back, so that no other token sees filler, and the surplus is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rllib_llm.modules.packed_attention import (
    AttentionBlock,
    AttentionLayout,
    Kernel,
    Layout,
    MaskedLayout,
    RowLayout,
)
from rllib_llm.shared.columns import fetched
from rllib_llm.shared.errors import Problems, require


@dataclass(frozen=True)
class WantedTokens:
    """The model's packed input, and the positions that predict the tokens to be scored.

    input_ids [batch, length], right-padded, or [1, tokens] with `position_ids` [1, tokens] and the
    `layout` of their attention; num_padding: how many of them are padding; targets, predicted_at
    (index into the flattened input_ids) and places (index into the flattened result) int64
    [tokens], in the order of rows and columns; shape: (batch, result length). Behind its targets
    and predicted_at there may be surplus ones, of which `places` has none. Of traced rows, in the
    order of the flattened input_ids: sources (index into the flattened rows) int64 and num_readers
    (rows that read the token, 0 of padding) float32.
    """

    input_ids: Tensor
    targets: Tensor
    predicted_at: Tensor
    places: Tensor
    shape: tuple[int, int]
    num_padding: int
    position_ids: Tensor | None = None
    layout: Layout | None = None
    sources: Tensor | None = None
    num_readers: Tensor | None = None

    def pick(self, per_position: Tensor) -> Tensor:
        """[batch, length, ...] -> [tokens, ...] at the positions that predict the wanted tokens,
        and at the surplus ones after them."""
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
class TokenRows:
    """Padded rows on the host: ids [batch, length], which tokens the model reads and which are
    scored.

    A wanted token is attended and not the first such of its row. The first `num_leading` columns,
    the prompts, are no part of the result and hold no wanted token. `shown`: what the
    rows show, a `Shown` of `modules/images.py`. `is_traced`: whether it is kept where packed tokens
    come from.
    """

    ids: Tensor
    attended: Tensor
    wanted: Tensor
    num_leading: int = 0
    shown: Any = None
    is_traced: bool = False


def completion_rows(
    prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor
) -> TokenRows:
    """Every masked-in completion token, after its prompt; the result is [batch, completion_len].

    Raises ValueError for a row without a prompt token.
    """
    prompt_ids, prompt_mask, completion_ids, completion_mask = fetched(
        (prompt_ids, prompt_mask, completion_ids, completion_mask)
    )
    prompt_mask, completion_mask = prompt_mask.bool(), completion_mask.bool()
    has_prompt = prompt_mask.any(dim=1)
    if not bool(has_prompt.all()):
        row = int((~has_prompt).nonzero()[0])
        raise Problems(f"prompt_mask[{row}]", "be True somewhere", "", "Put a BOS token there")
    # Everything up to the last masked-in token is context, tool output between them included.
    is_context = completion_mask.flip(1).cumsum(dim=1).flip(1) > 0
    return TokenRows(
        torch.cat([prompt_ids, completion_ids], dim=1),
        torch.cat([prompt_mask, is_context], dim=1),
        torch.cat([torch.zeros_like(prompt_mask), completion_mask], dim=1),
        num_leading=prompt_ids.shape[1],
    )


def text_rows(input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor | None) -> TokenRows:
    """Every target of a text but its first token, which nothing predicts; the result is
    [texts, length]."""
    loss_mask = attention_mask if loss_mask is None else loss_mask
    input_ids, attended, scored = fetched((input_ids, attention_mask, loss_mask))
    attended = attended.bool()
    targets = attended & scored.bool()
    has_past = attended.cumsum(dim=1) > 1
    return TokenRows(input_ids, attended, targets & has_past)


def pack(rows: TokenRows, device: torch.device | str = "cpu") -> WantedTokens:
    """Rows with their attended tokens moved to the left and the longest row's length, on
    `device`."""
    ids, attended = rows.ids, rows.attended
    lengths = attended.sum(dim=1)
    longest = max(1, int(lengths.max()))
    order = (~attended).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    input_ids = ids.gather(1, order)
    # Any id will do, but models warn about a pad id that comes without an attention mask.
    filler = input_ids[:, :1].masked_fill(lengths.unsqueeze(1) == 0, 0)
    is_padding = torch.arange(longest) >= lengths.unsqueeze(1)
    input_ids = torch.where(is_padding, filler, input_ids)

    at_row, at_col = rows.wanted.nonzero(as_tuple=True)
    packed_at = attended.cumsum(dim=1)[at_row, at_col] - 1
    result_length = ids.shape[1] - rows.num_leading
    trace = {}
    if rows.is_traced:
        read = (attended & _before_last_wanted(rows.wanted)).gather(1, order)
        sources = _columns_of(ids).gather(1, order)
        trace = _trace(sources.flatten(), read.flatten(), device)
    return WantedTokens(
        **trace,
        input_ids=_sent(input_ids, device),
        targets=_sent(ids[at_row, at_col], device),
        predicted_at=_sent(at_row * longest + packed_at - 1, device),
        places=_sent(at_row * result_length + at_col - rows.num_leading, device),
        shape=(ids.shape[0], result_length),
        num_padding=input_ids.numel() - int(lengths.sum()),
    )


def _columns_of(ids: Tensor) -> Tensor:
    """Where each id stands in the flattened rows, [batch, length] int64."""
    return torch.arange(ids.numel()).view(ids.shape)


def _trace(sources: Tensor, num_readers: Tensor, device: torch.device | str) -> dict[str, Tensor]:
    return {
        "sources": _sent(sources, device), "num_readers": _sent(num_readers.float(), device)
    }  # fmt: skip


def _sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy on `device`, which is not waited for."""
    return tensor.to(device, non_blocking=True)


def token_batches(lengths: Tensor, batch_tokens: int) -> list[Tensor]:
    """Returns row indices [rows of the batch] int64, one tensor for each batch, longest rows first.

    lengths: tokens of each row, [N]. A batch of n rows whose longest has L tokens holds
    n * L <= batch_tokens tokens, padding included; a row longer than that comes alone.

    Raises:
        ValueError: batch_tokens below 1.
    """
    require(batch_tokens >= 1, "batch_tokens", batch_tokens, "be at least 1")
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


# 64 MiB; without sharing no mask is needed.
MAX_MASK = 2**24


def recurring_size(number: int, least_step: int = 16) -> int:
    """`number` or a little more: a multiple of `least_step`, and from 32 times that on one of 32
    sizes between two powers of two."""
    step = max(least_step, 2 ** (number.bit_length() - 6))
    return -(-number // step) * step


_WIDTH_STEP = 8  # of rows' lengths in attention, which are small and cost with their square


def pack_dense(
    rows: TokenRows, max_mask: int = MAX_MASK, recurring: bool = False, kernel: Kernel = "sdpa",
    device: torch.device | str = "cpu",
) -> WantedTokens:  # fmt: skip
    """`rows` as tokens [1, tokens] with positions and attention layout; see `packing.pack`.

    At least one token must be wanted. `max_mask`: numbers in the attention mask of shared prompts
    beyond which each row keeps its own. `recurring`: filled up until tokens, wanted tokens and,
    where they differ, rows' lengths in attention are a `recurring_size`. `kernel`: that attention
    is laid out for; flash attention shares no prompts.
    """
    read = rows.attended & _before_last_wanted(rows.wanted)
    prompts, own = read[:, : rows.num_leading], read[:, rows.num_leading :]
    first, group = _distinct(rows.ids[:, : rows.num_leading], prompts)
    widths = [max(1, prompts.shape[1]), max(1, own.shape[1])]
    if recurring:
        widths = [recurring_size(width, _WIDTH_STEP) for width in widths]
    num_masked = len(read) * widths[1] * sum(widths) if kernel == "sdpa" else 0
    if len(first) == len(read) or num_masked > max_mask or kernel == "flash_attention_2":
        first, group, own = first[:0], None, read
    prompt_mask = prompts[first]
    num_leading = rows.ids.shape[1] - own.shape[1]  # columns that are shared
    own_ids = rows.ids[:, num_leading:]
    filler = torch.zeros_like(own)
    if recurring:
        own, own_ids, filler = _filled(own, own_ids, int(prompt_mask.sum()))
    prompt_lengths, own_lengths = prompt_mask.sum(dim=1), own.sum(dim=1)
    num_shared = prompt_lengths.new_zeros(len(read)) if group is None else prompt_lengths[group]
    prompt_starts = prompt_lengths.cumsum(dim=0) - prompt_lengths
    own_starts = prompt_lengths.sum() + own_lengths.cumsum(dim=0) - own_lengths
    input_ids = torch.cat([rows.ids[first, : rows.num_leading][prompt_mask], own_ids[own]])
    prompt_positions = prompt_mask.cumsum(dim=1) - 1
    own_positions = (num_shared.unsqueeze(1) + own.cumsum(dim=1) - 1).masked_fill(filler, 0)

    at_row, at_col = rows.wanted.nonzero(as_tuple=True)
    # How many tokens of its row come before a wanted one; its predecessor may be the prompt's last.
    before = rows.attended.cumsum(dim=1)[at_row, at_col] - 1 - num_shared[at_row]
    predicted_at = own_starts[at_row] + before - 1
    if group is not None:
        last_of_prompt = (prompt_starts + prompt_lengths - 1)[group[at_row]]
        predicted_at = torch.where(before == 0, last_of_prompt, predicted_at)
    result_length = rows.ids.shape[1] - rows.num_leading
    targets = rows.ids[at_row, at_col]
    if recurring:
        predicted_at, targets = _with_surplus(predicted_at), _with_surplus(targets)
    positions = torch.cat([prompt_positions[prompt_mask], own_positions[own]])
    trace = {}
    if rows.is_traced:
        places = _columns_of(rows.ids)
        num_filled = own.shape[1] - (rows.ids.shape[1] - num_leading)  # by filler
        own_places = pad(places[:, num_leading:], (0, num_filled))
        sources = torch.cat([places[first, : rows.num_leading][prompt_mask], own_places[own]])
        sharers = prompt_lengths if group is None else torch.bincount(group)
        num_readers = torch.cat([sharers.repeat_interleave(prompt_lengths), (~filler)[own].long()])
        trace = _trace(sources, num_readers, device)
    return WantedTokens(
        **trace,
        input_ids=_sent(input_ids.unsqueeze(0), device),
        targets=_sent(targets, device),
        predicted_at=_sent(predicted_at, device),
        places=_sent(at_row * result_length + at_col - rows.num_leading, device),
        shape=(len(rows.ids), result_length),
        num_padding=int(filler.sum()) if recurring else 0,
        position_ids=_sent(positions.unsqueeze(0), device),
        layout=_layout(
            kernel, prompt_starts, prompt_lengths, own_starts, own_lengths, group, recurring, device
        ),
    )


def _filled(own: Tensor, ids: Tensor, num_others: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mask [batch, length] and ids of rows' own tokens, lengthened until they and `num_others`
    are a `recurring_size`, and where they are filler."""
    total = num_others + int(own.sum())
    missing = recurring_size(total) - total
    further = -(-missing // len(own))  # columns that suffice if no row has room
    own, ids = pad(own, (0, further)), pad(ids, (0, further))
    after = (own.flip(1).cumsum(dim=1).flip(1) == 0).cumsum(dim=1)  # 1, 2 ... after a row's end
    length = (own.sum(dim=1, keepdim=True) + after).where(after > 0, own.shape[1] + 1)
    chosen = length.flatten().argsort(stable=True)[:missing]
    filler = torch.zeros_like(own).flatten().index_fill_(0, chosen, True).view_as(own)
    return own | filler, ids.masked_fill(filler, 0), filler


def _with_surplus(per_token: Tensor) -> Tensor:
    """The numbers, followed by the first again until there are a `recurring_size`."""
    return torch.cat(
        [per_token, per_token[:1].expand(recurring_size(len(per_token)) - len(per_token))]
    )


def _before_last_wanted(wanted: Tensor) -> Tensor:
    """True for the columns before each row's last wanted token, [batch, length]."""
    at_or_before = wanted.flip(1).cumsum(dim=1).flip(1) > 0
    return torch.cat([at_or_before[:, 1:], torch.zeros_like(wanted[:, :1])], dim=1)


def _distinct(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(a row of each different prompt [prompts], the prompt of each row [batch]), int64."""
    if not ids.shape[1]:
        every = torch.arange(len(ids))
        return every, every
    content = ids.masked_fill(~mask, -1)
    # One number for each row, which are much faster to sort.
    first, group = _unique((content * _multipliers(content)).sum(dim=1))
    if not torch.equal(content[first[group]], content):  # two numbers are the same by chance
        first, group = _unique(content)
    return first, group


def _unique(rows: Tensor) -> tuple[Tensor, Tensor]:
    _, group = torch.unique(rows, dim=0, return_inverse=True)
    places = torch.arange(len(rows))
    return places.new_empty(int(group.max()) + 1).index_copy_(0, group, places), group


def _multipliers(content: Tensor) -> Tensor:
    """A pseudo-random int64 for each column; products wrap around."""
    mixed = torch.arange(1, content.shape[1] + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
    return mixed ^ (mixed >> 29)


def _layout(
    kernel: Kernel, prompt_starts: Tensor, prompt_lengths: Tensor, own_starts: Tensor,
    own_lengths: Tensor, group: Tensor | None, recurring: bool, device: torch.device | str,
) -> Layout:  # fmt: skip
    """Prompts attend to themselves, the tokens of a row to its prompt and to their own past."""
    if kernel == "flash_attention_2":
        starts = torch.cat([own_starts, own_starts[-1:] + own_lengths[-1:]])
        return RowLayout(_sent(starts.to(torch.int32), device), int(own_lengths.max()))
    if kernel == "flex_attention":
        lengths = torch.cat([prompt_lengths, own_lengths])
        sees = torch.full_like(own_lengths, -1) if group is None else group
        sees = torch.cat([torch.full_like(prompt_lengths, -1), sees])
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)
        sees = sees.repeat_interleave(lengths)
        return MaskedLayout.of(_sent(owner, device), _sent(sees, device))
    own_tokens, own_exists = _token_table(own_starts, own_lengths, recurring)
    if group is None:
        in_order = bool(own_exists.all())  # rows of one length
        own_tokens = _sent(own_tokens, device)
        only = AttentionBlock(own_tokens, own_tokens, None, in_order)
        return AttentionLayout((only,), _sent(_places(own_exists), device))
    tokens, exists = _token_table(prompt_starts, prompt_lengths, recurring)
    places = torch.cat([_places(exists), exists.numel() + _places(own_exists)])
    tokens, exists, own_tokens, group, places = (
        _sent(tensor, device) for tensor in (tokens, exists, own_tokens, group, places)
    )
    length = own_tokens.shape[1]
    past = torch.ones(length, length, dtype=torch.bool, device=exists.device).tril()
    seen = torch.cat(
        [exists[group].unsqueeze(1).expand(-1, length, -1), past.expand(len(group), -1, -1)], dim=2
    )
    mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
    blocks = (
        AttentionBlock(tokens, tokens, None),
        AttentionBlock(
            own_tokens,
            torch.cat([tokens[group], own_tokens], dim=1),
            mask.unsqueeze(1),
            prompts=group,
        ),
    )
    return AttentionLayout(blocks, places)


def _token_table(starts: Tensor, lengths: Tensor, recurring: bool) -> tuple[Tensor, Tensor]:
    """Tokens of each row [rows, longest or a little more], any existing token in the padding, and
    where they are the row's own."""
    longest = max(1, int(lengths.max()))
    is_even = not recurring or longest == int(lengths.min())
    size = longest if is_even else recurring_size(longest, _WIDTH_STEP)
    columns = torch.arange(size)
    exists = columns < lengths.unsqueeze(1)
    return (starts.unsqueeze(1) + columns).where(exists, 0), exists


def _places(exists: Tensor) -> Tensor:
    return exists.flatten().nonzero().squeeze(1)
