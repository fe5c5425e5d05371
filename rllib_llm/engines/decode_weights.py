"""Weights laid out for decoding: skinny matrix products read them faster transposed, or packed.

A product of few rows with a weight stored [out, in] runs at half the speed of one stored [in, out]
(MKL in float32, 1 thread, 256 to 3072 wide: 1.2 x at 64 rows, 1.5 x at 16, 2 x at 8, 1 x at 256).
In bfloat16 oneDNN lays the weight out anew for every product; done once it takes 0.81 of the time
(64 rows, 256 x 1024), 0.79 (16 rows, 768 x 2048), 0.61 (64 rows, 768 x 3072), and 1.0 of a head's
768 x 49152.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rllib_llm.processor import multiplies_bfloat16

# Distance between rows beyond a power of two, so that they do not fall into the same cache sets.
_ROW_PADDING = 16
_COPY_BLOCK = 64
# Fewer steps than this save less than the copy of the weights costs.
_MIN_STEPS = 24
# Numbers of a weight beyond which reading it takes the time, however it lies.
_MOST_PACKED = 2**24


def pays(weight: torch.Tensor, steps: int) -> bool:
    """Whether a transposed copy of the weight is faster over so many steps, its making included."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and steps >= _MIN_STEPS


def pays_packed(weight: torch.Tensor, steps: int) -> bool:
    """Whether a copy of the weight in oneDNN's layout is faster over so many steps."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and steps >= _MIN_STEPS
        and weight.numel() <= _MOST_PACKED
        and torch.backends.mkldnn.is_available()
        and multiplies_bfloat16()
    )


def packed(weight: torch.Tensor) -> torch.Tensor:
    """The bfloat16 weight [out, in] in oneDNN's layout, for `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


def packed_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
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


@contextmanager
def decode_layout(model: nn.Module, steps: int) -> Iterator[None]:
    """Holds the model's plain linear weights in transposed copies while the context is open.

    Shapes and values are unchanged, and the model's own parameters come back on leaving, also after
    an error. Quantised layers and weights for which it does not pay are left alone. Memory: one
    more copy of these weights.

    Args:
        model: any module.
        steps: tokens to be decoded.
    """
    originals = []
    try:
        for module in model.modules():
            if type(module) not in (nn.Linear, Conv1D) or not pays(module.weight, steps):
                continue
            originals.append((module, module.weight))
            module.weight = nn.Parameter(_relaid(module), requires_grad=False)
        yield
    finally:
        for module, weight in originals:
            module.weight = weight


def _relaid(module: nn.Module) -> torch.Tensor:
    if isinstance(module, Conv1D):  # [in, out] already, but perhaps a power of two wide
        return transposed([module.weight.t()])
    return transposed([module.weight]).t()
