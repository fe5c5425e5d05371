"""Divergences from a teacher, beside their formulas in float64 and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.numerics.distillation import (
    divergence_stats,
    generalized_jsd,
    likeliest_stats,
    sampled_advantages,
)


def kl(p, q):
    return (p * (p.log() - q.log())).sum(-1)


def jsd(student, teacher, beta):
    """Agarwal et al. 2024, eq. 1, of probabilities in float64, in the orientation of TRL 1.16's
    `_chunked_divergence_loss`."""
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = (1 - beta) * student + beta * teacher
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def logits(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_divergence_and_its_gradient_are_the_formula_s(beta):
    student, teacher = logits(6, 11, seed=1), logits(6, 11, seed=2)
    own = student.clone().requires_grad_()
    found, found_kl, agrees = divergence_stats(own, teacher, beta)
    exact = student.double().requires_grad_()
    p, t = exact.softmax(-1), teacher.double().softmax(-1)
    expected = jsd(p, t, beta)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_kl.double(), kl(p, t), rtol=1e-5, atol=1e-6)
    assert torch.equal(agrees, (student.argmax(-1) == teacher.argmax(-1)).float())
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(own.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


# TRL 1.16.0 on the tensors of `models`, temperature 1.3: mean over tokens and norm of its gradient
# with respect to the student's states. `ChunkedDivergenceFunction`, and ServerDistillationTrainer's
# `_add_tail_bucket` and `_jsd_divergence` of the teacher's three likeliest tokens.
TRL = {
    0.0: (1.4597835540771484, 0.4046841263771057),
    0.1: (0.11410156637430191, 0.023796742781996727),
    0.5: (0.2898596227169037, 0.04905923455953598),
    0.9: (0.12397825717926025, 0.020576292648911476),
    1.0: (1.6604903936386108, 0.29635611176490784),
}
TRL_TOP_3 = {
    0.0: (0.9776413440704346, 0.31280046701431274),
    0.5: (0.18570363521575928, 0.04407823085784912),
    1.0: (0.8103671669960022, 0.1983380913734436),
}


def models():
    """The student's states, with gradient, and both models' logits / 1.3 of six tokens."""
    shapes = (6, 4), (6, 8), (11, 4), (11, 8)
    hidden, teacher_hidden, weight, teacher_weight = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for seed, shape in enumerate(shapes, start=1)
    )
    hidden.requires_grad_()
    return hidden, hidden @ weight.T / 1.3, teacher_hidden @ teacher_weight.T / 1.3


@pytest.mark.parametrize("beta", TRL)
def test_divergence_and_gradient_equal_trl(beta):
    hidden, student, teacher = models()
    found = divergence_stats(student, teacher, beta)[0].mean()
    found.backward()
    assert (found.item(), hidden.grad.norm().item()) == pytest.approx(TRL[beta], rel=1e-5)


@pytest.mark.parametrize("beta", TRL_TOP_3)
def test_divergence_over_the_likeliest_tokens_equals_trl(beta):
    hidden, student, teacher = models()
    top, ids = teacher.log_softmax(-1).topk(3)
    found = likeliest_stats(student, ids, top, beta)[0].mean()
    found.backward()
    assert (found.item(), hidden.grad.norm().item()) == pytest.approx(TRL_TOP_3[beta], rel=1e-5)


def test_closed_forms_of_two_coins():
    # Student (1/2, 1/2), teacher (3/4, 1/4).
    student, teacher = (torch.tensor([p]).log() for p in ([0.5, 0.5], [0.75, 0.25]))
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(generalized_jsd(student, teacher, 0.0)) == pytest.approx(forward)
    reverse = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert float(generalized_jsd(student, teacher, 1.0)) == pytest.approx(reverse)
    half = 0.5 * (0.75 * math.log(0.75 / 0.625) + 0.25 * math.log(0.25 / 0.375)) + 0.5 * (
        0.5 * math.log(0.5 / 0.625) + 0.5 * math.log(0.5 / 0.375)
    )
    assert float(generalized_jsd(student, teacher, 0.5)) == pytest.approx(half)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_what_one_of_them_never_writes_gives_no_nan(beta):
    student = logits(3, 5, seed=1)
    teacher = student.clone()
    teacher[:, 2] = -torch.inf
    own = student.requires_grad_()
    found = divergence_stats(own, teacher, beta)[0]
    assert not found.isnan().any()
    if beta < 1:
        found.sum().backward()
        assert torch.isfinite(own.grad).all()


def test_a_longer_vocabulary_is_cut_to_the_common_ids():
    student, teacher = logits(4, 7, seed=3), logits(4, 9, seed=4)
    found = divergence_stats(student, teacher, 0.5)[0]
    torch.testing.assert_close(found, divergence_stats(student, teacher[:, :7], 0.5)[0])


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_the_likeliest_tokens_and_the_rest_are_a_distribution(beta, k):
    student, teacher = logits(5, 11, seed=5), logits(5, 11, seed=6)
    top, ids = teacher.log_softmax(-1).topk(k)
    own = student.clone().requires_grad_()
    found, found_kl, agrees = likeliest_stats(own, ids.int(), top, beta)
    exact = student.double().requires_grad_()
    p, t = (x.softmax(-1).gather(-1, ids) for x in (exact, teacher.double()))
    p, t = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], dim=-1) for x in (p, t))
    expected = jsd(p, t, beta)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found_kl.double(), kl(p, t), rtol=1e-4, atol=1e-5)
    assert torch.equal(agrees, (student.argmax(-1) == teacher.argmax(-1)).float())
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(own.grad.double(), exact.grad, rtol=1e-3, atol=1e-5)


def test_tokens_that_a_server_did_not_name_are_left_out():
    student, teacher = logits(2, 6, seed=7), logits(2, 6, seed=8).log_softmax(-1)
    top, ids = teacher.topk(2)
    padded = torch.cat([top, torch.full((2, 1), -torch.inf)], dim=-1)
    with_zero = torch.cat([ids, torch.zeros(2, 1, dtype=torch.int64)], dim=-1)
    for beta in (0.0, 0.5, 1.0):
        torch.testing.assert_close(
            likeliest_stats(student, with_zero, padded, beta)[0],
            likeliest_stats(student, ids, top, beta)[0],
        )


def test_the_expected_gradient_of_the_sampled_token_is_that_of_the_exact_kl():
    """Σ_y p(y) A(y) ∇log p(y) = -∇KL(student || teacher), A = log teacher - log student."""
    exact = logits(1, 7, seed=9).double().requires_grad_()
    teacher = logits(1, 7, seed=10).double().log_softmax(-1)
    logp = exact.log_softmax(-1)
    mask = torch.ones(1, 7, dtype=torch.bool)
    advantages = sampled_advantages(logp.detach(), teacher, mask)
    (logp.detach().exp() * advantages * logp).sum().backward()
    (expected,) = torch.autograd.grad(kl(exact.softmax(-1), teacher.exp()).sum(), exact)
    torch.testing.assert_close(exact.grad, -expected)
