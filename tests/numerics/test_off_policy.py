"""Corrections for older data, against TRL, hand calculations and a plain float64 reference."""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.numerics.off_policy import (
    age_metrics,
    importance_weights,
    kept_tokens,
    log_ratio,
    loglinear_proximal,
    mismatch,
)

# As in test_losses.py, where TRL's numbers were recorded.
OLD = torch.tensor([[-1.2, -0.7, -2.1, -0.4], [-0.9, -1.5, -0.3, 0.0], [-2.2, -0.6, 0.0, 0.0]])
SAMPLER = torch.tensor([[-1.2, -1.9, -2.1, -0.3], [-0.2, -1.5, -0.3, 0.0], [-2.2, -0.7, 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]).bool()
RATIOS = log_ratio(OLD, SAMPLER, MASK)


def test_token_weights_equal_trl():
    # exp(OLD - SAMPLER): e^1.2 = 3.32 is over the cap of 2, e^-0.7 = 0.4966 is not touched.
    truncated = [[1.0, 2.0, 1.0, 0.9048374], [0.4965853, 1, 1, 1], [1.0, 1.1051709, 1, 1]]
    masked = [[1.0, 0.0, 1.0, 0.9048374], [0.4965853, 1, 1, 1], [1.0, 1.1051709, 1, 1]]
    found = importance_weights(RATIOS, MASK)
    torch.testing.assert_close(found.weights, torch.tensor(truncated))
    assert found.bounded.nonzero().tolist() == [[0, 1]]
    found = importance_weights(RATIOS, MASK, mode="mask")
    torch.testing.assert_close(found.weights, torch.tensor(masked))


def test_completion_weights_equal_trl():
    # Row sums of OLD - SAMPLER: 1.1, -0.7, 0.1; e^1.1 = 3.004 is over a cap of 2 (TRL's
    # "sequence_truncate" and "sequence_mask"), under one of 10.
    sums = torch.tensor([[1.1], [-0.7], [0.1]]).exp()
    found = importance_weights(RATIOS, MASK, level="sequence", upper=10.0)
    torch.testing.assert_close(found.weights, torch.where(MASK, sums, 1.0))
    found = importance_weights(RATIOS, MASK, level="sequence", mode="mask")
    torch.testing.assert_close(found.weights[0], torch.zeros(4))
    assert found.bounded.sum() == 4


def test_lower_bounds_cut_or_mask():
    # Icepop: outside [0.5, 5] tokens are left out. e^-0.7 = 0.4966 is below.
    masked = importance_weights(RATIOS, MASK, mode="mask", lower=0.5, upper=5.0)
    assert masked.weights[1, 0] == 0 and masked.weights[0, 1] == pytest.approx(math.exp(1.2))
    cut = importance_weights(RATIOS, MASK, lower=0.5, upper=5.0)
    assert cut.weights[1, 0] == 0.5


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weights_equal_a_plain_float64_reference(level, mode):
    generator = torch.Generator().manual_seed(3)
    old, sampler = (-3 * torch.rand(6, 9, generator=generator) for _ in range(2))
    mask = torch.arange(9) < torch.tensor([9, 1, 4, 7, 2, 5]).unsqueeze(1)
    lower, upper = 0.3, 1.7
    found = importance_weights(
        log_ratio(old, sampler, mask), mask, mode=mode, level=level, lower=lower, upper=upper
    )
    for b in range(6):
        differences = [float(old[b, t]) - float(sampler[b, t]) for t in range(9) if mask[b, t]]
        for t, own in enumerate(differences):
            w = math.exp(own if level == "token" else sum(differences))
            outside = not lower <= w <= upper
            expected = 0.0 if mode == "mask" and outside else min(max(w, lower), upper)
            assert float(found.weights[b, t]) == pytest.approx(expected, rel=1e-5)
            assert bool(found.bounded[b, t]) == outside


def test_weights_pass_no_gradient_and_forgive_unknown_log_probs():
    trainer = OLD.clone().requires_grad_()
    sampler = SAMPLER.clone()
    sampler[0, 1] = torch.nan
    sampler[2, 0] = -torch.inf
    found = importance_weights(log_ratio(trainer, sampler, MASK), MASK)
    assert not found.weights.requires_grad
    assert found.weights[0, 1] == found.weights[2, 0] == 1.0


def test_mismatch_by_hand():
    # r = 2: log r = 0.6931; k1 = -0.6931, k2 = 0.2402, k3 = 2 - 1 - 0.6931 = 0.3069.
    value = torch.tensor([[2.0]]).log()
    assert float(mismatch(value, "k1")) == pytest.approx(-0.693147)
    assert float(mismatch(value, "k2")) == pytest.approx(0.2402265)
    assert float(mismatch(value, "k3")) == pytest.approx(0.306853)


def test_k1_and_k3_estimate_the_same_kl():
    """Over all tokens of a distribution, weighted by β, both give KL(β ‖ p) exactly."""
    generator = torch.Generator().manual_seed(0)
    behaviour, proximal = torch.randn(2, 1, 50, generator=generator).double().log_softmax(-1)
    exact = (behaviour.exp() * (behaviour - proximal)).sum()
    for name in ("k1", "k3"):
        estimate = (behaviour.exp() * mismatch(proximal - behaviour, name)).sum()
        torch.testing.assert_close(estimate, exact)


def test_completions_are_rejected_by_their_mean_mismatch():
    # Mean k1 of the rows, -(1.2 - 0.1)/4, 0.7/3, -0.1/2: -0.275, 0.233, -0.05.
    kept = kept_tokens(RATIOS, MASK, estimator="k1", lower=-0.2, upper=0.2)
    assert kept.any(dim=1).tolist() == [False, False, True]
    assert (kept[2] == MASK[2]).all()
    # k3 of the token e^1.2: 3.320 - 1 - 1.2 = 1.120; of e^-0.7: 0.4966 - 1 + 0.7 = 0.197.
    kept = kept_tokens(RATIOS, MASK, estimator="k3", level="token", upper=0.5)
    assert (MASK & ~kept).nonzero().tolist() == [[0, 1]]
    # Mean k3: (1.120 + 0.0048)/4 = 0.281, 0.0655, 0.0026.
    kept = kept_tokens(RATIOS, MASK, estimator="k3", upper=0.1)
    assert kept.any(dim=1).tolist() == [False, True, True]


def test_the_loglinear_proximal_policy_by_hand():
    # Age 0: the sampler's own; age 1: half way to the present policy; age 3: three quarters.
    behaviour, logprobs = torch.full((1, 3), -2.0), torch.full((1, 3), -1.0, requires_grad=True)
    found = loglinear_proximal(logprobs, behaviour, torch.tensor([[0, 1, 3]]))
    assert found.tolist() == [[-2.0, -1.5, -1.25]]
    assert not found.requires_grad


def test_ages_by_hand():
    # Version 7 is being updated. Row 0: ages 0, 0, 1; row 1: 6 (its second token is a tool's).
    versions = torch.tensor([[7, 7, 6], [1, -1, -1]], dtype=torch.int32)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert age_metrics(versions, mask, 7) == {
        "age_mean": 1.75, "age_max": 6.0, "age_0": 0.5, "age_1": 0.25, "age_2": 0.0, "age_3": 0.0,
        "age_4": 0.25, "versions": 1.5,
    }  # fmt: skip
    assert age_metrics(versions, torch.zeros_like(mask), 7) == {}


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="estimator='k4' must be one of"):
        mismatch(RATIOS, "k4")
