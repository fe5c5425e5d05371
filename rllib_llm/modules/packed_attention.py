"""Attention between concatenated rows without padding, prompts once per group.

    tokens  [prompt a | prompt b | completion a1 | completion a2 | completion b1 ...]

Everything in a transformer but attention treats tokens one by one, so it runs on the tokens alone.
Attention is one of three kernels (setting `attn_implementation`):

    sdpa               gathers the tokens into blocks of padded rows, runs there, puts results back
    flash_attention_2  flash attention for rows of different lengths, each with its own prompt
    flex_attention     torch's flex attention, with a mask that says which token sees which

On a processor torch's kernel for the gradient has no matrix instructions: in bfloat16 it takes four
times as long as in float32. There `half_attention` computes scores again, whole, by products that
have them, from the log-sum of each query that the forward pass gave. As in FlashAttention-2 (Dao
2023, algorithm 2), with scores s = scale q k, log-sum l, p = exp(s - l), and the gradient g of the
result o:

    d v = p^T g        t = p (g v - sum(g o))        d q = scale t k        d k = scale t^T q

A product rounds what it gives to eight bits. So l and sum(g o) are subtracted inside of it, as
three more columns of q and g beside ones in k and v: what is rounded is log p, whose error weighs
p log p, and the difference from the mean, not two numbers that nearly cancel. Scores lie as
[keys, queries]: fewer products then read a transposed matrix, which takes twice the time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
    """Blocks over which tokens [tokens] are spread; `places` [tokens] is where each token's own
    query stands in the blocks' flattened queries, the blocks concatenated."""

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

        shares: dict[str, Any] = {}
        if _shares_heads(varlen_attn):
            shares["enable_gqa"] = query.shape[1] != key.shape[1]
        else:
            heads = query.shape[1] // key.shape[1]
            key, value = (states.repeat_interleave(heads, dim=1) for states in (key, value))
        attended = varlen_attn(
            *(states.squeeze(0).transpose(0, 1) for states in (query, key, value)),
            self.starts, self.starts, self.longest, self.longest, scale=scale,
            window_size=(-1 if window is None else window - 1, 0), **shares,
        )  # fmt: skip
        return attended.unsqueeze(0)


@functools.cache
def _shares_heads(attention: Callable[..., Any]) -> bool:
    """Whether it takes fewer heads of keys than of queries; that of torch 2.11 does not."""
    return "enable_gqa" in inspect.signature(attention).parameters


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
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    packed_layout: Layout | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
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


MAX_SCORES = 2**24  # of one row and head, beyond which torch's kernel needs less memory
_SCORES_AT_ONCE = 2**21  # of several rows and heads: 4 MiB
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class HeadRows:
    """A block whose rows are those of each head: rows [rows * heads], of `q` queries and `k` keys.

    queries [rows * heads * q] and keys [rows * heads * k]: places in [tokens * heads] and
    [tokens * key heads]. unused: places in `queries` that stand for no token, or None. mask
    [rows, 1, q, k] or None, as the block's; seen [rows or 1, 1, k, q]: the same, transposed.
    prompts [rows]: see `AttentionBlock`. own_queries and own_keys [own tokens * heads]: where the
    block's own tokens stand in `queries` and `keys`, for each of the heads.
    """

    rows: int
    q: int
    k: int
    queries: Tensor
    keys: Tensor
    unused: Tensor | None
    mask: Tensor | None
    seen: Tensor
    prompts: Tensor | None
    own_queries: Tensor
    own_keys: Tensor


@dataclass(frozen=True)
class HeadLayout:
    """An `AttentionLayout` for so many heads; the blocks' own tokens, concatenated, are
    all tokens in their order."""

    heads: int
    key_heads: int
    blocks: tuple[HeadRows, ...]


