"""Advantages against hand-worked examples, closed forms and TRL 1.16.0."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rllib_llm.numerics.advantages import (
    gae,
    group_normalized,
    last_token_index,
    leave_one_out,
    masked_whiten,
    reinforce_returns,
    token_rewards,
    zero_variance_rows,
)

# Three groups of three: ordinary, all equal, with a negative score.
SCORES = torch.tensor([1.0, 2.0, 4.0, 0.5, 0.5, 0.5, -1.0, 3.0, 0.0])
GROUPS = torch.tensor([5, 5, 5, 2, 2, 2, 9, 9, 9])  # of prompts at these positions
SECOND_INVALID = torch.tensor([True, False] + [True] * 7)


def bools(*rows: str) -> torch.Tensor:
    return torch.tensor([[char == "1" for char in row] for row in rows])


# --- token rewards -------------------------------------------------------------------------------


def test_score_lands_on_the_last_token_and_kl_on_every_token():
    rewards = token_rewards(
        scores=torch.tensor([1.0, -2.0]),
        kl=torch.tensor([[0.5, 1.0, 9.0], [0.1, 9.0, 0.3]]),
        mask=bools("110", "101"),
        kl_coeff=0.1,
    )
    # Row 0: -0.05, then 1 - 0.1. Row 1: -0.01, a hole, then -2 - 0.03.
    expected = torch.tensor([[-0.05, 0.9, 0.0], [-0.01, 0.0, -2.03]])
    torch.testing.assert_close(rewards, expected)


def test_reward_of_a_row_is_the_rlhf_reward():
    # objective/rlhf_reward = score - kl_coeff * sum_t kl_t.
    torch.manual_seed(0)
    kl, mask, scores = torch.randn(4, 6), torch.rand(4, 6) < 0.6, torch.randn(4)
    mask[:, 0] = True
    rewards = token_rewards(scores, kl, mask, 0.02)
    torch.testing.assert_close(rewards.sum(dim=1), scores - 0.02 * (kl * mask).sum(dim=1))


def test_row_without_tokens_gets_no_reward():
    rewards = token_rewards(torch.tensor([5.0]), torch.ones(1, 3), bools("000"), 0.1)
    assert rewards.tolist() == [[0.0, 0.0, 0.0]]


def test_last_token_index_with_holes_and_without_tokens():
    assert last_token_index(bools("1100", "1010", "0001", "0000")).tolist() == [1, 2, 3, 0]


# --- GAE -----------------------------------------------------------------------------------------


def test_gae_hand_worked():
    # gamma = 0.9, lambda = 0.5, V = (1, 2, 3), r = (0, 0.5, 1), V beyond the end = 0:
    # delta_2 = 1 - 3 = -2;                 A_2 = -2
    # delta_1 = 0.5 + 0.9 * 3 - 2 = 1.2;    A_1 = 1.2 + 0.45 * (-2) = 0.3
    # delta_0 = 0 + 0.9 * 2 - 1 = 0.8;      A_0 = 0.8 + 0.45 * 0.3 = 0.935
    advantages, returns = gae(
        rewards=torch.tensor([[0.0, 0.5, 1.0]]),
        values=torch.tensor([[1.0, 2.0, 3.0]]),
        mask=bools("111"),
        gamma=0.9,
        lambda_=0.5,
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.935, 0.3, -2.0]]))
    torch.testing.assert_close(returns, torch.tensor([[1.935, 2.3, 1.0]]))


def test_gae_is_the_discounted_sum_of_td_errors():
    # Schulman et al. 2016, eq. 16, as a sum over l instead of a recursion.
    torch.manual_seed(0)
    rewards, values = torch.randn(3, 7), torch.randn(3, 7)
    gamma, lambda_ = 0.97, 0.9
    next_values = torch.cat([values[:, 1:], torch.zeros(3, 1)], dim=1)
    deltas = rewards + gamma * next_values - values
    expected = torch.stack(
        [sum((gamma * lambda_) ** (u - t) * deltas[:, u] for u in range(t, 7)) for t in range(7)],
        dim=1,
    )
    advantages, returns = gae(rewards, values, torch.ones(3, 7).bool(), gamma, lambda_)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values)


def test_gae_limits():
    # lambda = 1: returns are rewards-to-go whatever V; lambda = 0: one-step TD errors.
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, -4.0, 0.5]])
    mask = bools("111")
    _, returns = gae(rewards, values, mask, gamma=1.0, lambda_=1.0)
    torch.testing.assert_close(returns, torch.tensor([[6.0, 5.0, 3.0]]))
    advantages, _ = gae(rewards, values, mask, gamma=1.0, lambda_=0.0)
    torch.testing.assert_close(advantages, torch.tensor([[-13.0, 6.5, 2.5]]))


class Operators(TorchDispatchMode):
    """Counts the operators that torch is asked for."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("length", [1, 2, 10, 1024, 3001])
