"""One decode step of Llama-shaped models in a third of the operations transformers' modules take.

At a few dozen rows a step of a small model is bound by the number of operations, not by their
arithmetic. The numbers are the model's own (same norms, rotary embedding, activation and weights)
up to round-off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from rllib_llm.engines.kv_cache import SharedPromptCache, SharedPromptLayer, StaticLayer
from rllib_llm.modules.llama_trunk import (
    TRUNKS,
    is_plain,
    is_read_whole,
    is_rms_norm,
    products_of,
)
from rllib_llm.modules.lora import is_low_rank, low_rank_factors
from rllib_llm.modules.model_source import is_multimodal
from rllib_llm.modules.precision import ONEDNN, onednn_add_linear, onednn_linear
from rllib_llm.modules.trunk import LogitTransform, take_apart
from rllib_llm.shared.process import multiplies_bfloat16

# --- Weights laid out for decoding: skinny matrix products read them faster transposed, or packed

# Distance between rows beyond a power of two, so that they do not fall into the same cache sets.
_ROW_PADDING = 16
_COPY_BLOCK = 64
# Fewer steps than this save less than the copy of the weights costs.
_MIN_STEPS = 24
# Numbers of a bfloat16 weight beyond which reading it takes the time, however it lies.
_MOST_PACKED = 2**24


def pays(weight: torch.Tensor, steps: int) -> bool:
    """Whether a transposed copy of the weight is faster over so many steps, its making included."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and steps >= _MIN_STEPS


def pays_packed(weight: torch.Tensor, steps: int) -> bool:
    """Whether a copy of the weight in oneDNN's layout is faster over so many steps, where oneDNN
    multiplies."""
    if weight.device.type != "cpu" or steps < _MIN_STEPS:
        return False
    if weight.dtype == torch.float32:
        return True
    return (
        weight.dtype == torch.bfloat16
        and weight.numel() <= _MOST_PACKED
        and torch.backends.mkldnn.is_available()
        and multiplies_bfloat16()
    )


def packed(weight: torch.Tensor) -> torch.Tensor:
    """The weight [out, in] in oneDNN's layout, for `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


def packed_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """residual + inputs @ weight.T + bias [rows, out], without gradient, of a `packed` weight: the
    operators that torch's own compiler uses on a CPU."""
    if residual is None:
        return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(inputs, residual, weight, bias, "add")


