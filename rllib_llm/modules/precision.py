"""Precision of products: float32 by one of two libraries, or a bfloat16 copy of the weights.

float32 on a CPU is multiplied by MKL, which is torch's default, or by oneDNN. With one thread, 512
tokens and 576 x 1536: an AMD of family 26 (Zen 5) whose core is all ours 107 and 242 GFLOP/s, one
of family 25 (Zen 4) 86 and 101, of at most 118 (32 operations a cycle, half of Zen 5's). Decoding
(`engines/llama_step.py`) lays weights out for either: all products of a step of SmolLM2-135M on
Zen 4 take 71 and 38 ms with 8 rows, 135 and 93 with 32. On Intel's processors they are alike.
Errors are those of float32 sums with either; bits differ, so that one library computes a run
wherever it is resumed.

In mixed precision float32 weights are trained, and a bfloat16 copy of them computes:

    weights (float32, the optimiser's) ── cast once per step ──▶ copy (bfloat16)
        .grad (float32) ◀── added up after every backward pass ── its gradient (bfloat16)

As Micikevicius et al. 2018, "Mixed Precision Training", section 3.1, without the scaled losses that
float16 needs. Norms and softmax inside the layers are computed in float32, as transformers' are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rllib_llm.shared.errors import SettingWarning, require, warning
from rllib_llm.shared.process import cpu_info, multiplies_bfloat16

LIBRARIES = ("mkl", "onednn")


def faster_library(cpuinfo: str | Path = "/proc/cpuinfo") -> str:
    """The member of `LIBRARIES` that is faster on this kind of processor: oneDNN on AMD's from Zen
    4 on. Decided by the kind, not by timing, so that a later run computes the same, whatever the
    machine's load."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    found = cpu_info(cpuinfo)
    is_zen = found.get("vendor_id") == "AuthenticAMD" and int(found.get("cpu family", 0)) >= 25
    # Zen 3 is of family 25 too, and has no AVX512.
    has_avx512 = "avx512f" in found.get("flags", "").split()
    return "onednn" if both and is_zen and has_avx512 else "mkl"


class Products(NamedTuple):
    """Matrix products without their own autograd."""

    mm: Callable[..., Tensor]
    """(a, b, out) -> a b; perhaps in the memory of `out`, which must be free."""
    linear: Callable[..., Tensor]
    """(inputs, weight, bias) -> inputs weight^T + bias, [..., out]."""
    addmm_: Callable[..., Tensor]
    """(total, a, b) -> total + a b; perhaps in the memory of `total`, which must be free."""
    addmm: Callable[..., Tensor]
    """(total, a, b) -> total + a b in new memory."""


def onednn_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs weight^T + bias, [..., out], by oneDNN, through the operators that torch's own
    compiler uses. It reads transposed matrices where they lie."""
    if not (inputs.numel() and weight.numel()):
        return F.linear(inputs, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(inputs, _dense(weight), bias, "none", [], "")


def onednn_add_linear(
    total: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """total + inputs weight^T + bias in new memory, as `onednn_linear`."""
    if not (inputs.numel() and weight.numel()):
        return total + F.linear(inputs, weight, bias)
    operator = torch.ops.mkldnn._linear_pointwise.binary
    return operator(inputs, total, _dense(weight), bias, "add")


def _dense(matrix: Tensor) -> Tensor:
    """The matrix, copied if its elements share memory (an expanded gradient)."""
    return matrix if 0 not in matrix.stride() else matrix.contiguous()


def _onednn_mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    return onednn_linear(a, b.t())


def _onednn_addmm(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return onednn_add_linear(total, a, b.t())


TORCH = Products(torch.mm, F.linear, Tensor.addmm_, torch.addmm)
"""By whatever torch takes for the tensors' dtype and device."""
ONEDNN = Products(_onednn_mm, onednn_linear, _onednn_addmm, _onednn_addmm)


class OneDNNLinear(nn.Linear):
    """A linear layer, its float32 products on a processor by oneDNN, those of its gradients too."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.multiplies(inputs):
            return super().forward(inputs)
        return _Linear.apply(inputs, self.weight, self.bias)

    def multiplies(self, inputs: Tensor) -> bool:
        """Whether oneDNN multiplies inputs of this kind."""
        kinds = {(tensor.dtype, tensor.device.type) for tensor in (inputs, self.weight)}
        return kinds == {(torch.float32, "cpu")}


class Float32Linear(nn.Linear):
    """A linear layer that computes in its weights' float32, whatever it is given."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.to(self.weight.dtype))


def use_float32_head(model: Any) -> None:
    """Makes the head of a causal language model compute in float32.

    Raises:
        Problems: its weights are the embedding's, which computes in 16 bits, or it is no plain
            linear layer.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_own = type(head) is nn.Linear and head.weight is not embedding.weight
    require(is_own, "lm_head_float32", True, "be False for this model",
            "its head is not a linear layer of its own, but shares the embedding's weights",
            "Leave it out")  # fmt: skip
    head.__class__ = Float32Linear


def leave_out_cudnn_attention() -> None:
    """Makes torch's attention, in this process, choose among its own kernels.

    On Hopper torch prefers cuDNN's, which compiles code for every new shape, 40 ms each time (H100,
    torch 2.11). The shapes of text are new in nearly every batch and in every decoded step. torch's
    flash and memory-efficient kernels take any shape.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def use_onednn(model: nn.Module) -> None:
    """Makes the plain linear layers of `model` use oneDNN; quantised weights keep their own
    products."""
    for part in model.modules():
        if type(part) is nn.Linear and type(part.weight) is nn.Parameter:
            part.__class__ = OneDNNLinear