def test_gae_is_the_recursion_in_at_most_fifty_operators(length):
    torch.manual_seed(length)
    rewards, values = torch.randn(3, length), torch.randn(3, length)
    mask = torch.rand(3, length) < torch.tensor([[1.0], [0.7], [0.0]])
    with Operators() as operators:
        advantages, returns = gae(rewards, values, mask, gamma=0.99, lambda_=0.97)
    assert operators.number <= 50
    expected = torch.zeros(3, length, dtype=torch.float64)
    for row in range(3):
        advantage = value = 0.0
        for t in reversed(mask[row].nonzero().squeeze(1).tolist()):
            own = float(values[row, t])
            advantage = float(rewards[row, t]) + 0.99 * value - own + 0.99 * 0.97 * advantage
            expected[row, t], value = advantage, own
    # One rounding to float32, of numbers that may have cancelled: a share of the largest.
    atol = torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(advantages.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(returns, (expected + values).where(mask, 0.0).float())


def test_gae_carries_across_holes():
    # The same row without its masked-out tokens, whose rewards and values are rubbish.
    rubbish = math.nan
    rewards = torch.tensor([[rubbish, 0.0, rubbish, rubbish, 0.5, 1.0, rubbish]])
    values = torch.tensor([[rubbish, 1.0, rubbish, rubbish, 2.0, 3.0, rubbish]])
    advantages, returns = gae(rewards, values, bools("0100110"), gamma=0.9, lambda_=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.935, 0.0, 0.0, 0.3, -2.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.0, 1.935, 0.0, 0.0, 2.3, 1.0, 0.0]]))


def test_reinforce_returns_are_rewards_to_go():
    rewards = torch.tensor([[1.0, 5.0, 2.0, 4.0]])
    mask = bools("1011")
    torch.testing.assert_close(
        reinforce_returns(rewards, mask), torch.tensor([[7.0, 0.0, 6.0, 4.0]])
    )
    # gamma = 0.5: 4; 2 + 0.5 * 4 = 4; 1 + 0.5 * 4 = 3.
    torch.testing.assert_close(
        reinforce_returns(rewards, mask, gamma=0.5), torch.tensor([[3.0, 0.0, 4.0, 4.0]])
    )


# --- whitening -----------------------------------------------------------------------------------


def test_whitening_hand_worked():
    # (1, 2, 3): mean 2, population variance 2/3, 1/std = sqrt(1.5).
    x, mask = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), bools("1110")
    root = 1.5**0.5
    torch.testing.assert_close(masked_whiten(x, mask), torch.tensor([[-root, 0.0, root, 0.0]]))
    torch.testing.assert_close(
        masked_whiten(x, mask, shift_mean=False), torch.tensor([[2 - root, 2.0, 2 + root, 0.0]])
    )


def test_whitening_one_token_or_equal_tokens_gives_zero_not_nan():
    x = torch.tensor([[3.0, 3.0]])
    assert masked_whiten(x, bools("10")).tolist() == [[0.0, 0.0]]
    assert masked_whiten(x, bools("11")).tolist() == [[0.0, 0.0]]
    assert masked_whiten(x, bools("00")).tolist() == [[0.0, 0.0]]
    assert masked_whiten(x, bools("10"), shift_mean=False).tolist() == [[3.0, 0.0]]


def test_whitening_keeps_the_spread_beside_a_large_mean():
    # E[x^2] - E[x]^2 in float32 would lose it: 1e4^2 = 1e8 leaves no digits for a variance of 1.
    torch.manual_seed(0)
    noise = torch.randn(1, 4096, dtype=torch.float64)
    mask = torch.ones(1, 4096).bool()
    whitened = masked_whiten((noise + 1e4).float(), mask)
    torch.testing.assert_close(whitened, masked_whiten(noise.float(), mask), atol=2e-3, rtol=0)


# --- group baselines -----------------------------------------------------------------------------


def test_leave_one_out_hand_worked():
    # (1, 2, 4): 1 - (2 + 4)/2 = -2; 2 - (1 + 4)/2 = -0.5; 4 - (1 + 2)/2 = 2.5.
    advantages = leave_one_out(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3))
    torch.testing.assert_close(advantages, torch.tensor([-2.0, -0.5, 2.5]))


def test_leave_one_out_equals_trl():
    # RLOOTrainer of TRL 1.16.0 on SCORES, and with a NaN in the place of the invalid score.
    whole = [-2.0, -0.5, 2.5, 0.0, 0.0, 0.0, -2.5, 3.5, -1.0]
    without_second = [-3.0, 0.0, 3.0, 0.0, 0.0, 0.0, -2.5, 3.5, -1.0]
    torch.testing.assert_close(leave_one_out(SCORES, GROUPS), torch.tensor(whole))
    torch.testing.assert_close(
        leave_one_out(SCORES, GROUPS, SECOND_INVALID), torch.tensor(without_second)
    )


