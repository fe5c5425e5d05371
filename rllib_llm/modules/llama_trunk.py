"""Trunks of Llama's shape on dense rows, on a processor, with gradient or without.

Autograd keeps every intermediate of a norm, an activation and a product, and reads and writes each
of them. Here gradients are written by hand: norms and activation are computed again in the backward
pass, in place where no other code reads them, and in the last layer only the tokens
whose state is wanted go through the second half. Results and gradients are those of transformers'
modules up to round-off.

Layers take tokens [tokens, features], float32 or bfloat16. In bfloat16 norms and their gradients
are computed in float32 and rounded once; what goes between layers is bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import LlamaModel, MistralModel, PreTrainedModel, Qwen2Model, Qwen3Model
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rllib_llm.modules.packed_attention import (
    AttentionLayout,
    HeadLayout,
    half_attention,
    lay_out_heads,
    packed_attention,
    reads_half,
)
from rllib_llm.modules.packing import WantedTokens
from rllib_llm.modules.precision import ONEDNN, TORCH, Float32Linear, OneDNNLinear, Products

# Classes of tensors that are neither quantised nor sharded, which have their own. Tests add one.
PLAIN_TENSORS: set[type] = {nn.Parameter, torch.Tensor}
_NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether it is these models' own RMS norm."""
    return type(module) in _NORMS


def is_read_whole(trunk: nn.Module) -> bool:
    """Whether the model reads all of its layers, and rotates all of each head."""
    rotary_dim = 2 * trunk.rotary_emb.inv_freq.shape[-1]
    all_layers = len(trunk.layers) == trunk.config.num_hidden_layers
    return all_layers and rotary_dim == trunk.layers[0].self_attn.head_dim


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is neither quantised nor sharded."""
    return type(tensor) in PLAIN_TENSORS


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call is the forward pass of its class: no hooks, no replaced forward."""
    hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return not (hooks or module._backward_hooks or module._backward_pre_hooks)


def is_plain(module: nn.Module) -> bool:
    """Whether a part computes what its class and weights say: no hooks, no replaced forward, no
    adapter, no quantised weights."""
    if not is_called_plainly(module):
        return False
    if hasattr(module, "base_layer"):  # peft's layers, which are no subclasses of nn.Linear
        return False
    if isinstance(module, nn.Linear | nn.Embedding):
        plain = type(module) in (nn.Linear, OneDNNLinear, Float32Linear, nn.Embedding)
        return plain and is_plain_tensor(module.weight)
    return True


