"""Log-prob and entropy of single tokens: numbers, gradients, chunks."""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.numerics.token_stats import in_chunks, token_stats

LOGITS = torch.tensor([[0.5, -1.0, 2.0, 0.1], [3.0, 0.0, -2.0, 1.0]])
TARGETS = torch.tensor([2, 3])


def test_equal_logits_give_log_of_the_count():
    logprobs, entropies = token_stats(torch.zeros(1, 4), torch.tensor([1]), entropy=True)
    assert logprobs.item() == pytest.approx(-math.log(4))
    assert entropies.item() == pytest.approx(math.log(4))


def test_numbers_equal_trl():
    # selective_log_softmax and entropy_from_logits of TRL 1.16.0 on LOGITS / 0.7.
    logprobs, entropies = token_stats(LOGITS, TARGETS, 0.7, entropy=True)
    torch.testing.assert_close(logprobs, torch.tensor([-0.18009853, -2.92665648]))
    torch.testing.assert_close(entropies, torch.tensor([0.58951879, 0.28288144]))


def test_gradients_equal_finite_differences():
    def function(logits):
        return token_stats(logits, TARGETS, 0.7, True)

    assert torch.autograd.gradcheck(function, LOGITS.double().requires_grad_())


def test_forbidden_tokens_add_no_entropy_and_no_nan():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    logprobs, entropies = token_stats(logits, torch.tensor([0]), entropy=True)
    assert entropies.item() == pytest.approx(math.log(2))
    (logprobs + entropies).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5, 0.0]]))


def test_chunks_give_the_same_numbers_and_gradients():
    torch.manual_seed(0)
    logits, targets = torch.randn(10, 7), torch.randint(0, 7, (10,))
    results = []
    for chunk_tokens in (10, 3, 1):
        own = logits.clone().requires_grad_()
        logprobs, entropies = in_chunks(
            lambda *args: token_stats(*args, 1.3, True), (own, targets), chunk_tokens
        )
        (logprobs * torch.arange(10) + entropies).sum().backward()
        results.append((logprobs, entropies, own.grad))
    for result in results[1:]:
        for ours, whole in zip(result, results[0], strict=True):
            torch.testing.assert_close(ours, whole)


def test_consumed_logits_give_the_same_gradient_and_no_second_one():
    def gradient(consume: bool):
        inputs = LOGITS.clone().requires_grad_()
        logits = inputs * 2
        logprobs, entropies = token_stats(logits, TARGETS, 0.7, True, consume)
        loss = (logprobs + 0.3 * entropies).sum()
        loss.backward(retain_graph=True)
        return inputs.grad, loss, logits

    expected, _, logits = gradient(False)
    assert torch.equal(logits, LOGITS * 2)
    ours, loss, logits = gradient(True)
    assert torch.equal(ours, expected)
    torch.testing.assert_close(logits.detach(), expected / 2)  # the gradient lies where they were
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