def transposed(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weights side by side in one copy.

    Args:
        weights: each [out_i, in], with the same `in`.

    Returns:
        [in, sum of out_i], its rows 16 numbers farther apart than they are long.
    """
    num_in, num_out = weights[0].shape[1], sum(len(weight) for weight in weights)
    copy = weights[0].new_empty(num_in, num_out + _ROW_PADDING)[:, :num_out]
    end = 0
    for weight in weights:
        for block in weight.split(_COPY_BLOCK):  # whole columns would miss the cache at each step
            start, end = end, end + len(block)
            copy[:, start:end] = block.t()
    return copy


_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_Norm = Callable[[torch.Tensor], torch.Tensor]
# Caches, each with the padding mask of its rows, [rows, seen + 1] bool, True where a token counts;
# None if all do.
Blocks = Sequence[tuple[SharedPromptCache, torch.Tensor | None]]
# Which of the rows stand in several caches, one cache after the other, and where the rows stand
# there, [rows] int64 each.
Order = tuple[torch.Tensor, torch.Tensor]
# Of one layer and block of rows: their keys and values, and the mask that is added to the logits of
# their attention, [rows, 1, 1, positions that are looked at].
_Seen = tuple[SharedPromptLayer | StaticLayer, torch.Tensor | None]


def is_llama_shaped(model: nn.Module) -> bool:
    """Whether `LlamaStep` can compute this model.

    Exact classes only, with plain float layers and low-rank adapters of them: quantised layers,
    other adapters, hooks and replaced forwards are the model's own business.
    """
    if is_multimodal(model):
        halves = take_apart(model)
        if halves is None or halves.transform != LogitTransform():
            return False
        parts = [*halves.trunk.modules(), halves.head]
        is_known = type(halves.trunk) in TRUNKS and halves.trunk is model.get_decoder()
    else:
        is_known, parts = type(model) in _MODELS, list(model.modules())
    if not is_known:
        return False
    return is_read_whole(model.get_decoder()) and all(is_plain(p) or is_low_rank(p) for p in parts)


class _Projection:
    """x @ matrix + bias for one or several linear layers with the same input, side by side, in the
    way that is decided here once: by `apply` to inputs, or by `add_to` to (residual, inputs)."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    add_to: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __init__(self, layers: Sequence[nn.Module], steps: int) -> None:
        linears = [getattr(layer, "base_layer", layer) for layer in layers]
        self._lay_out(linears, steps)
        factors = low_rank_factors(layers) if linears != list(layers) else None
        if factors is not None:
            down, up = factors
            self.apply = adapted = functools.partial(_adapted, self.apply, down, up)
            self.add_to = lambda residual, inputs: residual + adapted(inputs)

    def _lay_out(self, linears: Sequence[nn.Linear], steps: int) -> None:
        weights = [linear.weight for linear in linears]
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.cat([
                linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
                for linear in linears
            ])  # fmt: skip
        is_onednn = products_of(linears[0], weights[0]) is ONEDNN
        if pays(weights[0], steps) and not is_onednn:
            matrix = transposed(weights)
        else:
            whole = weights[0] if len(weights) == 1 else torch.cat(weights)
            if pays_packed(whole, steps):
                # Closures hold the matrix, not `self`: a cycle would keep it in memory.
                self.matrix = matrix = packed(whole)
                self.apply = functools.partial(packed_linear, weight=matrix, bias=bias)
                self.add_to = lambda residual, inputs: packed_linear(inputs, matrix, bias, residual)
                return
            matrix = whole.t()
        self.matrix = matrix
        if is_onednn:
            self.apply = functools.partial(onednn_linear, weight=matrix.t(), bias=bias)
            self.add_to = functools.partial(onednn_add_linear, weight=matrix.t(), bias=bias)
        elif bias is None:
            self.apply = functools.partial(torch.mm, mat2=matrix)
            self.add_to = functools.partial(torch.addmm, mat2=matrix)
        else:
            self.apply = functools.partial(torch.addmm, bias, mat2=matrix)
            self.add_to = lambda residual, inputs: torch.addmm(residual, inputs, matrix).add_(bias)


def _adapted(
    apply: Callable[[torch.Tensor], torch.Tensor], down: torch.Tensor, up: torch.Tensor,
    inputs: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """apply(inputs) + inputs @ down @ up, the sum in the factors' dtype, as peft computes it."""
    plain = apply(inputs)
    summed = torch.addmm(plain.to(down.dtype), torch.mm(inputs.to(down.dtype), down), up)
    return summed.to(plain.dtype)


def _norm(module: nn.Module) -> _Norm:
    """The RMS norm in one operation instead of six, where it is the one of these models."""
    if not is_rms_norm(module):
        return module.forward
    weight, epsilon = module.weight, module.variance_epsilon
    return functools.partial(
        torch.rms_norm, normalized_shape=list(weight.shape), weight=weight, eps=epsilon
    )


@dataclass
class _RotaryAngles:
    """cos and signed sin of the step's positions, [rows, 1, head_dim]."""

    cos: torch.Tensor
    signed_sin: torch.Tensor

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotated queries or keys, [rows, num_heads, head_dim] (Su et al. 2021, RoFormer)."""
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        return torch.addcmul(heads * self.cos, swapped, self.signed_sin)


class _Layer:
    """One decoder layer on [rows, hidden]."""

    def __init__(self, layer: nn.Module, window: int | None, steps: int) -> None:
        attention = layer.self_attn
        self.input_norm = _norm(layer.input_layernorm)
        self.mlp_norm = _norm(layer.post_attention_layernorm)
        self.qkv = _Projection([attention.q_proj, attention.k_proj, attention.v_proj], steps)
        self.head_norms: tuple[_Norm, _Norm] | None = None  # of queries, of keys
        if hasattr(attention, "q_norm"):
            self.head_norms = _norm(attention.q_norm), _norm(attention.k_norm)
        self.output = _Projection([attention.o_proj], steps)
        self.gate = _Projection([layer.mlp.gate_proj], steps)
        self.up = _Projection([layer.mlp.up_proj], steps)
        self.down = _Projection([layer.mlp.down_proj], steps)
        self.activation = layer.mlp.act_fn.forward
        self.scaling = attention.scaling
        self.window = window
        self.head_dim = attention.head_dim
        self.num_key_heads = attention.k_proj.out_features // self.head_dim
        self.num_query_heads = attention.q_proj.out_features // self.head_dim

    def __call__(
        self, hidden: torch.Tensor, rotate: _RotaryAngles, seen: Sequence[_Seen]
    ) -> torch.Tensor:
        hidden = self.output.add_to(hidden, self._attend(hidden, rotate, seen))
        normed = self.mlp_norm(hidden)
        gated = self.activation(self.gate.apply(normed)).mul_(self.up.apply(normed))
        return self.down.add_to(hidden, gated)

    def _attend(
        self, hidden: torch.Tensor, rotate: _RotaryAngles, seen: Sequence[_Seen]
    ) -> torch.Tensor:
        heads = self.qkv.apply(self.input_norm(hidden)).unflatten(-1, (-1, self.head_dim))
        values = heads[:, self.num_query_heads + self.num_key_heads :]
        if self.head_norms is None:
            rotated = rotate(heads[:, : self.num_query_heads + self.num_key_heads])
            queries = rotated[:, : self.num_query_heads]
            keys = rotated[:, self.num_query_heads :]
        else:
            query_norm, key_norm = self.head_norms
            queries = rotate(query_norm(heads[:, : self.num_query_heads]))
            keys = rotate(key_norm(heads[:, self.num_query_heads : -self.num_key_heads]))
        # Queries that share a key head stand in the place of query positions.
        queries = queries.unflatten(1, (self.num_key_heads, -1))
        keys, values = keys.unsqueeze(2), values.unsqueeze(2)
        if len(seen) == 1:
            return self._look(queries, keys, values, *seen[0])
        rows = [cache.num_rows for cache, _ in seen]
        states = (each.split(rows) for each in (queries, keys, values))
        blocks = zip(*states, seen, strict=True)
        return torch.cat([self._look(q, k, v, *held) for q, k, v, held in blocks])

    def _look(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        cache: SharedPromptLayer | StaticLayer, mask: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of a block's queries to its cache, after adding their keys and values, [rows,
        heads * head_dim]."""
        keys, values = cache.update(keys, values)
        start = cache.first_in_window(self.window)
        if mask is not None and start:
            mask = mask[..., start:].clone()  # CUDA's kernels read it from an aligned address
        attended = F.scaled_dot_product_attention(
            queries, keys[:, :, start:], values[:, :, start:], attn_mask=mask, scale=self.scaling
        )
        return attended.reshape(len(queries), -1)


class LlamaStep:
    """Logits after one new token per row, for models that `is_llama_shaped`.

    Holds copies of adapters, and of the weights where the layout pays: make a new one after they
    change.

    Args:
        steps: tokens to be decoded.
        value_head: if given, the value of each state is one more column of the logits.
    """

    def __init__(self, model: nn.Module, steps: int, value_head: nn.Module | None = None) -> None:
        trunk, lm_head = model.get_decoder(), model.get_output_embeddings()
        # Positions a layer looks back, itself among them; None without a limit.
        window = getattr(trunk.config, "sliding_window", None)
        kinds = getattr(trunk.config, "layer_types", None)
        slides = [kinds is None or kind == "sliding_attention" for kind in kinds or trunk.layers]
        self.embedding = trunk.embed_tokens.weight
        self.rotary = trunk.rotary_emb
        self.layers = [
            _Layer(layer, window if slides[i] else None, steps)
            for i, layer in enumerate(trunk.layers)
        ]
        self.norm = _norm(trunk.norm)
        heads = [lm_head] if value_head is None else [lm_head, value_head.linear]
        self.head = _Projection(heads, steps)
        self.head_dtype = model.lm_head.weight.dtype  # float32 beside a trunk in 16 bits, if asked

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, blocks: Blocks,
        order: Order | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Appends the tokens to the caches and returns logits [rows, vocab].

        Args:
            tokens: [rows] int64.
            positions: [rows] int64, of these tokens.
            blocks: the caches that hold everything before them.
            order: of several caches; None: as the rows are given.
        """
        dtype = self.embedding.dtype
        masks = [None if mask is None else additive(mask, dtype) for _, mask in blocks]
        layers = zip(*(cache.layers for cache, _ in blocks), strict=True)
        seen = [list(zip(caches, masks, strict=True)) for caches in layers]
        return self.logits(tokens, positions, seen, order)

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, seen: Sequence[Sequence[_Seen]],
        order: Order | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """As `__call__`, given what each layer's rows attend to, block by block."""
        if order is not None:
            tokens, positions = tokens[order[0]], positions[order[0]]
        hidden = F.embedding(tokens, self.embedding)
        cos, sin = self.rotary(hidden, positions.unsqueeze(1))
        half = sin.shape[-1] // 2
        rotate = _RotaryAngles(cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1))
        for layer, held in zip(self.layers, seen, strict=True):
            hidden = layer(hidden, rotate, held)
        if order is not None:
            hidden = hidden[order[1]]
        return self.head.apply(self.norm(hidden).to(self.head_dtype))


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where the mask [rows, positions] is True, else -inf; [rows, 1, 1, positions]."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)[:, None, None]
