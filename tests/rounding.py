"""Bounds on round-off that hold on every machine.

Two ways of computing one number differ in their last bits: libraries cut sums as the processor, the
shapes and the number of threads suggest. So equal bits are asserted of equal computations only,
and anything else is measured against float64: it may be as far from it as the plain path is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

# The largest of some hundred errors: of equally good ways one has up to three bits more.
FACTOR = 8.0
# Where the plain path is exact by luck: of the largest number, after a dozen products in a row.
UNITS = 8.0

Tensors = torch.Tensor | Sequence[torch.Tensor]


def assert_as_near(
    found: Tensors,
    plain: Tensors,
    exact: Tensors,
    *,
    factor: float = FACTOR,
    computed: torch.dtype | None = None,
    neighbours: Sequence[Tensors] = (),
) -> None:
    """The largest error of `found` is at most `factor` times that of `plain`, both taken against
    `exact`, the same computation in float64. Several tensors are taken together. `computed`: in
    which dtype, where it is not that of the result. `neighbours`, where `plain` may be near by
    luck: `exact` with numbers that are off by one unit in the last place (`neighbour`), or further
    ways that are as good as the plain one."""
    found, plain, exact = _several(found), _several(plain), _several(exact)
    for one in exact:
        assert one.dtype == torch.float64, f"exact values are float64, not {one.dtype}"
    assert [one.shape for one in found] == [one.shape for one in exact]
    magnitude = max(float(one.abs().max()) for one in exact if one.numel())
    eps = torch.finfo(computed or plain[0].dtype).eps
    units = UNITS if eps < 1e-5 else 1.0  # sums of 16 bits are rounded once
    sensitivity = max((largest_error(one, exact) for one in neighbours), default=0.0)
    bound = factor * max(largest_error(plain, exact), sensitivity, units * eps * magnitude)
    error = largest_error(found, exact)
    assert error <= bound, f"{error:.3g} from float64, where {bound:.3g} is round-off"


def largest_error(found: Tensors, exact: Tensors) -> float:
    """The largest absolute difference of any two elements; not a number where one is not."""
    pairs = zip(_several(found), _several(exact), strict=True)
    errors = [(one.double() - other).abs().max() for one, other in pairs]
    return float(torch.stack(errors).max())


def neighbour(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy in float64 whose float32 weights are off by up to one unit in the last place.

    A stable computation gives the exact result of numbers that are off by some units (Higham,
    Accuracy and Stability of Numerical Algorithms, 1.5). What one unit moves is thus the size of
    round-off, whatever a single run's error happens to be."""
    generator = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(model).double()
    with torch.no_grad():
        for weight in moved.parameters():
            h = torch.rand(weight.shape, generator=generator, dtype=torch.float64) * 2 - 1
            weight.mul_(1 + torch.finfo(torch.float32).eps * h)
    return moved


def _several(tensors: Tensors) -> list[torch.Tensor]:
    several = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return [tensor.detach() for tensor in several]
