"""Parts of a Llama layer with gradients written by hand: fewer passes over memory, less kept.

Autograd keeps every intermediate of a norm, an activation and a product, and reads and writes each
of them; on a CPU that is a third of a small model's training. Here the norms and the activation
are computed again in the backward pass, in place where nobody else looks. Results and gradients
are those of transformers' modules up to round-off.

All take tokens [tokens, features], float32 or bfloat16. In bfloat16 norms and their gradients
are computed in float32 and rounded once; what goes between layers is bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rllib_llm.modules.products import TORCH, Products


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
    inputs: Tensor,
    norm_weight: Tensor,
    eps: float,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    products: Products = TORCH,
) -> tuple[Tensor, ...]:
    """Several linear layers, weights [out_i, in], of the RMS norm of the same inputs [tokens, in];
    returns [tokens, out_i] each."""
    count = len(weights)
    return _NormedLinears.apply(inputs, norm_weight, eps, products, count, *weights, *biases)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) of queries or keys [tokens, heads, head_dim]; cos and sin
    [tokens, 1, head_dim], their two halves the same, as transformers has them."""
    return _Rotation.apply(heads, cos, sin)


def gated_mlp(
    inputs: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    products: Products = TORCH,
) -> Tensor:
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
        ctx: Any,
        inputs: Tensor,
        norm_weight: Tensor,
        eps: float,
        products: Products,
        count: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
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
            normed_grad = products.add_mm(normed_grad, grad, weight)
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
        ctx: Any,
        inputs: Tensor,
        norm_weight: Tensor,
        eps: float,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        products: Products,
    ) -> Tensor:
        scale = _norm_scale(inputs, eps)
        normed = _normed(inputs, scale, norm_weight)
        gates, ups = products.linear(normed, gate), products.linear(normed, up)
        del normed
        ctx.save_for_backward(inputs, scale, norm_weight, gates, ups, gate, up, down)
        ctx.products = products
        return products.add_linear(inputs, F.silu(gates).mul_(ups), down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, scale, norm_weight, gates, ups, gate, up, down = ctx.saved_tensors
        _, _, _, gate_needed, up_needed, down_needed, _ = ctx.needs_input_grad
        mm, add_mm = ctx.products.mm, ctx.products.add_mm
        product, gates_grad, ups_grad = _product_gradients(mm(grad, down), gates, ups)
        down_grad = mm(grad.t(), product) if down_needed else None
        del product
        normed = _normed(inputs, scale, norm_weight)
        gate_grad = mm(gates_grad.t(), normed) if gate_needed else None
        up_grad = mm(ups_grad.t(), normed) if up_needed else None
        normed_grad = add_mm(mm(gates_grad, gate, out=normed), ups_grad, up)
        input_grad, norm_grad = _norm_gradients(normed_grad, inputs, scale, norm_weight, grad)
        return input_grad, norm_grad, None, gate_grad, up_grad, down_grad, None


def _product_gradients(
    product_grad: Tensor, gates: Tensor, ups: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gates) * ups, and the gradients of gates, over `product_grad`, and of ups."""
    product, ups_grad = torch.empty_like(gates), torch.empty_like(ups)
    for rows in _blocks(gates):
        gate, up, grad = gates[rows], ups[rows], product_grad[rows]
        activated = F.silu(gate)
        torch.mul(activated, up, out=product[rows])
        torch.mul(activated, grad, out=ups_grad[rows])
        torch.ops.aten.silu_backward(grad.mul_(up), gate, grad_input=grad)
    return product, product_grad, ups_grad


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
    dtype, exact = inputs.dtype, _exact(inputs)
    if dtype == exact:
        return _exact_norm_gradients(grad, inputs, scale, weight, residual_grad)
    features = inputs.shape[-1]
    input_grad = torch.empty_like(inputs)
    weight, weight_grad = weight.to(exact), scale.new_zeros(features)
    for rows in _blocks(inputs):
        residual = None if residual_grad is None else residual_grad[rows].to(exact)
        input_grad[rows], part = _exact_norm_gradients(
            grad[rows].to(exact), inputs[rows].to(exact), scale[rows], weight, residual
        )
        weight_grad += part
    return input_grad, weight_grad.to(dtype)


def _exact_norm_gradients(
    grad: Tensor, inputs: Tensor, scale: Tensor, weight: Tensor, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    features = inputs.shape[-1]
    products = grad * inputs
    weight_grad = scale.flatten() @ products.reshape(-1, features)
    along = (products.reshape(-1, features) @ weight).view(scale.shape)
    along = along.mul_(scale.pow(3)).div_(-features)
    input_grad = torch.mul(grad, weight, out=products).mul_(scale)
    input_grad.addcmul_(inputs, along)
    if residual_grad is not None:
        input_grad.add_(residual_grad)
    return input_grad, weight_grad


def _blocks(tensor: Tensor) -> Iterator[slice]:
    """Blocks of rows of `tensor` [tokens, ...] that fit a cache, each with its outputs."""
    rows_per_block = max(1, 2**17 // tensor[0].numel())
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
