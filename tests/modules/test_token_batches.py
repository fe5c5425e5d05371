from __future__ import annotations

import pytest
import torch

from rllib_llm.modules.packing import pack_right, token_batches


def test_batches_hold_all_rows_once_within_the_budget():
    lengths = torch.tensor([3, 9, 1, 5, 5, 2])
    batches = [rows.tolist() for rows in token_batches(lengths, 10)]
    # Longest first: 9 alone (2 * 9 > 10), 5 + 5 (2 * 5 = 10), then 3, 2, 1 (3 * 3 = 9).
    assert batches == [[1], [3, 4], [0, 5, 2]]


def test_a_row_longer_than_the_budget_comes_alone():
    assert [rows.tolist() for rows in token_batches(torch.tensor([7, 8]), 4)] == [[1], [0]]


def test_no_budget_is_an_error():
    with pytest.raises(ValueError, match="batch_tokens=0 must be at least 1"):
        token_batches(torch.tensor([1]), 0)


def test_prompt_and_completion_become_one_text():
    ids, mask = pack_right(
        torch.tensor([[9, 9, 1, 2], [3, 4, 5, 6]]),
        torch.tensor([[False, False, True, True], [True] * 4]),
        torch.tensor([[7, 8, 9], [7, 9, 9]]),
        torch.tensor([[True, True, False], [True, False, False]]),
    )
    assert ids.tolist() == [[1, 2, 7, 8, 0], [3, 4, 5, 6, 7]]
    assert mask.tolist() == [[True] * 4 + [False], [True] * 5]


def test_tokens_between_those_sampled_belong_to_the_text():
    ids, _ = pack_right(
        torch.tensor([[1]]),
        torch.tensor([[True]]),
        torch.tensor([[7, 8, 9, 9]]),
        torch.tensor([[True, False, True, False]]),
    )
    assert ids.tolist() == [[1, 7, 8, 9]]
