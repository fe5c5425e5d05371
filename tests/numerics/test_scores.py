"""Score handling against hand-worked numbers and TRL 1.16.0."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.numerics.scores import (
    RunningScoreScale,
    clip_scores,
    length_penalty,
    missing_eos_penalty,
    overlong_penalty,
)


def test_clipping_holds_scores_to_both_sides():
    assert clip_scores(torch.tensor([-9.0, -1.0, 0.5, 7.0]), 5.0).tolist() == [-5.0, -1.0, 0.5, 5.0]


def test_missing_eos_costs_the_penalty():
    scores = missing_eos_penalty(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), 2.5)
    assert scores.tolist() == [1.0, -1.5]


def test_length_penalty_is_linear():
    scores = length_penalty(torch.tensor([1.0, 1.0]), torch.tensor([10, 30]), 0.01)
    torch.testing.assert_close(scores, torch.tensor([0.9, 0.7]))


def test_overlong_penalty_equals_trl():
    # get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20) of TRL 1.16.0.
    lengths = torch.tensor([10, 80, 81, 90, 100, 101, 150])
    punishment = overlong_penalty(torch.zeros(7), lengths, max_len=100, buffer=20)
    expected = torch.tensor([0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0])
    torch.testing.assert_close(punishment, expected)
    torch.testing.assert_close(overlong_penalty(torch.ones(7), lengths, 100, 20), 1 + expected)


def test_running_scale_is_that_of_all_scores_at_once():
    torch.manual_seed(0)
    scores = torch.randn(100, dtype=torch.float64) * 3 + 50
    scale = RunningScoreScale()
    for part in scores.split([1, 2, 40, 57]):
        scale.update(part)
    assert scale.mean == pytest.approx(scores.mean().item(), rel=1e-12)
    assert scale.std == pytest.approx(scores.std(correction=1).item(), rel=1e-12)


def test_running_scale_divides_by_the_deviation():
    # (1, 3): mean 2, std sqrt(2).
    scale, scores = RunningScoreScale(), torch.tensor([1.0, 3.0])
    scale.update(scores)
    torch.testing.assert_close(scale.scale(scores), torch.tensor([0.70710678, 2.12132034]))


def test_running_scale_is_one_until_there_are_two_scores():
    scale = RunningScoreScale()
    scale.update(torch.tensor([]))
    scale.update(torch.tensor([7.0]))
    torch.testing.assert_close(scale.scale(torch.tensor([7.0])), torch.tensor([7.0]))


def test_running_scale_is_one_until_two_scores_differ():
    """Not the inverse of a round-off: the first answers may all be right."""
    scale = RunningScoreScale()
    scores = torch.full((7,), 0.1)  # whose float64 mean is rounded
    scale.update(scores)
    torch.testing.assert_close(scale.scale(scores), scores)
    scale.update(torch.tensor([0.1, 1.1]))
    # Eight times 0.1 and a 1.1: squares about the mean add up to 8 / 9, (8 / 9) / 8 = (1 / 3)^2.
    assert scale.std == pytest.approx(1 / 3)


def test_running_scale_leaves_out_invalid_scores():
    scale = RunningScoreScale()
    scale.update(torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True]))
    assert (scale.count, scale.mean) == (2, pytest.approx(2.0))
    # (1, 3): squares about the mean add up to 2, over 1.
    assert scale.std == pytest.approx(2**0.5)


def test_running_scale_leaves_out_what_is_not_finite():
    scale = RunningScoreScale()
    scale.update(torch.tensor([1.0, torch.nan, torch.inf, 3.0]))
    assert (scale.count, scale.mean) == (2.0, 2.0)
    assert scale.std == pytest.approx(2**0.5)


def test_running_scale_goes_on_from_a_checkpoint():
    before, after = RunningScoreScale(), RunningScoreScale()
    before.update(torch.tensor([1.0, 2.0, 4.0]))
    after.load_state_dict(before.state_dict())
    for scale in (before, after):
        scale.update(torch.tensor([8.0, -3.0]))
    assert after.state_dict() == before.state_dict()
