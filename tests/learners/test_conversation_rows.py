"""What learners make of conversations: turns that earn rewards, and rows of one that was forked."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.shared import columns
from tests.algorithms.tiny_runs import grpo
from tests.learners import tiny_learners as tiny
from tests.learners.test_rlhf_learner import reinforce


def conversations(learner, lengths, row_ids, finished=None):
    """Rows of `lengths` sampled tokens, of the conversations `row_ids`, two of each prompt."""
    batch = tiny.judged(learner, lengths)
    sizes, ids = torch.tensor(lengths), torch.tensor(row_ids)
    whole = torch.tensor([int(sizes[ids == i].sum()) for i in row_ids])
    finished = [True] * len(lengths) if finished is None else finished
    return batch | {
        columns.ROW_ID: ids,
        columns.GROUP: ids // 2,
        columns.ROW_WEIGHT: sizes / whole,
        columns.REWARDS: torch.zeros(batch[columns.COMPLETION_MASK].shape),
        columns.FINISHED: torch.tensor(finished),
    }


def rewards_to_go(batch, settings):
    """Of two conversations in a row each, and of a third in two rows."""
    learner = tiny.build(
        reinforce(ref_kl_coeff=0.0, gamma=1.0, whiten_advantages=False, **settings)
    )
    return learner, learner.prepare(batch(learner))[columns.ADVANTAGES]


def earning(learner):
    """Turns of two tokens that earn 60 and 40 of 100, and 0 of 0; in two rows 0, then 50 of 50."""
    batch = conversations(learner, (4, 4, 2, 2), [0, 1, 2, 2])
    batch[columns.SCORES] = torch.tensor([100.0, 0.0, 50.0, 50.0])
    batch[columns.REWARDS][0, 1], batch[columns.REWARDS][0, 3] = 60.0, 40.0
    batch[columns.REWARDS][3, 1] = 50.0
    return batch


def test_what_turns_earned_is_scaled_as_their_sum_is():
    """Scores 100, 0, 50 have the deviation 50 (ddof 1): they become 2, 0, 1."""
    learner, to_go = rewards_to_go(earning, {"scale_scores": True})
    assert learner.score_scales[0].count == 3 and learner.score_scales[0].std == pytest.approx(50.0)
    expected = [[2.0, 2.0, 0.8, 0.8], [0.0] * 4, [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
    torch.testing.assert_close(to_go, torch.tensor(expected))


def test_what_turns_earned_is_clipped_in_proportion():
    """100 becomes 10, and so 60 and 40 become 6 and 4."""
    _, to_go = rewards_to_go(earning, {"score_clip": 10.0})
    assert to_go[0].tolist() == pytest.approx([10.0, 10.0, 4.0, 4.0])


def test_a_penalty_is_taken_off_at_the_end_and_the_turns_keep_what_they_earned():
    _, to_go = rewards_to_go(earning, {"length_penalty": 5.0})
    # 4 tokens cost 20: the second turn is left with 40 - 20, the first with all of its 60.
    assert to_go[0].tolist() == pytest.approx([80.0, 80.0, 20.0, 20.0])


@pytest.mark.parametrize("settings, score", [
    # The conversation in two rows has 3 + 2 tokens, its last turn was cut.
    ({"length_penalty": 0.1}, 2.0 - 0.5),
    ({"missing_eos_penalty": 1.0}, 2.0 - 1.0),
    ({"overlong_buffer": 4}, 2.0 - 3 / 4),  # the last 4 of 6 tokens
])  # fmt: skip
def test_penalties_are_for_the_whole_conversation(settings, score):
    config = grpo(scale_by_std=False, ref_kl_coeff=0.0, train_batch_size_per_learner=4, **settings)
    learner = tiny.build(config.sampling(max_new_tokens=6, num_completions=2))
    batch = conversations(learner, (3, 2, 1), [0, 0, 1], finished=[True, False, True])
    batch[columns.SCORES] = torch.tensor([2.0, 2.0, 1.0])
    advantages = learner.prepare(batch)[columns.ADVANTAGES]
    other = 1.0 - (0.1 if "length_penalty" in settings else 0.0)
    half = (score - other) / 2  # its distance from the mean of the two
    assert advantages[:, 0].tolist() == pytest.approx([half, half, -half])


def test_metrics_are_means_over_conversations():
    config = grpo(ref_kl_coeff=0.0, train_batch_size_per_learner=4)
    learner = tiny.build(config.sampling(max_new_tokens=6, num_completions=2))
    batch = conversations(learner, (3, 2, 1), [0, 0, 1], finished=[True, False, True])
    batch[columns.SCORES] = torch.tensor([2.0, 2.0, 1.0])
    learner.prepare(batch)
    means = learner.means.pop()
    assert means["objective/scores"] == means["objective/rlhf_reward"] == pytest.approx(1.5)
    assert means["train/output_length"] == pytest.approx((5 + 1) / 2)
    assert means["val/finished"] == pytest.approx(0.5)