def embedded(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """Rows [tokens, features] of an embedding [vocab, features]; `padding_idx` gets no gradient.
    Sums over the places of a token are float32, which torch's would not be in bfloat16."""
    if weight.dtype != torch.bfloat16:
        return F.embedding(ids, weight, padding_idx)
    return _Embedding.apply(ids, weight, padding_idx)


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """inputs / sqrt(mean(inputs^2) + eps) * weight over the last dimension (Zhang and Sennrich
    2019); `inputs` [..., features]."""
    return _RMSNorm.apply(inputs, weight, eps)


def normed_linears(
    inputs: Tensor, norm_weight: Tensor, eps: float, weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...], products: Products = TORCH,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Several linear layers, weights [out_i, in], of the RMS norm of the same inputs [tokens, in];
    returns [tokens, out_i] each."""
    count = len(weights)
    return _NormedLinears.apply(inputs, norm_weight, eps, products, count, *weights, *biases)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) of queries or keys [tokens, heads, head_dim]; cos and sin
    [tokens, 1, head_dim], their two halves the same, as transformers has them."""
    return _Rotation.apply(heads, cos, sin)


def gated_mlp(
    inputs: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, up: Tensor, down: Tensor,
    products: Products = TORCH,
) -> Tensor:  # fmt: skip
    """inputs + down(silu(gate(normed)) * up(normed)), a Llama layer's second half (Shazeer 2020).

    inputs [tokens, hidden]; gate and up [inner, hidden], down [hidden, inner].
    """
    return _GatedMLP.apply(inputs, norm_weight, eps, gate, up, down, products)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_idx = weight.shape, padding_idx
        return weight.index_select(0, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        tokens, place = ids.unique(return_inverse=True)
        sums = grad.new_zeros(len(tokens), grad.shape[1], dtype=torch.float32)
        sums.index_add_(0, place, grad.float())
        if ctx.padding_idx is not None:
            sums.masked_fill_((tokens == ctx.padding_idx).unsqueeze(1), 0.0)
        weight_grad = grad.new_zeros(ctx.shape).index_copy_(0, tokens, sums.to(grad.dtype))
        return None, weight_grad, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _norm_scale(inputs, eps)
        ctx.save_for_backward(inputs, scale, weight)
        return _normed(inputs, scale, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_norm_gradients(grad, *ctx.saved_tensors), None


class _NormedLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, norm_weight: Tensor, eps: float, products: Products, count: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weights, biases = parameters[:count], parameters[count:]
        scale = _norm_scale(inputs, eps)
        normed = _normed(inputs, scale, norm_weight)
        ctx.save_for_backward(inputs, scale, norm_weight, *weights)
        ctx.products, ctx.has_bias = products, [bias is not None for bias in biases]
        return tuple(map(products.linear, [normed] * count, weights, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, scale, norm_weight, *weights = ctx.saved_tensors
        normed = _normed(inputs, scale, norm_weight)
        needs, products = ctx.needs_input_grad[5:], ctx.products
        count = len(weights)
        weight_grads = [
            products.mm(grad.t(), normed) if needed else None
            for grad, needed in zip(grads, needs[:count], strict=True)
        ]
        bias_grads = [
            grad.sum(dim=0) if has_bias and needed else None
            for grad, has_bias, needed in zip(grads, ctx.has_bias, needs[count:], strict=True)
        ]
        del normed
        normed_grad = products.mm(grads[0], weights[0])
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            normed_grad = products.addmm_(normed_grad, grad, weight)
        input_grad, norm_grad = _norm_gradients(normed_grad, inputs, scale, norm_weight)
        return input_grad, norm_grad, None, None, None, *weight_grads, *bias_grads


class _Rotation(torch.autograd.Function):
    """[a, b] -> [a cos - b sin, b cos + a sin]; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(heads, cos, sin, sign=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, sign=-1.0), None, None


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, up: Tensor,
        down: Tensor, products: Products,
    ) -> Tensor:  # fmt: skip
        scale = _norm_scale(inputs, eps)
        normed = _normed(inputs, scale, norm_weight)
        gates, ups = products.linear(normed, gate), products.linear(normed, up)
        del normed
        ctx.save_for_backward(inputs, scale, norm_weight, gates, ups, gate, up, down)
        ctx.products = products
        return products.addmm(inputs, F.silu(gates).mul_(ups), down.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, scale, norm_weight, gates, ups, gate, up, down = ctx.saved_tensors
        _, _, _, gate_needed, up_needed, down_needed, _ = ctx.needs_input_grad
        mm, addmm_ = ctx.products.mm, ctx.products.addmm_
        product, gates_grad, ups_grad = _product_gradients(mm(grad, down), gates, ups)
        down_grad = mm(grad.t(), product) if down_needed else None
        del product
        normed = _normed(inputs, scale, norm_weight)
        gate_grad = mm(gates_grad.t(), normed) if gate_needed else None
        up_grad = mm(ups_grad.t(), normed) if up_needed else None
        normed_grad = addmm_(mm(gates_grad, gate, out=normed), ups_grad, up)
        input_grad, norm_grad = _norm_gradients(normed_grad, inputs, scale, norm_weight, grad)
        return input_grad, norm_grad, None, gate_grad, up_grad, down_grad, None


def _product_gradients(
    product_grad: Tensor, gates: Tensor, ups: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gates) * ups, and the gradients of gates, over `product_grad`, and of ups."""
    activated = F.silu(gates)
    product, ups_grad = activated * ups, activated.mul_(product_grad)
    activated_grad = product_grad.mul_(ups)
    gates_grad = torch.ops.aten.silu_backward(activated_grad, gates, grad_input=activated_grad)
    return product, gates_grad, ups_grad


def _exact(tensor: Tensor) -> torch.dtype:
    """The dtype in which norms are computed: float32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _norm_scale(inputs: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(inputs^2) + eps), [..., 1]."""
    norms = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=_exact(inputs))
    return norms.square_().div_(inputs.shape[-1]).add_(eps).rsqrt_()


def _normed(inputs: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    dtype, exact = inputs.dtype, _exact(inputs)
    if dtype == exact:
        return (inputs * scale).mul_(weight)
    normed, weight = torch.empty_like(inputs), weight.to(exact)
    for rows in _blocks(inputs):
        normed[rows] = inputs[rows].to(exact).mul_(scale[rows]).mul_(weight)
    return normed


def _norm_gradients(
    grad: Tensor, inputs: Tensor, scale: Tensor, weight: Tensor, residual_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of inputs and weight; with s the scale, n the features, g the gradient:
    d x = s w g - x s^3 sum(w g x) / n, d w = sum over tokens of s x g.

    residual_grad: added to that of the inputs.
    """
    exact, features = _exact(inputs), inputs.shape[-1]
    input_grad, weight_grad = torch.empty_like(inputs), scale.new_zeros(features)
    along, weight = scale.pow(3).div_(-features), weight.to(exact)
    for rows in _blocks(inputs):
        own, upstream, factor = inputs[rows].to(exact), grad[rows].to(exact), scale[rows]
        products = (upstream * own).reshape(-1, features)
        weight_grad.addmv_(products.t(), factor.flatten())
        slopes = (products @ weight).view(factor.shape).mul_(along[rows])
        block = torch.mul(upstream, weight).mul_(factor).addcmul_(own, slopes)
        input_grad[rows] = block if residual_grad is None else block.add_(residual_grad[rows])
    return input_grad, weight_grad.to(inputs.dtype)


def _blocks(tensor: Tensor) -> Iterator[slice]:
    """Blocks of rows of `tensor` [tokens, ...] that fit a cache, each with its outputs."""
    rows_per_block = max(1, 2**17 * len(tensor) // max(1, tensor.numel()))
    for start in range(0, len(tensor), rows_per_block):
        yield slice(start, start + rows_per_block)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    half = first.shape[-1]
    sin = sin[..., :half]
    rotated = heads * cos
    rotated[..., :half].addcmul_(second, sin, value=-sign)
    rotated[..., half:].addcmul_(first, sin, value=sign)
    return rotated


TRUNKS = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
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
    if type(trunk) not in TRUNKS:
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
        and all(p.device.type == "cpu" and is_plain_tensor(p) for p in trunk.parameters())
        and {parameter.dtype for parameter in trunk.parameters()} in _DTYPES
    )


def _is_own(part: nn.Module, trunk: nn.Module) -> bool:
    """Whether it is a part that transformers builds such a trunk from, as it was built."""
    own = type(part) in _COMMON_PARTS or type(part).__module__ == type(trunk).__module__
    return own and is_plain(part) and part._compiled_call_impl is None


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
    layer: nn.Module, hidden: Tensor, rotation: tuple[Tensor, Tensor],
    layout: AttentionLayout | HeadLayout, picked: Tensor | None,
) -> Tensor:  # fmt: skip
    """The layer's first half, [tokens, hidden]; with `picked`, of these tokens alone."""
    attention, norm = layer.self_attn, layer.input_layernorm
    linears = attention.q_proj, attention.k_proj, attention.v_proj
    projected = normed_linears(
        hidden, norm.weight, norm.variance_epsilon, tuple(linear.weight for linear in linears),
        tuple(linear.bias for linear in linears), products_of(attention.q_proj, hidden),
    )  # fmt: skip
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


def products_of(layer: nn.Module, inputs: Tensor) -> Products:
    """The products for inputs of this kind with the weight of `layer`."""
    return ONEDNN if isinstance(layer, OneDNNLinear) and layer.multiplies(inputs) else TORCH


def _mlp(layer: nn.Module, hidden: Tensor) -> Tensor:
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    return gated_mlp(
        hidden, norm.weight, norm.variance_epsilon, mlp.gate_proj.weight, mlp.up_proj.weight,
        mlp.down_proj.weight, products_of(mlp.gate_proj, hidden),
    )  # fmt: skip
