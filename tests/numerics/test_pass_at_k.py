"""Counted formulas against all choices there are."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from statistics import mean

import pytest
import torch

from rllib_llm.numerics.pass_at_k import (
    bootstrap_interval,
    majority_at_k,
    majority_rates,
    pass_at_k,
    pass_hat_k,
    rates,
)

ANSWERS = [["a", "a", "b", "c"], ["a", "b", "b", "c", "c", "a", "d"], ["b", "c"], ["a"] * 3]


def majority(chosen):
    """Chance that "a" wins a vote, ties shared."""
    counts = Counter(chosen)
    best = [answer for answer in counts if counts[answer] == max(counts.values())]
    return ("a" in best) / len(best)


@pytest.mark.parametrize("answers", ANSWERS)
def test_each_is_the_mean_over_all_choices(answers):
    right = answers.count("a")
    for k in range(1, len(answers) + 1):
        choices = list(combinations(answers, k))
        n = len(answers)
        assert pass_at_k(right, n, k) == pytest.approx(mean("a" in c for c in choices))
        assert pass_hat_k(right, n, k) == pytest.approx(mean(set(c) == {"a"} for c in choices))
        assert majority_at_k(answers, "a", k) == pytest.approx(mean(map(majority, choices)))


def test_rates_leave_out_what_was_not_judged():
    """TRL #5126: NaN was counted as a failure."""
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    right = torch.tensor([True, False, False, True, True, False])
    valid = torch.tensor([True, True, False, True, True, False])
    found = rates(right, groups, valid, [1, 2, 3])
    # Two samples of each prompt count: 1 of 2 and 2 of 2 are right; k = 3 cannot be told.
    assert found["pass@1"][0] == pytest.approx((0.5 + 1) / 2)
    assert found["pass@2"][0] == 1.0 and found["pass^2"][0] == pytest.approx(0.5)
    assert set(found) == {"pass@1", "pass^1", "pass@2", "pass^2"}


def test_the_interval_covers_what_it_says():
    """The mean's interval over 400 prompts of half right is about 0.5 ± 1.96 * 0.5 / 20."""
    per_prompt = torch.arange(400).remainder(2).float()
    low, high = bootstrap_interval(per_prompt)
    assert low == pytest.approx(0.451, abs=0.01) and high == pytest.approx(0.549, abs=0.01)
    assert bootstrap_interval(per_prompt) == (low, high)


def test_votes_of_several_right_answers_and_of_what_was_not_judged():
    answers = ["1/2", "0.5", "2", "2", "0.5", "7"]
    right = torch.tensor([True, True, False, False, True, True])
    groups, valid = torch.zeros(6, dtype=torch.int64), torch.tensor([True] * 5 + [False])
    found = majority_rates(answers, right, groups, valid, [1, 5, 6])
    # One of five: three are right. All five: "0.5" and "2" have two votes each, "1/2" has one.
    assert found["maj@1"][0] == pytest.approx(3 / 5)
    assert found["maj@5"][0] == pytest.approx(1 / 2) and "maj@6" not in found
    low, high = found["maj@5"][1:]
    assert low == high == found["maj@5"][0]  # one prompt
