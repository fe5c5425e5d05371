"""A conversation that was forked into several rows weighs as the one that it is."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.numerics.advantages import token_rewards
from rllib_llm.numerics.losses import REDUCTIONS, LossDenominators, reduce_loss
from rllib_llm.numerics.scores import RolloutRows, with_turn_rewards

ROWS = RolloutRows.of(torch.tensor([7, 3, 3, 9]))


def test_which_rows_belong_together():
    assert ROWS.owners.tolist() == [0, 1, 1, 3]
    assert ROWS.is_first.tolist() == [True, True, False, True]
    assert ROWS.total(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [1, 5, 5, 4]
    assert ROWS.total_so_far(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [1, 2, 5, 4]
    assert ROWS.spread(torch.tensor([1.0, 2.0, 0.0, 4.0])).tolist() == [1, 2, 2, 4]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_rollout_in_two_rows_has_the_loss_of_one_row(reduction):
    whole = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 0.0, 0.0]])
    counts = torch.tensor([[True] * 4, [True, True, False, False]])
    denominators = LossDenominators.count(counts, 8)
    expected = reduce_loss(whole, counts, reduction, denominators)
    # The first rollout's tokens lie in a row of three and one of one.
    parts = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [5.0, 6.0, 0.0]])
    mask = torch.tensor([[True] * 3, [True, False, False], [True, True, False]])
    weights = torch.tensor([0.75, 0.25, 1.0])
    denominators = LossDenominators.count(mask, 8, weights)
    assert torch.allclose(reduce_loss(parts, mask, reduction, denominators, weights), expected)


def test_turn_rewards_stand_where_they_were_earned():
    mask = torch.tensor([[True, True, False, True], [True, True, False, False]])
    earned = torch.zeros(2, 4)
    earned[0, 1], earned[1, 0] = 0.25, 0.5
    scores = torch.tensor([1.0, 1.0])
    end = token_rewards(scores, torch.zeros(2, 4), mask, 0.0)
    alone = with_turn_rewards(end, earned, mask, RolloutRows.of(torch.tensor([0, 1])))
    # 1 - 0.25 and 1 - 0.5 are left for the ends.
    assert alone.tolist() == [[0, 0.25, 0, 0.75], [0.5, 0.5, 0, 0]]
    # Of one rollout: the second row's end has what the first row's turn did not earn either.
    together = with_turn_rewards(end, earned, mask, RolloutRows.of(torch.tensor([4, 4])))
    assert together.tolist() == [[0, 0.25, 0, 0.75], [0.5, 0.25, 0, 0]]


@pytest.mark.parametrize("rows_each", [1, 2])
def test_turn_rewards_do_not_depend_on_the_rest_of_the_batch(rows_each):
    """All that is earned is earned at a turn of the first row: nothing is left for the ends."""
    num_rows = 4096
    rows = RolloutRows.of(torch.arange(num_rows // rows_each).repeat_interleave(rows_each))
    mask = torch.ones(num_rows, 3, dtype=torch.bool)
    earned = torch.zeros(num_rows, 3)
    earned[::rows_each, 0] = 1000.1
    end = token_rewards(torch.full((num_rows,), 1000.1), torch.zeros(num_rows, 3), mask, 0.0)
    earned[2, 0] = torch.nan  # a reward that was none is of its own rollout alone
    found = with_turn_rewards(end, earned, mask, rows)
    assert torch.equal(found[4:], earned[4:])
    alone = RolloutRows.alone(num_rows, torch.device("cpu"))
    if rows_each == 1:
        assert torch.equal(with_turn_rewards(end, earned, mask, alone)[4:], earned[4:])
