"""Advantages of GRPO, RLOO and REINFORCE++ from scores and KL, worked by hand."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.algorithms.reinforce_pp import ReinforcePPConfig
from rllib_llm.shared import columns
from tests.algorithms.tiny_runs import MODEL, grpo, rloo
from tests.learners import tiny_learners as tiny


def prepared(config, scores, *, ref_gap=0.0, lengths=(1, 2, 1, 2, 1, 3), valid=None, envs=None,
             own=None):  # fmt: skip
    """`ref_gap`: KL of every token, k1, nats. `own`: in the place of the learner's method."""
    learner = tiny.build(config)
    if own is not None:
        learner.row_advantages = own
    batch = tiny.judged(learner, lengths)
    if envs is not None:
        batch[columns.ENVIRONMENT] = torch.tensor(envs)
    batch[columns.SCORES] = torch.tensor(scores)
    batch[columns.REF_LOGPROBS] = batch[columns.SAMPLER_LOGPROBS] - ref_gap
    if valid is not None:
        batch[columns.VALID] = torch.tensor(valid)
    result = learner.prepare(batch)
    mask = result[columns.COMPLETION_MASK]
    assert not result[columns.ADVANTAGES][~mask].any()
    return result[columns.ADVANTAGES], mask


def per_row(advantages, mask):
    """The one advantage of each row; all its tokens share it."""
    rows = advantages.amax(1).where(advantages.amax(1) > 0, advantages.amin(1))
    assert torch.equal(advantages, rows.unsqueeze(1) * mask)
    return rows.tolist()


def test_grpo_takes_the_group_mean_and_deviation():
    rows = per_row(*prepared(grpo(), [1.0, 2.0, 6.0, 0.0, 0.0, 3.0]))
    # Group 1: mean 3, variance (4 + 1 + 9) / 2 = 7. Group 2: mean 1, variance (1 + 1 + 4) / 2 = 3.
    one, two = 7**0.5 + 1e-4, 3**0.5 + 1e-4
    assert rows == pytest.approx([-2 / one, -1 / one, 3 / one, -1 / two, -1 / two, 2 / two])


def test_dr_grpo_leaves_the_deviation_out():
    rows = per_row(*prepared(grpo(scale_by_std=False), [1.0, 2.0, 6.0, 0.0, 0.0, 3.0]))
    assert rows == pytest.approx([-2, -1, 3, -1, -1, 2])


def test_grpo_has_its_kl_in_the_loss_not_in_the_advantage():
    plain = per_row(*prepared(grpo(), [1.0, 2.0, 6.0, 0.0, 0.0, 3.0]))
    with_gap = per_row(*prepared(grpo(ref_kl_coeff=9.0), [1.0, 2.0, 6.0, 0.0, 0.0, 3.0],
                                 ref_gap=0.5))  # fmt: skip
    assert with_gap == plain


def test_rloo_compares_with_the_mean_of_the_others():
    rows = per_row(*prepared(rloo(ref_kl_coeff=0.0), [1.0, 2.0, 6.0, 0.0, 0.0, 3.0]))
    # 1 - (2 + 6)/2, 2 - (1 + 6)/2, 6 - (1 + 2)/2; 0 - 3/2, 0 - 3/2, 3 - 0.
    assert rows == pytest.approx([-3, -1.5, 4.5, -1.5, -1.5, 3])


def test_rloo_takes_the_kl_into_the_score_first():
    rows = per_row(*prepared(rloo(ref_kl_coeff=0.2), [1.0, 2.0, 6.0, 0.0, 0.0, 3.0], ref_gap=0.5))
    # KL is 0.5 a token, 0.1 of score: lengths 1, 2, 1, 2, 1, 3 give 0.9, 1.8, 5.9, -0.2, -0.1, 2.7.
    expected = [0.9 - 3.85, 1.8 - 3.4, 5.9 - 1.35, -0.2 - 1.3, -0.1 - 1.25, 2.7 + 0.15]
    assert rows == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("envs", [None, [0, 0, 0, 1, 1, 1]])
def test_rloo_whitens_each_environment_for_itself(envs):
    config = rloo(ref_kl_coeff=0.0, whiten_advantages=True)
    rows = per_row(*prepared(config, [1.0, 2.0, 6.0, 0.0, 0.0, 3.0], envs=envs))
    one, two = [-3.0, -1.5, 4.5], [-1.5, -1.5, 3.0]  # of mean 0
    sums = [(9 + 2.25 + 20.25), (2.25 + 2.25 + 9)]
    spreads = [(sum(sums) / 6) ** 0.5] * 2 if envs is None else [(each / 3) ** 0.5 for each in sums]
    expected = [a / spreads[0] for a in one] + [a / spreads[1] for a in two]
    assert rows == pytest.approx(expected, rel=1e-5)


