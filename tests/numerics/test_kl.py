"""KL estimators against exact sums over a small vocabulary, and scripted KL coefficients."""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.numerics.kl import KLCoefficient, full_kl, kl_estimate

VOCAB = 5
LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.0, -0.4])
OLD_LOGITS = torch.tensor([0.1, -0.2, 0.5, 0.4, -0.9])
REF_LOGITS = torch.tensor([-0.5, 0.2, 0.6, 0.9, -1.5])


def exact_kl(logits: torch.Tensor, other_logits: torch.Tensor) -> torch.Tensor:
    """KL by its definition, written out over the vocabulary."""
    probs, other_probs = logits.softmax(-1), other_logits.softmax(-1)
    return sum(probs[v] * (probs[v].log() - other_probs[v].log()) for v in range(VOCAB))


def expected_gradient(estimator: str, sampler_logits: torch.Tensor, ratio: bool) -> torch.Tensor:
    """The gradient of an estimate used as a loss, in expectation over the sampler's tokens."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    sampler_logprobs = sampler_logits.log_softmax(-1)
    importance = (logprobs - sampler_logprobs).exp() if ratio else None
    estimate = kl_estimate(logprobs, REF_LOGITS.log_softmax(-1), estimator, ratio=importance)
    (sampler_logprobs.exp() * estimate).sum().backward()
    return logits.grad


def gradient_of(loss_of_logits) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    loss_of_logits(logits).backward()
    return logits.grad


def test_estimators_of_one_token_are_the_hand_worked_ones():
    # d = ln(0.5) - ln(0.25) = ln 2 = 0.693147; k2 = d^2/2 = 0.240227; k3 = 1/2 - 1 + d = 0.193147.
    logprobs, ref_logprobs = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    values = {k: kl_estimate(logprobs, ref_logprobs, k).item() for k in ("k1", "k2", "k3")}
    assert values == pytest.approx({"k1": 0.693147, "k2": 0.240227, "k3": 0.193147}, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_exact_in_expectation(estimator):
    logprobs = LOGITS.log_softmax(-1)
    estimate = kl_estimate(logprobs, REF_LOGITS.log_softmax(-1), estimator)
    mean = (logprobs.exp() * estimate).sum()
    torch.testing.assert_close(mean, exact_kl(LOGITS, REF_LOGITS))


def test_k2_is_half_the_second_moment_in_expectation():
    # Biased: 0.5 E[d^2], which is close to the KL only where policies are.
    logprobs, ref_logprobs = LOGITS.log_softmax(-1), REF_LOGITS.log_softmax(-1)
    mean = (logprobs.exp() * kl_estimate(logprobs, ref_logprobs, "k2")).sum()
    second_moment = sum(
        logprobs[v].exp() * (logprobs[v] - ref_logprobs[v]) ** 2 for v in range(VOCAB)
    )
    torch.testing.assert_close(mean, 0.5 * second_moment)
    near = LOGITS + 0.01 * REF_LOGITS
    near_logprobs = near.log_softmax(-1)
    near_mean = (near_logprobs.exp() * kl_estimate(near_logprobs, logprobs, "k2")).sum()
    assert near_mean.item() == pytest.approx(exact_kl(near, LOGITS).item(), rel=0.02)


def test_signs_of_the_estimators():
    logprobs, ref_logprobs = LOGITS.log_softmax(-1), REF_LOGITS.log_softmax(-1)
    assert (kl_estimate(logprobs, ref_logprobs, "k1") < 0).any()
    assert (kl_estimate(logprobs, ref_logprobs, "k2") >= 0).all()
    assert (kl_estimate(logprobs, ref_logprobs, "k3") >= 0).all()
    for estimator in ("k1", "k2", "k3"):
        assert (kl_estimate(logprobs, logprobs, estimator) == 0).all()


def test_k3_keeps_its_precision_near_zero():
    # k3 = d^2/2 - d^3/6 + ...: for d = 1e-3 the naive exp(-d) - 1 + d has one digit in float32.
    value = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.001]), "k3").item()
    assert value == pytest.approx(0.5e-6, rel=0.2)


@pytest.mark.parametrize("sampler", [LOGITS, OLD_LOGITS], ids=["on policy", "off policy"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_with_a_ratio_every_estimator_has_the_gradient_of_the_exact_kl(estimator, sampler):
    exact = gradient_of(lambda logits: exact_kl(logits, REF_LOGITS))
    torch.testing.assert_close(expected_gradient(estimator, sampler, ratio=True), exact)


def test_importance_weighted_k3_is_exact_off_policy_in_value_and_gradient():
    logprobs, old_logprobs = LOGITS.log_softmax(-1), OLD_LOGITS.log_softmax(-1)
    ratio = (logprobs - old_logprobs).exp()
    estimate = kl_estimate(logprobs, REF_LOGITS.log_softmax(-1), "k3", ratio=ratio)
    torch.testing.assert_close((old_logprobs.exp() * estimate).sum(), exact_kl(LOGITS, REF_LOGITS))
    exact = gradient_of(lambda logits: exact_kl(logits, REF_LOGITS))
    torch.testing.assert_close(expected_gradient("k3", OLD_LOGITS, ratio=True), exact)
    torch.testing.assert_close(expected_gradient("k3", LOGITS, ratio=True), exact)


def test_what_each_estimator_descends_when_used_as_a_loss_without_a_ratio():
    # On policy, sum_v p (dk/dd) grad log p: k1 gives sum_v grad p = 0, k2 gives the gradient of
    # KL(policy || ref), and k3 (dk/dd = 1 - ref/p) that of KL(ref || policy).
    k1, k2, k3 = (expected_gradient(k, LOGITS, ratio=False) for k in ("k1", "k2", "k3"))
    torch.testing.assert_close(k1, torch.zeros(VOCAB), atol=1e-7, rtol=0)
    torch.testing.assert_close(k2, gradient_of(lambda logits: exact_kl(logits, REF_LOGITS)))
    torch.testing.assert_close(k3, gradient_of(lambda logits: exact_kl(REF_LOGITS, logits)))


def test_full_kl_is_the_exact_kl_and_survives_forbidden_tokens():
    torch.testing.assert_close(full_kl(LOGITS, REF_LOGITS), exact_kl(LOGITS, REF_LOGITS))
    # p = (1/2, 1/2, 0) against (1/4, 1/4, 1/2): KL = ln 2.
    logits = torch.tensor([0.0, 0.0, -torch.inf])
    ref_logits = torch.tensor([1.0, 1.0, 2.0]).log()
    assert full_kl(logits, ref_logits).item() == pytest.approx(math.log(2.0))


@pytest.mark.parametrize("estimator", ["k4", "full", "", None])
def test_unknown_estimator_is_refused(estimator):
    with pytest.raises(ValueError, match="estimator=.* must be one of"):
        kl_estimate(torch.zeros(1), torch.zeros(1), estimator)


def test_adaptive_coefficient_follows_a_scripted_kl():
    coefficient = KLCoefficient(init=0.2, target=6.0, horizon=1000.0)
    # kl = target: unchanged.
    assert coefficient.update(6.0, 100) == pytest.approx(0.2)
    # kl = 6.6: error 0.1, 0.2 * (1 + 0.1 * 100/1000) = 0.202.
    assert coefficient.update(6.6, 100) == pytest.approx(0.202)
    # kl = 60: error clipped to 0.2, 0.202 * 1.02 = 0.20604.
    assert coefficient.update(60.0, 100) == pytest.approx(0.20604)
    # kl = 0: error clipped to -0.2, 0.20604 * 0.98 = 0.2019192.
    assert coefficient.update(0.0, 100) == pytest.approx(0.2019192)


def test_adaptive_coefficient_stays_positive_however_large_the_batch():
    coefficient = KLCoefficient(init=0.2, target=6.0, horizon=10.0)
    # 64 samples are more than the horizon: down by a fifth, not by 0.2 * 64 / 10 of it.
    assert coefficient.update(0.0, 64) == pytest.approx(0.16)
    assert coefficient.update(60.0, 64) == pytest.approx(0.192)


def test_adaptive_coefficient_goes_on_from_a_checkpoint():
    before = KLCoefficient(0.2, 6.0)
    before.update(20.0, 512)
    after = KLCoefficient(0.2, 6.0)
    after.load_state_dict(before.state_dict())
    assert after.value == before.value
    assert after.update(1.0, 64) == before.update(1.0, 64)


def test_fixed_coefficient_stays():
    coefficient = KLCoefficient(0.05)
    assert coefficient.update(1e6, 512) == 0.05
    restored = KLCoefficient(0.0)
    restored.load_state_dict(coefficient.state_dict())
    assert restored.value == 0.05


def test_a_kl_that_is_not_finite_is_refused():
    with pytest.raises(AssertionError, match="inf"):
        KLCoefficient(0.2, 6.0).update(math.inf, 8)
