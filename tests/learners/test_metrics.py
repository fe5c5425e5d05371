"""Means weighted by counts."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.learners.metrics import WeightedMeans
from rllib_llm.shared.errors import Problems


def test_means_weigh_items_not_calls():
    means = WeightedMeans()
    means.add("x", 6.0, 3)
    means.add("x", torch.tensor(4.0), torch.tensor(1))
    assert means.pop() == {"x": 10.0 / 4}


def test_counts_and_totals_may_come_apart():
    means = WeightedMeans()
    means.add_count("x", 4)
    means.add_total("x", 1.0)
    means.add_total("x", 2.0)
    assert means.pop() == {"x": 0.75}


def test_two_learners_shares_add_up_to_the_global_mean():
    one, two = WeightedMeans(), WeightedMeans()
    one.add("x", 1.0 + 2.0, 5)
    two.add("x", 3.0 + 4.0 + 5.0, 5)
    assert one.pop()["x"] + two.pop()["x"] == 15.0 / 5


def test_pop_forgets_and_leaves_out_what_was_not_counted():
    means = WeightedMeans()
    means.add("never", 1.0, 0)
    means.add("once", 1.0, 1)
    assert means.pop() == {"once": 1.0}
    assert means.pop() == {}


def test_what_is_counted_and_never_added_up_is_no_zero():
    means = WeightedMeans()
    means.add_count("entropy", 3)  # of a loss that reports none
    means.add("loss", 6.0, 3)
    assert means.pop() == {"loss": 2.0}


def test_a_total_of_several_numbers_is_refused_by_its_name():
    """Complaint: one of an own loss failed at the end of the step, and nothing said which."""
    with pytest.raises(Problems) as raised:
        WeightedMeans().add_total("loss/mine", torch.ones(3))
    assert "'loss/mine'" in raised.value.problem.name and raised.value.problem.value == (3,)


def test_no_graph_is_kept():
    means = WeightedMeans()
    means.add("x", torch.ones((), requires_grad=True) * 2, 1)
    assert not means._totals["x"][0].requires_grad


def test_a_total_that_nobody_counts_is_a_mean_over_steps():
    means = WeightedMeans()
    for total in (1.0, 2.0, 6.0):  # of three micro-batches, in two steps
        means.add_total("loss/mine", total)
    means.add("grad_norm", 1.0, 1)
    means.add("grad_norm", 2.0, 1)
    assert means.pop(uncounted="grad_norm") == {"grad_norm": 1.5, "loss/mine": 4.5}
    means.add_total("loss/mine", 1.0)
    assert means.pop(uncounted="grad_norm") == {}  # no step was taken
