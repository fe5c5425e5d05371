"""pass@k among the held-out results, of any component that is 0 or 1."""

from __future__ import annotations

import pytest
import torch

from rllib_llm import columns
from rllib_llm.algorithms.evaluation import pass_metrics
from rllib_llm.rollouts.request import JudgedBatch


def batch():
    scores = torch.tensor([0.5, 1.5, 0.0, 0.0])
    return JudgedBatch(
        columns={
            columns.SCORES: scores,
            columns.VALID: torch.tensor([True, True, True, False]),
            columns.GROUP: torch.tensor([3, 3, 4, 4]),
        },
        rewards=scores,
        components={"correct": torch.tensor([0.0, 1.0, 0.0, 0.0])},
    )


def test_of_a_component():
    found = pass_metrics(batch(), [1, 2], "correct")
    # One of two passes for the first prompt, none of one for the second, whose other one is no
    # sample; two there are of the first alone.
    assert found["pass@1"] == pytest.approx(0.25) and found["pass@2"] == 1.0
    assert found["pass^2"] == 0.0
    assert found["pass@1_low"] <= found["pass@1"] <= found["pass@1_high"]


@pytest.mark.parametrize(("on", "found"), [(None, "other numbers than 0 and 1"), ("x", "is none")])
def test_what_is_no_pass_is_refused(on, found):
    with pytest.raises(ValueError, match=rf"pass_on={on!r} must name a component.*{found}"):
        pass_metrics(batch(), [1], on)