def test_group_normalized_equals_trl():
    # GRPOTrainer of TRL 1.16.0, scale_rewards "group" and "none", on SCORES.
    scaled = [-0.87281430, -0.21820354, 1.09101796, 0, 0, 0, -0.80060238, 1.12084329, -0.32024094]
    centred = [-1.33333325, -0.33333325, 1.66666675, 0, 0, 0, -1.66666675, 2.33333325, -0.66666669]
    without_second = [-0.70707351, 0, 0.70707351, *scaled[3:]]
    torch.testing.assert_close(group_normalized(SCORES, GROUPS), torch.tensor(scaled))
    torch.testing.assert_close(
        group_normalized(SCORES, GROUPS, scale_by_std=False), torch.tensor(centred)
    )
    torch.testing.assert_close(
        group_normalized(SCORES, GROUPS, valid=SECOND_INVALID), torch.tensor(without_second)
    )


def test_group_normalized_hand_worked():
    # (0, 2): mean 1, std with ddof = 1 is sqrt(2); 1 / (1.41421356 + 1e-4) = 0.70705678.
    advantages = group_normalized(torch.tensor([0.0, 2.0]), torch.zeros(2))
    torch.testing.assert_close(advantages, torch.tensor([-0.70705678, 0.70705678]))


def test_equal_scores_that_do_not_add_up_exactly_still_give_zero():
    # Seven times 0.1, over 7: the float32 mean is not exactly 0.1, and 1/eps would blow that up.
    scores = torch.full((7,), 0.1)
    assert group_normalized(scores, torch.zeros(7)).tolist() == [0.0] * 7
    assert leave_one_out(scores, torch.zeros(7)).tolist() == [0.0] * 7


def test_invalid_scores_may_be_nan_and_lonely_rows_teach_nothing():
    scores = torch.tensor([math.nan, 3.0, math.nan, math.nan])
    valid = torch.tensor([False, True, False, False])
    groups = torch.tensor([0, 0, 1, 1])
    for advantages in (
        leave_one_out(scores, groups, valid), group_normalized(scores, groups, valid=valid)
    ):  # fmt: skip
        assert advantages.tolist() == [0.0] * 4
    assert zero_variance_rows(scores, groups, valid)[0].tolist() == [True] * 4


def test_zero_variance_rows():
    assert zero_variance_rows(SCORES, GROUPS)[0].tolist() == [False] * 3 + [True] * 3 + [False] * 3
    only_equal_ones_valid = torch.tensor([True, True, False, False])
    scores = torch.tensor([1.0, 1.0, 2.0, 3.0])
    assert zero_variance_rows(scores, torch.zeros(4))[0].tolist() == [False] * 4
    rows, _ = zero_variance_rows(scores, torch.zeros(4), only_equal_ones_valid)
    assert rows.tolist() == [True] * 4


def flat_rows(scores, groups):
    return zero_variance_rows(scores, groups)[0]


def test_share_of_groups_without_variance():
    assert zero_variance_rows(SCORES, GROUPS)[1].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("function", [leave_one_out, group_normalized, flat_rows])
def test_groups_go_by_id_wherever_their_rows_lie(function):
    order = torch.tensor([4, 0, 8, 2, 6, 5, 1, 3, 7])
    found = function(SCORES[order], GROUPS[order])
    torch.testing.assert_close(found, function(SCORES, GROUPS)[order])


def test_a_group_may_have_lost_a_member():
    # The second group has one row left, the first two: 1 - 4 and 4 - 1; (-1.5, 1.5) / sqrt(4.5).
    scores = torch.tensor([1.0, 4.0, 0.5, -1.0, 3.0, 0.0])
    groups = torch.tensor([5, 5, 2, 9, 9, 9])
    torch.testing.assert_close(
        leave_one_out(scores, groups), torch.tensor([-3.0, 3.0, 0.0, -2.5, 3.5, -1.0])
    )
    first = 1.5 / (4.5**0.5 + 1e-4)
    torch.testing.assert_close(
        group_normalized(scores, groups)[:3], torch.tensor([-first, first, 0.0])
    )
    assert zero_variance_rows(scores, groups)[0].tolist() == [False, False, True] + [False] * 3


def test_advantages_do_not_depend_on_other_groups_or_shifts():
    advantages = group_normalized(SCORES, GROUPS)
    torch.testing.assert_close(group_normalized(SCORES[6:], GROUPS[6:]), advantages[6:])
    shifted = SCORES + 100
    torch.testing.assert_close(group_normalized(shifted, GROUPS), advantages, atol=1e-4, rtol=0)
    torch.testing.assert_close(leave_one_out(shifted, GROUPS), leave_one_out(SCORES, GROUPS))


@pytest.mark.parametrize("function", [leave_one_out, group_normalized, zero_variance_rows])
def test_groups_of_one_are_refused(function):
    with pytest.raises(ValueError, match="groups must have two rows alike"):
        function(SCORES[:3], torch.arange(3))