def test_an_advantage_of_ones_own_takes_the_place_of_rloos():
    """As docs/guides/algorithms.md says; it had no effect."""
    rows = per_row(*prepared(rloo(ref_kl_coeff=0.0), [1.0, 2.0, 6.0, 0.0, 0.0, 3.0],
                             own=lambda scores, groups, valid: 2 * scores * valid))  # fmt: skip
    assert rows == [2, 4, 12, 0, 0, 6]
    config = rloo(ref_kl_coeff=0.0, whiten_advantages=True)
    rows = per_row(*prepared(config, [0.0] * 6, envs=[0, 0, 0, 1, 1, 1],
                             own=lambda scores, groups, valid: scores + 1))  # fmt: skip
    assert rows == [1] * 6  # each environment's own rows count alone


def test_rows_not_judged_stay_out_of_their_group():
    rows = per_row(
        *prepared(rloo(ref_kl_coeff=0.0), [1.0, 50.0, 6.0, 0.0, 0.0, 3.0],
                  valid=[True, False, True, True, True, True])
    )  # fmt: skip
    assert rows == pytest.approx([-5, 0, 5, -1.5, -1.5, 3])


def test_reinforce_pp_whitens_the_reward_to_go_of_all_tokens():
    config = (
        ReinforcePPConfig()
        .language_model(model=MODEL)
        .training(ref_kl_coeff=0.2, gamma=1.0, train_batch_size_per_learner=2)
    )
    advantages, mask = prepared(config, [1.0, 2.0], ref_gap=0.5, lengths=(1, 2))
    # Token rewards: 1 - 0.1; and -0.1, 2 - 0.1. To go: 0.9; 1.8, 1.9. Mean 23/15.
    to_go = torch.tensor([0.9, 1.8, 1.9])
    expected = (to_go - to_go.mean()) / to_go.std(correction=0)
    torch.testing.assert_close(advantages[mask], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("baseline", [0.0, 0.75])
def test_reinforce_without_whitening_is_the_reward_to_go_above_a_baseline(baseline):
    config = (
        ReinforcePPConfig()
        .language_model(model=MODEL)
        .training(ref_kl_coeff=0.2, gamma=0.5, whiten_advantages=False, baseline=baseline,
                  train_batch_size_per_learner=2)
    )  # fmt: skip
    advantages, mask = prepared(config, [1.0, 2.0], ref_gap=0.5, lengths=(1, 2))
    # Token rewards 0.9; and -0.1, 1.9: to go 0.9; -0.1 + 0.5 * 1.9 = 0.85, 1.9.
    expected = [to_go - baseline for to_go in (0.9, 0.85, 1.9)]
    assert advantages[mask].tolist() == pytest.approx(expected, rel=1e-4)
    assert not advantages[~mask].any()


def test_the_loss_of_grpo_holds_beta_times_k3():
    learner = tiny.build(grpo(minibatch_size=None, num_epochs=1, ref_kl_coeff=0.5))
    batch = tiny.judged(learner)
    mask = batch[columns.COMPLETION_MASK]
    metrics = tiny.update(learner, batch)
    gap = (batch[columns.SAMPLER_LOGPROBS] - batch[columns.REF_LOGPROBS])[mask]
    k3 = (torch.exp(-gap) - 1 + gap).mean()
    assert metrics["loss/ref_kl_avg"] == pytest.approx(float(k3), rel=1e-4)


def test_the_unbiased_kl_has_the_gradient_of_the_exact_kl():
    """E over the policy's own tokens of the gradient, all 18 of them weighed by probability."""
    config = grpo(minibatch_size=None, num_epochs=1, ref_kl_unbiased=True)
    learner = tiny.build(config)
    # One prompt, and as completions each token of the vocabulary: the expectation is a sum.
    batch = tiny.completions([1] * 18)
    batch[columns.PROMPT_IDS][:] = batch[columns.PROMPT_IDS][0]
    batch[columns.PROMPT_MASK][:] = batch[columns.PROMPT_MASK][0]
    batch[columns.COMPLETION_IDS] = torch.arange(18).unsqueeze(1)
    # Two passes, since the gradient of each is written over its logits.
    logprobs, again = (
        tiny.module_of(learner).forward_train(batch)[columns.LOGPROBS] for _ in range(2)
    )
    old = logprobs.detach()
    reference = torch.log_softmax(torch.arange(18) / 9.0, 0).unsqueeze(1)
    batch |= {columns.OLD_LOGPROBS: old, columns.REF_LOGPROBS: reference}
    estimate = learner._loss_kl(logprobs, batch, batch[columns.COMPLETION_MASK])
    exact = (again.exp() * (again - reference)).sum()
    weights = list(tiny.module_of(learner).model.parameters())
    by_estimate = torch.autograd.grad((old.exp() * estimate).sum(), weights)
    by_exact = torch.autograd.grad(exact, weights)
    for one, other in zip(by_estimate, by_exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
