"""Which groups are learnt from, and why not."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.rollouts.filters import Filters, merit, rollout_group
from rllib_llm.rollouts.judged_batch import JudgedBatch, judged_groups
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems


def group(scores, lengths=None, valid=None, tokens=5):
    """A group of completions of the given lengths, all of the same token."""
    n = len(scores)
    lengths = torch.tensor(lengths or [3] * n)
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    held = {
        columns.GROUP: torch.full((n,), 7),
        columns.VALID: torch.tensor(valid or [True] * n),
        columns.SCORES: torch.tensor(scores),
        columns.COMPLETION_IDS: torch.full(mask.shape, tokens),
        columns.COMPLETION_MASK: mask,
        columns.FINISHED: torch.ones(n, dtype=torch.bool),
    }
    return JudgedBatch(held, rewards=torch.tensor(scores))


def reason(settings, batch):
    return Filters(settings).reason(batch)


def test_groups_without_spread_have_no_advantage():
    """Equation 11 of DAPO: some but not all completions are right."""
    assert reason(["reward_spread"], group([1.0, 1.0, 1.0])) == "no_spread"
    assert reason(["reward_spread"], group([1.0, 0.0, 1.0])) == ""
    assert reason([{"name": "reward_spread", "least": 0.5}], group([1.0, 0.6])) == "no_spread"
    # A row without a score says nothing.
    assert reason(["reward_spread"], group([1.0, 0.0], valid=[True, False])) == "no_spread"


def test_groups_are_chosen_by_the_spread_or_the_mean_of_their_scores():
    """One right of four: p = 1/4, deviation √(p(1-p)) = √3/4. Rows without a score say nothing."""
    scored = group([1.0, 0.0, 0.0, 0.0, 9.0], valid=[True] * 4 + [False])
    assert merit(scored, "best_spread") == pytest.approx(3**0.5 / 4)
    assert merit(scored, "best_score") == 0.25
    assert merit(scored, "first") == merit(group([1.0], valid=[False]), "best_score") == 0.0


def test_the_first_filter_that_refuses_says_why():
    settings = [{"name": "least_reward", "least": 2.0}, {"name": "length", "least": 2, "most": 4},
                "distinct"]  # fmt: skip
    assert reason(settings, group([1.0, 1.5])) == "low_reward"
    assert reason(settings, group([1.0, 2.5], lengths=[1, 1])) == "too_short"
    assert reason(settings, group([1.0, 2.5], lengths=[4, 5])) == "too_long"
    assert reason(settings, group([1.0, 2.5], lengths=[3, 3])) == "not_distinct"
    assert reason(settings, group([1.0, 2.5], lengths=[3, 4])) == ""


def test_a_rollout_of_two_rows_is_one():
    """The first rollout forked: 4 and 8 tokens; the second has one row of 12. So both have 12."""
    forked = group([1.0, 1.0, 0.0], lengths=[4, 8, 12])
    forked.columns[columns.ROW_ID] = torch.tensor([6, 6, 7])
    forked.columns[columns.ROW_WEIGHT] = torch.tensor([1 / 3, 2 / 3, 1.0])
    found = rollout_group(forked)
    assert found.scores.tolist() == [1.0, 0.0] and found.lengths.tolist() == [12, 12]
    assert found.completions == ((5,) * 12,) * 2
    assert reason([{"name": "length", "least": 12, "most": 12}], forked) == ""
    assert reason(["distinct"], forked) == "not_distinct"
    assert forked.num_rollouts == 2 and forked.distinct_share() == 1.0  # rows told path by path
    forked.columns[columns.WEIGHTS_VERSION] = torch.zeros(3, 12, dtype=torch.int32)
    assert judged_groups(forked, min_valid=2)[0].reason == ""
    forked.columns[columns.VALID][2] = False  # one rollout is left, of two rows
    assert judged_groups(forked, min_valid=2)[0].reason == "too_few"


def sees_everything(each):
    assert (each.position, each.lengths.tolist()) == (7, [2, 3])
    assert each.completions == ((5, 5), (5, 5, 5)) and each.finished.all()
    return each.scores.sum() > 10, "poor"


def no_reason(each):
    return False, ""


def says_true(each):
    return True


def test_a_function_of_ones_own_by_dotted_path():
    path = f"{__name__}.sees_everything"
    assert reason([path], group([1.0, 2.0], lengths=[2, 3])) == "poor"
    assert reason([path], group([1.0, 20.0], lengths=[2, 3])) == ""
    assert reason([f"{__name__}.no_reason"], group([1.0])) == "no_reason"
    with pytest.raises(Problems) as caught:
        reason([f"{__name__}.says_true"], group([1.0]))
    assert caught.value.problem.rule == "be (keep, reason)"


@pytest.mark.parametrize("setting", ["spread", 3, {"least": 2}, "no_such_package.filter"])
def test_what_is_no_filter_is_refused(setting):
    with pytest.raises(Problems, match=r"must be among \['distinct', 'least_reward'"):
        Filters([setting])


def test_tokens_that_are_masked_as_stale_count_for_the_length():
    """The policy wrote them; what a tool inserted it did not."""
    batch = group([1.0, 0.0], lengths=[4, 4])
    batch.columns[columns.LOSS_MASK] = torch.tensor([[False, False, True, True]] * 2)
    batch.columns[columns.WEIGHTS_VERSION] = torch.tensor([[0, 0, 1, 1]] * 2)
    assert reason([{"name": "length", "most": 3}], batch) == "too_long"
    batch.columns[columns.WEIGHTS_VERSION] = torch.tensor([[-1, -1, 1, 1]] * 2)
    assert reason([{"name": "length", "most": 3}], batch) == ""