def multiplies_by_onednn(model: nn.Module) -> bool:
    """Whether `use_onednn` was called on it."""
    return any(isinstance(part, OneDNNLinear) for part in model.modules())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return onednn_linear(inputs, weight, bias)

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


def computing_dtype(mixed_precision: str | None) -> torch.dtype | None:
    """The dtype of the copy that computes; None: the weights compute themselves."""
    assert mixed_precision in (None, "bf16"), "an algorithm decides what 'auto' is"
    return None if mixed_precision is None else torch.bfloat16


def cuda_multiplies_bfloat16() -> bool:
    """Whether there is a CUDA device here, and it has products of bfloat16."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def warn_of_emulation(
    dtype: torch.dtype | None, device: torch.device | str,
    multiplies: Callable[[], bool] = multiplies_bfloat16,
) -> None:  # fmt: skip
    """Warns if the processor emulates products of `dtype`; see `multiplies`."""
    if dtype is None or torch.device(device).type != "cpu" or multiplies():
        return
    effect = "is several times slower than float32 here: this processor emulates bfloat16"
    problem = warning("mixed_precision", "", effect, "Leave it out in a new run", "bf16")
    warnings.warn(SettingWarning(problem), stacklevel=2)


def cast_parameters_(
    model: nn.Module, dtype: torch.dtype, keep: Collection[nn.Module] = ()
) -> None:
    """Casts the float32 parameters of `model`, in place; quantised ones, buffers (the frequencies
    of rotary embeddings) and the parts in `keep` stay as they are."""
    kept = {id(parameter) for part in keep for parameter in part.parameters()}
    for parameter in model.parameters():
        if parameter.dtype == torch.float32 and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)


class ComputingCopy:
    """`model` with the weights of another one, `weights`, in another dtype.

    The gradient of each of its parameters is added to that of the weight it was cast from. Frozen
    weights need not be exact to be trained: they are cast themselves, and shared. `keep`: parts of
    `weights` that compute as they are, and are shared with the copy.
    """

    def __init__(
        self, weights: nn.Module, dtype: torch.dtype, keep: Collection[nn.Module] = ()
    ) -> None:
        kept = {id(parameter) for part in keep for parameter in part.parameters()}
        memo: dict[int, object] = {id(part): part for part in keep}
        self._copies: dict[int, nn.Parameter] = {}
        self._trained: list[nn.Parameter] = []
        for parameter in weights.parameters():
            memo[id(parameter)] = parameter
            if parameter.dtype != torch.float32 or id(parameter) in kept:
                continue
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
                continue
            made = nn.Parameter(parameter.detach().to(dtype))
            made.register_post_accumulate_grad_hook(_adds_to(parameter))
            setattr(made, _WEIGHT, parameter)
            memo[id(parameter)] = self._copies[id(parameter)] = made
            self._trained.append(parameter)
        self.model: nn.Module = copy.deepcopy(weights, memo)

    def copy_of(self, weight: torch.Tensor) -> torch.Tensor:
        """The computing copy of a weight; the weight itself if it is shared."""
        return self._copies.get(id(weight), weight)

    @torch.no_grad()
    def cast(self) -> None:
        """Copies the current weights."""
        torch._foreach_copy_([self._copies[id(weight)] for weight in self._trained], self._trained)


_WEIGHT = "rllib_llm_weight"  # a computing copy's attribute


def trained_weight(leaf: torch.Tensor) -> torch.Tensor:
    """The weight to which the gradient of `leaf` is added: that of which it is a computing copy,
    else `leaf`."""
    return getattr(leaf, _WEIGHT, leaf)


def _adds_to(weight: nn.Parameter) -> Callable[[torch.Tensor], None]:
    def add(made: torch.Tensor) -> None:
        assert made.grad is not None
        if weight.grad is None:  # as the weight lies, whichever way the gradient was computed
            weight.grad = torch.empty_like(weight).copy_(made.grad)
        else:
            weight.grad.add_(made.grad)
        made.grad = None

    return add


def keep_unpacked(model: nn.Module) -> None:
    """Keeps bitsandbytes from repacking 4-bit weights into a form that not all of its code can
    read.

    On a CPU with AVX512-BF16 its layers (0.50) repack their weights in place at the first forward
    pass in eval mode. The packed form has no gradient, cannot be dequantised or saved exactly, and
    its product is slower for the many rows that judges and references read at once. Milliseconds
    of a 2048 x 2048 layer for 1, 16 and 512 rows of float32 on one core of a processor with AMX:

        float32 0.85, 3.1, 39      nf4 4.6, 6.4, 43      nf4 packed 0.53, 3.1, 90
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
