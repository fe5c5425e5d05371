"""Rows of unequal length as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def pad_right(
    rows: Sequence[Sequence[Any]], filler: float, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor]:
    """The rows as [rows, longest] `dtype`, padded with `filler` on the right, and the mask [rows,
    longest] bool of real elements."""
    lengths, longest = _lengths(rows)
    return _filled(rows, filler, dtype, torch.arange(longest) < lengths)


def pad_left(
    rows: Sequence[Sequence[Any]], filler: float, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor]:
    """As `pad_right`, `filler` before the shorter ones."""
    lengths, longest = _lengths(rows)
    return _filled(rows, filler, dtype, torch.arange(longest) >= longest - lengths)


def widen(tensor: Tensor, length: int, filler: float = 0, *, left: bool = False) -> Tensor:
    """`tensor` [rows, L] as [rows, length], `filler` behind or before what there is."""
    missing = length - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (missing, 0) if left else (0, missing), value=filler)


def _lengths(rows: Sequence[Sequence[Any]]) -> tuple[Tensor, int]:
    lengths = [len(row) for row in rows]
    return torch.tensor(lengths, dtype=torch.int64).unsqueeze(1), max(lengths, default=0)


def _filled(
    rows: Sequence[Sequence[Any]], filler: float, dtype: torch.dtype, mask: Tensor
) -> tuple[Tensor, Tensor]:
    values = torch.full(mask.shape, filler, dtype=dtype)
    values[mask] = torch.tensor([value for row in rows for value in row], dtype=dtype)
    return values, mask
