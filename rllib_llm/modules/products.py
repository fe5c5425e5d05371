"""float32 matrix products on a CPU by one of two libraries in torch: MKL, which is torch's default,
or oneDNN.

MKL does 40 % of what an AMD processor with AVX-512 can, oneDNN twice as much: 107 and 242 GFLOP/s
(512 tokens, 576 x 1536, one thread of an EPYC 9005 with nothing else on its core; while the core's
other thread is busy they are nearly alike). On Intel's processors they are alike. Errors are those
of float32 sums with either; bits differ, so that one library computes a run wherever it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rllib_llm.shared.process import processor_features

LIBRARIES = ("mkl", "onednn")


def faster_library(
    features: Callable[[], frozenset[str]] = processor_features,
    cpuinfo: str | Path = "/proc/cpuinfo",
) -> str:
    """The member of `LIBRARIES` that is faster on this kind of processor. Decided by the kind, not
    by timing, so that a later run computes the same, whatever the machine's load."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    try:
        is_amd = "AuthenticAMD" in Path(cpuinfo).read_text(encoding="utf-8")
    except OSError:
        is_amd = False
    return "onednn" if both and is_amd and "avx512f" in features() else "mkl"


class Products(Protocol):
    """Matrix products without autograd of their own."""

    def mm(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """a b; perhaps in the memory of `out`, which nobody else may need."""

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """inputs weight^T + bias, [..., out]."""

    def add_mm(self, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """total + a b; perhaps in the memory of `total`, which nobody else may need."""

    def add_linear(self, total: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """total + inputs weight^T in new memory."""


class _Torch:
    """By whatever torch takes for the tensors' dtype and device."""

    def mm(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(a, b, out=out)

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(inputs, weight, bias)

    def add_mm(self, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return total.addmm_(a, b)

    def add_linear(self, total: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return torch.addmm(total, inputs, weight.t())


class _OneDNN:
    """By oneDNN, through the operators that torch's own compiler uses. It reads transposed matrices
    where they lie."""

    def mm(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        return self.linear(a, b.t())

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not (inputs.numel() and weight.numel()):
            return F.linear(inputs, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(inputs, _dense(weight), bias, "none", [], "")

    def add_mm(self, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.add_linear(total, a, b.t())

    def add_linear(
        self, total: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if not (inputs.numel() and weight.numel()):
            return total + F.linear(inputs, weight, bias)
        operator = torch.ops.mkldnn._linear_pointwise.binary
        return operator(inputs, total, _dense(weight), bias, "add")


def _dense(matrix: Tensor) -> Tensor:
    """The matrix, copied if its elements share memory (an expanded gradient)."""
    return matrix if 0 not in matrix.stride() else matrix.contiguous()


TORCH, ONEDNN = _Torch(), _OneDNN()


class OneDNNLinear(nn.Linear):
    """A linear layer, its float32 products on a processor by oneDNN, those of its gradients too."""

    def forward(self, inputs: Tensor) -> Tensor:
        if products_of(self, inputs) is TORCH:
            return super().forward(inputs)
        return _Linear.apply(inputs, self.weight, self.bias)


def use_onednn(model: nn.Module) -> None:
    """Makes the plain linear layers of `model` use oneDNN."""
    for part in model.modules():
        if type(part) is nn.Linear:
            part.__class__ = OneDNNLinear


def multiplies_by_onednn(model: nn.Module) -> bool:
    """Whether `use_onednn` was called on it."""
    return any(isinstance(part, OneDNNLinear) for part in model.modules())


def products_of(layer: nn.Module, inputs: Tensor) -> Products:
    """The products for inputs of this kind with the weight of `layer`."""
    weight = layer.weight
    is_for = isinstance(layer, OneDNNLinear) and {inputs.dtype, weight.dtype} == {torch.float32}
    return ONEDNN if is_for and weight.device.type == inputs.device.type == "cpu" else TORCH


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return ONEDNN.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        for_inputs, for_weight, for_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            ONEDNN.mm(rows, weight).view(inputs.shape) if for_inputs else None,
            ONEDNN.mm(rows.t(), inputs.flatten(0, -2)) if for_weight else None,
            rows.sum(dim=0) if for_bias else None,
        )
