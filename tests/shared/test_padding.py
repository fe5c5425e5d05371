"""Rows of unequal length as tensors, by hand."""

from __future__ import annotations

import torch

from rllib_llm.shared.columns import pad_left, pad_right, widen


def test_rows_are_padded_on_either_side():
    right, mask = pad_right([[1, 2], [3], []], 9)
    assert right.tolist() == [[1, 2], [3, 9], [9, 9]] and right.dtype == torch.int64
    assert mask.tolist() == [[True, True], [True, False], [False, False]]
    left, mask = pad_left([(1, 2), (3,), ()], 9)
    assert left.tolist() == [[1, 2], [9, 3], [9, 9]]
    assert mask.tolist() == [[True, True], [False, True], [False, False]]
    values, _ = pad_right([[0.5], [1.5, 2.5]], 0.0, torch.float32)
    assert values.tolist() == [[0.5, 0.0], [1.5, 2.5]] and values.dtype == torch.float32


def test_no_rows_and_empty_rows_have_no_columns():
    assert pad_right([], 0)[0].shape == (0, 0) and pad_left([[], []], 0)[1].shape == (2, 0)


def test_a_tensor_is_widened_on_either_side():
    rows = torch.tensor([[1, 2]])
    assert widen(rows, 4, 7).tolist() == [[1, 2, 7, 7]]
    assert widen(rows, 3, left=True).tolist() == [[0, 1, 2]]
    assert widen(rows.bool(), 3).tolist() == [[True, True, False]]
