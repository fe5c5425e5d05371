"""The loss of a reward model is -log sigmoid of the difference of scores, mean over pairs."""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.data.preferences import PairSource
from rllib_llm.shared import columns
from tests.algorithms.tiny_runs import PAIRS, assert_same_weights, build_model, reward_model
from tests.learners import tiny_learners as tiny


def pairs(count=5):
    _, tokenizer = build_model()
    return PairSource(PAIRS, tokenizer=tokenizer, max_length=16, shuffle=False).batch(0, count)


def scores_by_transformers(learner, batch):
    """Chosen and rejected scores, each text alone and without padding."""
    model = tiny.module_of(learner).model

    def score(ids, mask):
        return torch.cat([
            model(input_ids=row[keep].unsqueeze(0)).logits[0]
            for row, keep in zip(ids, mask, strict=True)
        ])  # fmt: skip

    return (
        score(batch[columns.CHOSEN_IDS], batch[columns.CHOSEN_MASK]),
        score(batch[columns.REJECTED_IDS], batch[columns.REJECTED_MASK]),
    )


@pytest.mark.parametrize("cut", [{}, {"micro_batch_size": 2}])
def test_loss_and_accuracy_in_closed_form(cut):
    learner = tiny.build(reward_model(**cut))
    batch = pairs()
    with torch.no_grad():
        chosen, rejected = scores_by_transformers(learner, batch)
    difference = (chosen - rejected).tolist()
    expected = sum(math.log(1 + math.exp(-d)) for d in difference) / 5
    metrics = tiny.update(learner, batch)
    assert metrics["loss/reward_model"] == pytest.approx(expected, rel=1e-5)
    assert metrics["train/accuracy"] == pytest.approx(sum(d > 0 for d in difference) / 5)


def test_centring_adds_the_square_of_the_sum_of_scores_to_the_gradient():
    plain, centred = (
        tiny.build(reward_model(grad_clip=None, center_rewards_coeff=c)) for c in (0.0, 0.5)
    )
    batch = pairs()
    chosen, rejected = scores_by_transformers(centred, batch)
    extra = 0.5 * (chosen + rejected).square().mean()
    named = dict(tiny.module_of(centred).named_parameters())
    by_hand = dict(zip(named, torch.autograd.grad(extra, list(named.values())), strict=True))
    tiny.update(plain, batch)
    tiny.update(centred, batch)
    gradients = tiny.first_gradients(plain)
    expected = {name: gradients[name] + by_hand[name] for name in gradients}
    assert_same_weights(tiny.first_gradients(centred), expected, rtol=1e-3, atol=1e-5)


def test_evaluation_sums_loss_accuracy_and_scores():
    learner = tiny.build(reward_model(micro_batch_size=2))
    batch = pairs()
    with torch.no_grad():
        chosen, rejected = scores_by_transformers(learner, batch)
    result = learner.evaluate_batch(batch)
    both = torch.cat([chosen, rejected])
    assert result["score_sum"] == pytest.approx(float(both.sum()), rel=1e-4)
    assert result["score_square_sum"] == pytest.approx(float(both.square().sum()), rel=1e-4)
    assert result["accuracy_sum"] == int((chosen > rejected).sum())
    assert (result["loss_count"], result["score_count"]) == (5, 10)


def test_it_learns_to_tell_the_pairs_apart():
    learner = tiny.build(reward_model(lr=1e-2))
    batch = pairs(8)
    for _ in range(20):
        metrics = tiny.update(learner, batch)
    assert metrics["train/accuracy"] == 1.0
    assert metrics["loss/reward_model"] < 0.2  # chance is log 2 = 0.69
