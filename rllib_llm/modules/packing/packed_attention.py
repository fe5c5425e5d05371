"""Attention between rows that lie one behind another without padding, prompts once per group.

    tokens  [prompt a | prompt b | completion a1 | completion a2 | completion b1 ...]

Everything in a transformer but attention treats tokens one by one, so it runs on the tokens alone.
Attention gathers them into blocks of padded rows, runs there, and puts its results back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rllib_llm_packed"


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


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_layout: AttentionLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention on [batch, heads, length, head_dim]; with a layout, where batch is 1,
    between the tokens that it brings together. Returns [batch, length, heads, head_dim]."""
    if packed_layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
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


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
