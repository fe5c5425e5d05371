"""Adaptive entropy coefficient and the tokens of highest entropy, beside TRL's formulas."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.numerics.entropy import AdaptiveEntropyCoefficient, high_entropy_tokens


def test_the_coefficient_follows_the_recursion_of_skywork():
    made = AdaptiveEntropyCoefficient(0.01, target=0.5, delta=0.004)
    assert made.value == 0.0  # nothing was measured yet
    found = [made.update(entropy) for entropy in (0.7, 0.4, 0.5, 0.6, 0.3)]
    # 0.01 - 0.004 (off), 0.006 + 0.004, 0.010 + 0.004 (at the target), - 0.004 (off), + 0.004.
    assert found == pytest.approx([0.0, 0.010, 0.014, 0.0, 0.014])


def test_the_coefficient_stays_in_its_bounds_and_resumes():
    made = AdaptiveEntropyCoefficient(0.001, target=0.5)
    assert made.update(1.0) == 0.0
    assert made.update(0.1) == pytest.approx(0.005)  # from 0, not from -0.004
    assert made.update(float("nan")) == pytest.approx(0.005)
    high = AdaptiveEntropyCoefficient(0.999, target=0.5)
    assert high.update(0.1) == 1.0
    again = AdaptiveEntropyCoefficient(0.0, target=0.5)
    again.load_state_dict(made.state_dict())
    assert again.value == made.value


@pytest.mark.parametrize("share", [0.01, 0.2, 0.35, 0.5, 0.99, 1.0])
def test_high_entropy_tokens_are_those_above_the_quantile(share):
    generator = torch.Generator().manual_seed(0)
    entropies = 3 * torch.rand(5, 9, generator=generator)
    mask = torch.rand(5, 9, generator=generator) < 0.7
    threshold = torch.quantile(entropies[mask].double(), 1 - share)  # TRL's, in float64
    expected = mask & (entropies.double() >= threshold)
    assert torch.equal(high_entropy_tokens(entropies, mask, share), expected)


def test_no_token_and_equal_entropies():
    none = torch.zeros(2, 3, dtype=torch.bool)
    assert not high_entropy_tokens(torch.ones(2, 3), none, 0.2).any()
    assert high_entropy_tokens(torch.ones(2, 3), ~none, 0.2).all()
