"""PPO-ptx: the gradient of PPO plus gamma times that of the pretraining text."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.numerics.advantages import gae, token_rewards
from rllib_llm.shared import columns
from tests.algorithms.tiny_runs import TEXTS, assert_same_weights, ppo
from tests.learners import tiny_learners as tiny

ONE_STEP = {"minibatch_size": None, "num_epochs": 1, "grad_clip": None, "ptx_data": TEXTS}
RECOMPUTED = {"off_policy": "decoupled", "off_policy_weights": None}


def text_loss(learner, texts):
    """Mean cross-entropy of the target tokens, as transformers computes it."""
    labels = texts[columns.INPUT_IDS].masked_fill(~texts[columns.LOSS_MASK], -100)
    return (
        tiny.module_of(learner)
        .model(
            input_ids=texts[columns.INPUT_IDS],
            attention_mask=texts[columns.ATTENTION_MASK],
            labels=labels,
        )
        .loss
    )


def test_the_gradient_is_that_of_ppo_plus_gamma_times_that_of_the_text():
    gamma = 0.7
    plain = tiny.build(ppo(**ONE_STEP))
    both = tiny.build(ppo(**ONE_STEP, ptx_coeff=gamma, ptx_batch_size=5, micro_batch_size=2))
    batch = tiny.judged(plain)
    texts = both._ptx_source.batch(0, 5)
    loss = text_loss(both, texts)
    named = dict(tiny.module_of(both).named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    expected_text = dict(zip(named, gradients, strict=True))

    tiny.update(plain, batch)
    metrics = tiny.update(both, batch)

    assert metrics["loss/ptx_avg"] == pytest.approx(float(loss.detach()), rel=1e-5)
    ppo_gradients, gradients = tiny.first_gradients(plain), tiny.first_gradients(both)
    for name, gradient in gradients.items():
        text = expected_text[name]
        expected = ppo_gradients[name] + (0.0 if text is None else gamma * text)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    moved = max(float((gradients[n] - ppo_gradients[n]).abs().max()) for n in gradients)
    assert moved > 1e-3


def test_gamma_zero_measures_the_text_once_and_learns_nothing_from_it():
    with_text = tiny.build(ppo(minibatch_size=2, num_epochs=2, ptx_data=TEXTS, ptx_batch_size=3))
    without = tiny.build(ppo(minibatch_size=2, num_epochs=2))
    batch = tiny.judged(with_text)
    with torch.no_grad():
        loss = float(text_loss(with_text, with_text._ptx_source.batch(0, 3)))
    metrics = tiny.update(with_text, batch)
    tiny.update(without, batch)
    assert metrics["loss/ptx_avg"] == pytest.approx(loss, rel=1e-5)
    assert_same_weights(tiny.parameters(with_text), tiny.parameters(without))
    assert with_text.num_ptx_texts == 3


def test_every_step_takes_the_next_texts_and_the_state_knows_which():
    config = ppo(minibatch_size=2, num_epochs=1, ptx_data=TEXTS, ptx_coeff=0.1, ptx_batch_size=4)
    learner = tiny.build(config)
    batch = tiny.judged(learner)
    tiny.update(learner, batch)
    assert learner.num_ptx_texts == 3 * 4  # 6 rows in mini-batches of 2
    restored = tiny.build(config)
    restored.set_state(learner.get_state())
    assert restored.num_ptx_texts == 12
    assert tiny.update(restored, batch) == pytest.approx(
        tiny.update(learner, batch), rel=0, abs=0, nan_ok=True
    )
    assert_same_weights(tiny.parameters(restored), tiny.parameters(learner))


def test_advantages_are_those_of_gae_on_token_rewards():
    learner = tiny.build(ppo(whiten_advantages=False, ref_kl_coeff=0.5, lambda_=0.9))
    batch = tiny.judged(learner)
    with torch.no_grad():
        tiny.module_of(learner).value_head.linear.bias.fill_(0.25)
    prepared = learner.prepare(batch)
    mask = batch[columns.COMPLETION_MASK]
    values = torch.full(mask.shape, 0.25)
    torch.testing.assert_close(prepared[columns.OLD_VALUES][mask], values[mask])
    kl = (batch[columns.SAMPLER_LOGPROBS] - batch[columns.REF_LOGPROBS]) * mask
    rewards = token_rewards(batch[columns.SCORES], kl, mask, 0.5)
    advantages, returns = gae(rewards, values, mask, 1.0, 0.9)
    torch.testing.assert_close(prepared[columns.ADVANTAGES], advantages, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prepared[columns.RETURNS], returns, rtol=1e-4, atol=1e-5)
    # The row of one token by hand: score 2 less beta times its KL, less the value.
    one = 2.0 - 0.5 * float(kl[2, 0]) - 0.25
    assert float(prepared[columns.ADVANTAGES][2, 0]) == pytest.approx(one, rel=1e-4)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_tokens():
    learner = tiny.build(ppo())
    batch = tiny.judged(learner)
    advantages = learner.prepare(batch)[columns.ADVANTAGES][batch[columns.COMPLETION_MASK]]
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages.std(correction=0)) == pytest.approx(1.0, rel=1e-5)


def test_values_alone_are_those_of_the_whole_forward_pass():
    for settings in ({}, {"critic": "separate"}):
        learner = tiny.build(ppo(**ONE_STEP, **settings))
        module = tiny.module_of(learner)
        torch.nn.init.normal_(module.value_head.linear.weight)
        batch = tiny.completions()
        alone = learner.forward(batch, names=[columns.VALUES])
        whole = learner.forward(batch)
        assert set(alone) == {columns.VALUES}
        torch.testing.assert_close(alone[columns.VALUES], whole[columns.VALUES])


def test_the_first_step_takes_the_samplers_log_probs_as_the_old_ones():
    learner = tiny.build(ppo(**ONE_STEP))
    batch = tiny.judged(learner)
    batch[columns.SAMPLER_LOGPROBS] = batch[columns.SAMPLER_LOGPROBS] - 0.1
    batch[columns.VALID][:] = True
    prepared = learner.prepare(dict(batch))
    assert torch.equal(prepared[columns.OLD_LOGPROBS], batch[columns.SAMPLER_LOGPROBS])
    again = tiny.build(ppo(**ONE_STEP, **RECOMPUTED)).prepare(dict(batch))
    mask = batch[columns.COMPLETION_MASK]
    change = (again[columns.OLD_LOGPROBS] - batch[columns.SAMPLER_LOGPROBS])[mask]
    torch.testing.assert_close(change, torch.full_like(change, 0.1), atol=1e-5, rtol=0)
    torch.testing.assert_close(again[columns.OLD_VALUES], prepared[columns.OLD_VALUES])


def test_values_of_the_sampler_are_the_old_ones_unless_its_weights_may_be_older():
    learner = tiny.build(ppo(**ONE_STEP))
    batch = tiny.judged(learner)
    batch[columns.VALID][1] = False
    mask = batch[columns.COMPLETION_MASK] & batch[columns.VALID].unsqueeze(1)
    batch[columns.SAMPLER_VALUES] = torch.full(mask.shape, 0.25)
    prepared = learner.prepare(dict(batch))
    assert torch.equal(prepared[columns.OLD_VALUES], 0.25 * mask)
    for mode in ("decoupled", "bypass", "decoupled_loglinear"):  # the sampler's may be older
        off_policy = {"off_policy": mode, "off_policy_weights": None}
        again = tiny.build(ppo(**ONE_STEP, **off_policy)).prepare(dict(batch))
        assert not again[columns.OLD_VALUES].any()  # the head's own, which start at 0


def test_the_sampler_computes_values_only_where_they_are_the_old_ones():
    for settings, samples_values in (({}, True), ({"off_policy": "bypass"}, False)):
        module = tiny.module_of(tiny.build(ppo(critic="shared", **ONE_STEP, **settings)))
        assert (module._sampling_value_head() is not None) == samples_values
