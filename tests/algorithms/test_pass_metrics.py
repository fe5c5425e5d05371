"""pass@k among the held-out results, of any component that is 0 or 1."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.algorithms.evaluation import answers_of, pass_metrics
from rllib_llm.rollouts.judged_batch import JudgedBatch
from rllib_llm.shared import columns


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


def test_a_prompt_that_comes_again_is_the_same_prompt():
    """Four prompts, 16 times each, of which the first two always pass. The interval is over four
    prompts: with a chance of (2/4)^4 = 6 % none or all of those that are drawn pass."""
    prompts = torch.arange(4).repeat(16)
    right = (prompts < 2).float()
    columns_of = {columns.SCORES: right, columns.VALID: torch.ones(64, dtype=torch.bool),
                  columns.GROUP: torch.arange(64), columns.PROMPT_INDEX: prompts}  # fmt: skip
    found = pass_metrics(JudgedBatch(columns_of, rewards=right), [1, 16], None)
    for k in (1, 16):
        assert [found[f"pass@{k}{end}"] for end in ("", "_low", "_high")] == [0.5, 0.0, 1.0]


@pytest.mark.parametrize(("on", "found"), [(None, "it has other"), ("x", "there is none")])
def test_what_is_no_pass_is_refused(on, found):
    with pytest.raises(ValueError, match=rf"pass_on={on!r} must be a component .*{found}"):
        pass_metrics(batch(), [1], on)


def test_a_vote_is_over_what_the_pattern_finds():
    one = batch()
    one.columns[columns.VALID][:] = True
    one.columns[columns.GROUP][:] = 3
    one.components["correct"] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    one.texts = {"completion": ["is <a>5</a>", "so <a>4</a>, <a> 5 </a>", "<a>6</a>", "none"]}
    pattern = "<a>(.*?)</a>"
    assert answers_of(one, pattern) == ["5", "5", "6", None]
    found = pass_metrics(one, [1, 3], "correct", pattern)
    # Of the four choices of three, two hold both right ones; in the others each of three answers
    # has a vote, and wins in a third.
    assert found["maj@1"] == pytest.approx(0.5) == found["pass@1"]
    assert found["maj@3"] == pytest.approx((1 + 1 + 1 / 3 + 1 / 3) / 4)
    # Whole texts are four different answers, of which two are right.
    assert pass_metrics(one, [3], "correct")["maj@3"] == pytest.approx(0.5)


def test_a_conversation_of_several_rows_is_one_sample_and_votes_with_its_last_words():
    one = batch()
    one.columns[columns.VALID][:] = True
    one.columns[columns.ROW_ID] = torch.tensor([6, 6, 8, 9])
    one.columns[columns.ROW_WEIGHT] = torch.tensor([0.5, 0.5, 1.0, 1.0])
    one.components["correct"] = torch.tensor([1.0, torch.nan, 0.0, 1.0])
    said = ['[{"role": "assistant", "content": "4"}, {"role": "tool", "content": "x"}]'] * 4
    said[0] = '[{"role": "assistant", "content": "3"}]'  # the rollout went on behind this row
    one.texts = {"completion": [""] * 4, "messages": said}
    found = pass_metrics(one, [1, 2], "correct")
    # The first prompt has one sample, which passes; of the second's two one does.
    assert found["pass@1"] == pytest.approx((1 + 0.5) / 2) and found["pass@2"] == 1.0
    assert answers_of(one, None) == ["4"] * 4