def reads_half(layout: AttentionLayout, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `half_attention` can compute this layout, and is faster."""
    if dtype != torch.bfloat16 or device.type != "cpu":
        return False
    return all(b.queries.shape[1] * b.keys.shape[1] <= MAX_SCORES for b in layout.blocks)


def lay_out_heads(layout: AttentionLayout, heads: int, key_heads: int) -> HeadLayout:
    """`layout` for `heads` of queries, of which several may share one of `key_heads`."""
    head = torch.arange(heads).unsqueeze(1)
    blocks, start = [], 0
    for block in layout.blocks:
        end = start + block.queries.numel()
        own = layout.places[(layout.places >= start) & (layout.places < end)] - start
        blocks.append(_head_rows(block, head, key_heads, own))
        start = end
    return HeadLayout(heads, key_heads, tuple(blocks))


def _head_rows(block: AttentionBlock, head: Tensor, key_heads: int, own: Tensor) -> HeadRows:
    """own [own tokens]: their places in the block's flattened queries."""
    rows, q = block.queries.shape
    k = block.keys.shape[1]
    heads = len(head)
    mask = None if block.mask is None else block.mask.to(torch.bfloat16)
    if mask is None:
        past = torch.ones(q, k, dtype=torch.bool).tril()
        seen = torch.zeros(1, 1, q, k, dtype=torch.bfloat16).masked_fill_(~past, -torch.inf)
    else:
        seen = mask
    row = (own // q).unsqueeze(1) * heads + head.squeeze(1)
    at = (own % q).unsqueeze(1)
    own_queries = (row * q + at).flatten()
    unused = torch.ones(rows * heads * q, dtype=torch.bool)
    unused[own_queries] = False
    return HeadRows(
        rows, q, k,
        queries=(block.queries.unsqueeze(1) * heads + head).flatten(),
        keys=(block.keys.unsqueeze(1) * key_heads + head // (heads // key_heads)).flatten(),
        unused=unused.nonzero().squeeze(1) if len(own) < rows * q else None,
        mask=mask,
        seen=seen.transpose(2, 3).contiguous(),
        prompts=block.prompts,
        own_queries=own_queries,
        own_keys=own_queries if q == k else (row * k + (k - q) + at).flatten(),
    )  # fmt: skip


def half_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: HeadLayout, scale: float
) -> Tensor:
    """Attention of bfloat16 queries [tokens, heads, head_dim] to keys and values [tokens, key
    heads, head_dim] as laid out; [tokens, heads * head_dim]."""
    return _HalfAttention.apply(query, key, value, layout, scale)


class _HalfAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: HeadLayout, scale: float
    ) -> Tensor:
        head_dim = query.shape[-1]
        tables = [tensor.reshape(-1, head_dim) for tensor in (query, key, value)]
        parts, sums = [], []
        for block in layout.blocks:
            shape = (block.rows, layout.heads, -1, head_dim)
            places = (block.queries, block.keys, block.keys)
            taken = [
                table.index_select(0, place).view(shape)
                for table, place in zip(tables, places, strict=True)
            ]
            attended, log_sum = _forward(
                *taken, 0.0, block.mask is None, attn_mask=block.mask, scale=scale
            )
            parts.append(attended.reshape(-1, head_dim))
            sums.append(log_sum.flatten())
        attended = _of_tokens(parts, [block.own_queries for block in layout.blocks])
        ctx.save_for_backward(*tables, attended, *sums)
        ctx.layout, ctx.scale = layout, scale
        return attended.view(len(query), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, attended, *sums = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        head_dim = query.shape[-1]
        grad = grad.reshape(-1, head_dim)
        mean = grad.float().mul_(attended.float()).sum(dim=1)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for block, log_sum in zip(layout.blocks, sums, strict=True):
            own, grads = (table.index_select(0, block.queries) for table in (query, grad))
            queries = _with_columns(own, log_sum / -scale)
            if block.unused is not None:  # what is there belongs to no token, and p is to be 0
                queries.select(1, head_dim).index_fill_(0, block.unused, -torch.inf)
            keys = key.index_select(0, block.keys)
            inputs = (
                queries, own, _with_ones(keys), keys,
                _with_ones(value.index_select(0, block.keys)),
                _with_columns(grads, mean.index_select(0, block.queries).neg_()), grads,
            )  # fmt: skip
            rows = block.rows * layout.heads
            found.append(
                _block_gradients(
                    block,
                    layout.heads,
                    [tensor.view(rows, -1, tensor.shape[-1]) for tensor in inputs],
                    scale,
                )
            )
        of_queries, of_keys, of_values = zip(*found, strict=True)
        return (
            _of_tokens(of_queries, [block.own_queries for block in layout.blocks]).view(
                -1, layout.heads, head_dim
            ),
            _of_shared(layout, of_keys),
            _of_shared(layout, of_values),
            None,
            None,
        )


_COLUMNS = 3  # bfloat16 numbers whose sum is a float32


def _with_columns(table: Tensor, number: Tensor) -> Tensor:
    """`table` [rows, n] and three columns whose sum is the float32 `number` [rows]."""
    high = number.to(table.dtype)
    rest = number - high
    middle = rest.to(table.dtype)
    low = (rest - middle).to(table.dtype)
    return torch.cat([table, torch.stack([high, middle, low], dim=1)], dim=1)


def _with_ones(table: Tensor) -> Tensor:
    return torch.cat([table, table.new_ones(len(table), _COLUMNS)], dim=1)


def _block_gradients(
    block: HeadRows, heads: int, inputs: list[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries [rows * heads, q, head_dim], keys and values [rows * heads, k, head_dim]
    from all of them, with their further columns and without."""
    _, q, _, k, _, _, g = inputs
    results = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    # Several rows at a time with all of their heads, or some heads of a row.
    step = max(1, _SCORES_AT_ONCE // (block.q * block.k))
    step = step // heads * heads or max(n for n in range(1, step + 1) if heads % n == 0)
    for start in range(0, len(q), step):
        part = slice(start, start + step)
        q_more, q, k_more, k, v_more, g_more, g = (tensor[part] for tensor in inputs)
        row, end = start // heads, (start + len(q) - 1) // heads + 1
        seen = block.seen if len(block.seen) == 1 else block.seen[row:end]
        weights = _scaled_bmm(k_more, q_more.transpose(1, 2), scale)
        weights.view(end - row, -1, block.k, block.q).add_(seen)
        weights.exp_()
        slopes = torch.bmm(v_more, g_more.transpose(1, 2)).mul_(weights)
        of_queries, of_keys, of_values = (result[part] for result in results)
        _scaled_bmm(slopes.transpose(1, 2), k, scale, of_queries)
        _scaled_bmm(slopes, q, scale, of_keys)
        torch.bmm(weights, g, out=of_values)
    return results


def _scaled_bmm(a: Tensor, b: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """scale a b, rounded once."""
    unread = a.new_zeros(()).expand(len(a), a.shape[1], b.shape[2])
    return torch.baddbmm(unread, a, b, beta=0, alpha=scale, out=out)


def _of_tokens(parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """[tokens * heads, head_dim] from what the blocks have for their own tokens."""
    tables = (part.reshape(-1, part.shape[-1]) for part in parts)
    taken = [table.index_select(0, place) for table, place in zip(tables, places, strict=True)]
    return taken[0] if len(taken) == 1 else torch.cat(taken)


def _of_shared(layout: HeadLayout, grads: Sequence[Tensor]) -> Tensor:
    """Gradients [tokens, key heads, head_dim] of keys or values from those at [rows * heads, k] of
    each block. What shared prompts got from each row is summed; so is what a key got from each of
    the heads that share it."""
    parts = list(grads)
    last = layout.blocks[-1]
    if last.prompts is not None:
        prompts, own = parts
        shared = own[:, : last.k - last.q].unflatten(0, (last.rows, -1)).float()
        summed = prompts.unflatten(0, (-1, layout.heads)).float()
        summed.index_add_(0, last.prompts, shared)
        parts[0] = summed.to(own.dtype)
    taken = _of_tokens(parts, [block.own_keys for block in layout.blocks])
    taken = taken.view(-1, layout.heads, taken.shape[-1])
    if layout.key_heads == layout.heads:
        return taken
    return taken.unflatten(1, (layout.key_heads, -1)).sum(dim=2)
