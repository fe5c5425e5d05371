"""Trunks of Llama's shape on dense rows, from the fused layers, with gradient or without.

The numbers are those of the model's own forward up to round-off. In the last layer only the tokens
whose state is wanted go through the second half.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaModel, MistralModel, PreTrainedModel, Qwen2Model, Qwen3Model
from transformers.activations import SiLUActivation

from rllib_llm.modules.packing.fused_layers import (
    embedded,
    gated_mlp,
    normed_linears,
    rms_norm,
    rotate,
)
from rllib_llm.modules.packing.half_attention import (
    HeadLayout,
    half_attention,
    lay_out_heads,
    reads_half,
)
from rllib_llm.modules.packing.llama_shape import is_plain, is_plain_tensor, is_read_whole
from rllib_llm.modules.packing.packed_attention import AttentionLayout, packed_attention
from rllib_llm.modules.packing.packing import WantedTokens
from rllib_llm.modules.products import TORCH, OneDNNLinear, products_of

_TRUNKS = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
_DTYPES = ({torch.float32}, {torch.bfloat16})  # one for all of a trunk's parameters
_COMMON_PARTS = (
    nn.Embedding, nn.Linear, OneDNNLinear, nn.ModuleList, nn.SiLU, SiLUActivation
)  # fmt: skip


def is_fusible(trunk: nn.Module) -> bool:
    """Whether `fused_hidden` supports this trunk, and is faster.

    Exact classes only, float32 or bfloat16 on a CPU and nothing in between: quantised layers,
    adapters, hooks, compiled layers, dropout and gradient checkpointing are the model's own
    business.
    """
    if type(trunk) not in _TRUNKS:
        return False
    config = trunk.config
    if trunk.training and (trunk.gradient_checkpointing or config.attention_dropout):
        return False
    attention, mlp = trunk.layers[0].self_attn, trunk.layers[0].mlp
    return (
        is_read_whole(trunk)
        and config.hidden_act == "silu"
        and mlp.down_proj.bias is None
        and attention.o_proj.bias is None
        and all(_is_own(part, trunk) for part in trunk.modules())
        and all(_is_plain_on_cpu(parameter) for parameter in trunk.parameters())
        and {parameter.dtype for parameter in trunk.parameters()} in _DTYPES
    )


def _is_own(part: nn.Module, trunk: nn.Module) -> bool:
    """Whether it is a part that transformers builds such a trunk from, as it was built."""
    own = type(part) in _COMMON_PARTS or type(part).__module__ == type(trunk).__module__
    return own and is_plain(part) and part._compiled_call_impl is None


def _is_plain_on_cpu(parameter: Tensor) -> bool:
    return parameter.device.type == "cpu" and is_plain_tensor(parameter)


def fused_hidden(trunk: PreTrainedModel, wanted: WantedTokens) -> Tensor:
    """Last hidden state [wanted tokens, hidden] at the positions that predict the wanted tokens of
    dense rows; the trunk must be one that `is_fusible`."""
    assert isinstance(wanted.layout, AttentionLayout) and wanted.position_ids is not None
    embedding = trunk.embed_tokens
    # With the padding's index, whose row gets no gradient: a pad token may be text as well.
    hidden = embedded(wanted.input_ids[0], embedding.weight, embedding.padding_idx)
    cos, sin = trunk.rotary_emb(hidden, wanted.position_ids)
    rotation = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
    layout = _layout(trunk, wanted.layout, hidden)
    *layers, last = trunk.layers
    for layer in layers:
        hidden = _mlp(layer, _attend(layer, hidden, rotation, layout, None))
    # Rows that share a prompt want its last state several times: perhaps more states than tokens.
    few = len(wanted.predicted_at) <= len(hidden)
    picked = wanted.predicted_at if few else None
    hidden = _mlp(last, _attend(last, hidden, rotation, layout, picked))
    hidden = rms_norm(hidden, trunk.norm.weight, trunk.norm.variance_epsilon)
    return hidden if few else hidden.index_select(0, wanted.predicted_at)


def _layout(
    trunk: PreTrainedModel, layout: AttentionLayout, hidden: Tensor
) -> AttentionLayout | HeadLayout:
    if not reads_half(layout, hidden.dtype, hidden.device):
        return layout
    config = trunk.config
    return lay_out_heads(layout, config.num_attention_heads, config.num_key_value_heads)


def _attend(
    layer: nn.Module,
    hidden: Tensor,
    rotation: tuple[Tensor, Tensor],
    layout: AttentionLayout | HeadLayout,
    picked: Tensor | None,
) -> Tensor:
    """The layer's first half, [tokens, hidden]; with `picked`, of these tokens alone."""
    attention, norm = layer.self_attn, layer.input_layernorm
    linears = attention.q_proj, attention.k_proj, attention.v_proj
    projected = normed_linears(
        hidden,
        norm.weight,
        norm.variance_epsilon,
        tuple(linear.weight for linear in linears),
        tuple(linear.bias for linear in linears),
        products_of(attention.q_proj, hidden),
    )
    query, key, value = (part.unflatten(-1, (-1, attention.head_dim)) for part in projected)
    if hasattr(attention, "q_norm"):
        query = rms_norm(query, attention.q_norm.weight, attention.q_norm.variance_epsilon)
        key = rms_norm(key, attention.k_norm.weight, attention.k_norm.variance_epsilon)
    query, key = rotate(query, *rotation), rotate(key, *rotation)
    if isinstance(layout, HeadLayout):
        attended = half_attention(query, key, value, layout, attention.scaling)
    else:
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        attended, _ = packed_attention(
            attention, query, key, value, None, layout, scaling=attention.scaling
        )
        attended = attended[0].flatten(1)
    if picked is not None:
        attended, hidden = attended.index_select(0, picked), hidden.index_select(0, picked)
    if products_of(attention.o_proj, attended) is TORCH:
        return torch.addmm(hidden, attended, attention.o_proj.weight.t())
    return hidden + attention.o_proj(attended)


def _mlp(layer: nn.Module, hidden: Tensor) -> Tensor:
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    return gated_mlp(
        hidden,
        norm.weight,
        norm.variance_epsilon,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
        products_of(mlp.gate_proj, hidden),
    )
