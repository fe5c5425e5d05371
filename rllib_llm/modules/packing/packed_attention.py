"""Attention between rows that lie one behind another without padding, prompts once per group.

    tokens  [prompt a | prompt b | completion a1 | completion a2 | completion b1 ...]

Everything in a transformer but attention treats tokens one by one, so it runs on the tokens alone.
Attention is one of three kernels (setting `attn_implementation`):

    sdpa               gathers the tokens into blocks of padded rows, runs there, puts results back
    flash_attention_2  flash attention for rows of different lengths, each with its own prompt
    flex_attention     torch's flex attention, with a mask that says who sees whom
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "rllib_llm_packed"  # the name of this attention in transformers
Kernel = Literal["sdpa", "flash_attention_2", "flex_attention"]


@dataclass(frozen=True)
class AttentionBlock:
    """Rows that attend each for itself.

    queries [rows, q], keys [rows, k]: which of the tokens stand there, int64, any token in the
    padding. mask: float [rows, 1, q, k], 0 where attended and -inf elsewhere, or None where
    queries are keys, each attending to those up to itself. in_order: they are all tokens in their
    order, so that nothing has to be gathered. prompts [rows] int64: which row of the first block
    stands before each row's own keys, or None: nothing does.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None
    in_order: bool = False
    prompts: Tensor | None = None


@dataclass(frozen=True)
class AttentionLayout:
    """How tokens [tokens] are spread over blocks; `places` [tokens] is where each token's own
    query stands in the blocks' flattened queries, one block behind another."""

    blocks: tuple[AttentionBlock, ...]
    places: Tensor


@dataclass(frozen=True)
class RowLayout:
    """Rows concatenated, each attending to its own past.

    starts [rows + 1] int32: where each begins, and where the last ends. longest: tokens of a row.
    """

    starts: Tensor
    longest: int

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Flash attention on [1, heads, tokens, head_dim]; returns [1, tokens, heads, head_dim]."""
        from torch.nn.attention.varlen import varlen_attn

        attended = varlen_attn(
            *(states.squeeze(0).transpose(0, 1) for states in (query, key, value)),
            self.starts, self.starts, self.longest, self.longest, scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return attended.unsqueeze(0)


@dataclass(frozen=True)
class MaskedLayout:
    """Attention over all tokens at once; `mask` says which tokens each one attends to."""

    mask: BlockMask

    @classmethod
    def of(cls, owner: Tensor, prompt: Tensor) -> MaskedLayout:
        """owner [tokens] int64: the row that each is of; it sees what of the row lies before it.
        prompt [tokens] int64: a further row that each sees, -1: none."""

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = (owner[query] == owner[key]) & (key <= query)
            return own | (prompt[query] == owner[key])

        return cls(create_block_mask(sees, None, None, len(owner), len(owner), owner.device.type))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Flex attention on [1, heads, tokens, head_dim]; returns [1, tokens, heads, head_dim]."""
        attended = _flex(query.device.type)(
            query, key, value, block_mask=self.mask, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return attended.transpose(1, 2)


@functools.cache
def _flex(device: str) -> Callable[..., Any]:
    """Flex attention, compiled but on processors, where it is for tests and has no gradient."""
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True)


Layout = AttentionLayout | RowLayout | MaskedLayout


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention on [batch, heads, length, head_dim]; with a layout, where batch is 1,
    between the tokens that it brings together. Returns [batch, length, heads, head_dim]."""
    if packed_layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale = kwargs.get("scaling")
    if isinstance(packed_layout, RowLayout):
        return packed_layout.attend(query, key, value, scale, kwargs.get("sliding_window")), None
    if isinstance(packed_layout, MaskedLayout):
        return packed_layout.attend(query, key, value, scale), None
    # On a processor torch's bfloat16 kernel takes four times as long as float32's for the gradient.
    in_float32 = query.dtype == torch.bfloat16 and query.device.type == "cpu"
    dtype = torch.float32 if in_float32 else query.dtype
    parts = []
    for block in packed_layout.blocks:
        attended, _ = sdpa_attention_forward(
            module,
            _take(query, block.queries, block.in_order).to(dtype),
            _take(key, block.keys, block.in_order).to(dtype),
            _take(value, block.keys, block.in_order).to(dtype),
            None if block.mask is None else block.mask.to(dtype),
            **{**kwargs, "is_causal": block.mask is None},
        )
        parts.append(attended.flatten(0, 1).to(query.dtype))
    if packed_layout.blocks[0].in_order:
        return parts[0].unsqueeze(0), None
    attended = parts[0] if len(parts) == 1 else torch.cat(parts)
    return attended.index_select(0, packed_layout.places).unsqueeze(0), None


def _take(states: Tensor, tokens: Tensor, in_order: bool) -> Tensor:
    """[1, heads, length, head_dim] -> [rows, heads, tokens of a row, head_dim]."""
    taken = states.squeeze(0).transpose(0, 1)
    if not in_order:
        taken = taken.index_select(0, tokens.flatten())
    return taken.unflatten(0, tokens.shape).transpose(1, 2)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
