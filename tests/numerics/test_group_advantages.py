"""GDPO's normalised sum and turn-level returns, each beside its formula written out in float64."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.numerics.advantages import Turns, normalized_sum


def gdpo(parts, weights, group_size):
    """TRL 1.16's `multi_objective_aggregation="normalize_then_sum"`, groups adjacent, float64."""
    grouped = parts.double().T.view(-1, group_size, len(parts))
    mean = torch.nanmean(grouped, dim=1, keepdim=True)
    count = (~grouped.isnan()).sum(dim=1, keepdim=True)
    std = (torch.nansum((grouped - mean).square(), dim=1, keepdim=True) / (count - 1)).sqrt()
    each = ((grouped - mean) / (std + 1e-4)).view(-1, len(parts))
    total = (each * weights.double()).nansum(dim=1)
    return (total - total.mean()) / (total.std() + 1e-4)


def test_gdpo_is_trls_formula():
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(3, 12, generator=generator)
    parts[2, 4] = torch.nan  # not judged by the third
    weights = torch.tensor([1.0, 0.3, 2.0])
    found = normalized_sum(
        parts, weights.unsqueeze(1).expand(3, 12), torch.arange(12) // 4,
        valid=torch.ones(12, dtype=torch.bool),
    )  # fmt: skip
    torch.testing.assert_close(found.double(), gdpo(parts, weights, 4), rtol=1e-5, atol=1e-6)


def test_gdpo_tells_apart_what_the_sum_cannot():
    # Rewards (1, 0) and (0, 1) have the same sum as each other, and (1, 1) a larger one (section 3
    # of the paper): with one reward that varies little, (0, 0.01) still differs from (0, 0).
    parts = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.01, 0.0, 0.01]])
    ones = torch.ones_like(parts)
    found = normalized_sum(parts, ones, torch.zeros(4, dtype=torch.int64), valid=ones[0] > 0)
    assert found[3] > found[0] and found[1] > found[2]
    # Up to eps beside the small one's deviation, 1e-4 / 0.0058.
    assert float(found[1]) == pytest.approx(float(found[0]), abs=0.04)


def test_rows_that_are_not_valid_stay_out():
    parts = torch.tensor([[1.0, 5.0, 2.0, 4.0], [3.0, 1.0, 2.0, 9.0]])
    ones = torch.ones_like(parts)
    valid = torch.tensor([True, True, True, False])
    found = normalized_sum(parts, ones, torch.zeros(4, dtype=torch.int64), valid=valid)
    fewer = normalized_sum(parts[:, :3], ones[:, :3], torch.zeros(3, dtype=torch.int64),
                           valid=valid[:3])  # fmt: skip
    assert found[3] == 0
    torch.testing.assert_close(found[:3], fewer)


def test_turns_of_rows_and_of_a_rollout_in_two_rows():
    mask = torch.tensor([
        [1, 1, 0, 1, 0], [0, 1, 0, 0, 0], [1, 0, 1, 1, 0],
    ], dtype=torch.bool)  # fmt: skip
    turns = Turns.of(mask, torch.tensor([0, 0, 2]))  # rows 0 and 1 are one rollout
    assert turns.owners.tolist() == [0, 0, 0, 2, 2]
    assert turns.numbers.tolist() == [0, 1, 2, 0, 1]
    rewards = torch.tensor([[0, 1, 0, 2, 0], [0, 4, 0, 0, 0], [0.5, 0, 0, 8, 0]])
    # Rollout 0: 1, 2, 4; returns 1 + 2/2 + 4/4, 2 + 4/2, 4. Rollout 2: 0.5 + 8/2, 8.
    returns = turns.returns(rewards, gamma=0.5)
    assert returns.tolist() == pytest.approx([3, 4, 4, 4.5, 8])
    spread = turns.spread(returns)
    assert torch.equal(spread != 0, mask)
    assert spread[0].tolist() == pytest.approx([3, 3, 0, 4, 0])
