"""The loss of supervised fine-tuning is transformers' own, and only targets count."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.data.texts import TextSource
from rllib_llm.shared import columns
from tests.algorithms.tiny_runs import TEXTS, assert_same_weights, build_model, sft
from tests.crossed import crossed
from tests.learners import tiny_learners as tiny

LONG = [{"prompt": "12+7=", "completion": "19"}, {"prompt": "9-", "completion": "4=5"},
        {"text": "111111111"}, {"prompt": "2*2=", "completion": "4"}]  # fmt: skip


def texts(count=4, **settings):
    _, tokenizer = build_model()
    return TextSource(LONG, tokenizer=tokenizer, max_length=32, **settings).batch(0, count)


def transformers_loss(learner, batch):
    labels = batch[columns.INPUT_IDS].masked_fill(~batch[columns.LOSS_MASK], -100)
    return (
        tiny.module_of(learner)
        .model(
            input_ids=batch[columns.INPUT_IDS],
            attention_mask=batch[columns.ATTENTION_MASK],
            labels=labels,
        )
        .loss
    )


@crossed(
    cut=[{}, {"micro_batch_size": 1}, {"micro_batch_size": 3}], loss_on=["completion", "all"]
)
def test_loss_and_gradient_are_those_of_transformers(loss_on, cut):
    learner = tiny.build(sft(grad_clip=None, **cut))
    batch = texts(loss_on=loss_on)
    loss = transformers_loss(learner, batch)
    named = dict(tiny.module_of(learner).named_parameters())
    expected = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    metrics = tiny.update(learner, batch)
    assert metrics["loss/sft"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_same_weights(tiny.first_gradients(learner), expected, rtol=1e-4, atol=1e-6)


def test_evaluation_is_the_same_loss_and_changes_nothing():
    learner = tiny.build(sft(micro_batch_size=3))
    batch = texts()
    with torch.no_grad():
        loss = float(transformers_loss(learner, batch))
    before = tiny.parameters(learner)
    result = learner.evaluate_batch(batch)
    assert result["loss_sum"] / result["loss_count"] == pytest.approx(loss, rel=1e-5)
    assert result["loss_count"] == int(batch[columns.LOSS_MASK].sum())
    assert_same_weights(tiny.parameters(learner), before)


def test_it_learns_the_texts_it_sees():
    learner = tiny.build(sft(lr=1e-2))
    _, tokenizer = build_model()
    batch = TextSource(TEXTS, tokenizer=tokenizer, max_length=16).batch(0, 8)
    losses = [tiny.update(learner, batch)["loss/sft"] for _ in range(60)]
    # 8 of the sums below 4 + 4: log(18) = 2.89 nats a token at first, almost none once known.
    assert losses[0] == pytest.approx(2.89, abs=0.1)
    assert losses[-1] < 0.3
