"""Losses on pairs against hand-worked numbers; TRL's are in tests/learners/test_dpo_learner.py."""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.numerics.losses import (
    dpo_loss,
    ipo_loss,
    kto_loss,
    kto_reference_point,
    preference_losses,
)

CHOSEN, REJECTED = torch.tensor([1.0, -2.0]), torch.tensor([-1.0, 0.0])  # log-ratios, nats
LENGTHS = {"chosen_lengths": torch.tensor([2, 4]), "rejected_lengths": torch.tensor([1, 2])}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_dpo():
    # Margins 2 and -2, times 0.5: -log sigmoid(1), -log sigmoid(-1).
    loss = dpo_loss(CHOSEN, REJECTED, 0.5)
    assert loss.tolist() == pytest.approx([-math.log(sigmoid(1)), -math.log(sigmoid(-1))])
    assert loss.tolist() == pytest.approx([0.313262, 1.313262], abs=1e-6)
    # A policy that is its reference: log 2, whatever the coefficient.
    assert float(dpo_loss(torch.zeros(1), torch.zeros(1), 3.0)) == pytest.approx(math.log(2))


def test_label_smoothing_takes_a_share_of_the_swapped_pair():
    # 0.9 * 0.313262 + 0.1 * 1.313262 = 0.413262, and the other way round.
    loss = dpo_loss(CHOSEN, REJECTED, 0.5, label_smoothing=0.1)
    assert loss.tolist() == pytest.approx([0.413262, 1.213262], abs=1e-6)


def test_a_target_margin_moves_the_sigmoid():
    # 0.5 * 2 - 1 = 0 and 0.5 * -2 - 1 = -2.
    loss = dpo_loss(CHOSEN, REJECTED, 0.5, target_margin=1.0)
    assert loss.tolist() == pytest.approx([math.log(2), -math.log(sigmoid(-2))])


def test_ipo_is_least_at_its_margin():
    # 1/(2 * 0.25) = 2: the first pair is there, the second 4 below.
    assert ipo_loss(CHOSEN, REJECTED, 0.25).tolist() == [0.0, 16.0]


def test_kto_judges_each_completion_for_itself():
    loss = kto_loss(CHOSEN, REJECTED, torch.tensor(0.5), 2.0)
    # 2 * (1 - 0.5) = 1 and 2 * (0.5 + 1) = 3; 2 * (-2 - 0.5) = -5 and 2 * (0.5 - 0) = 1.
    assert loss.tolist() == pytest.approx([
        0.5 * (1 - sigmoid(1) + 1 - sigmoid(3)), 0.5 * (1 - sigmoid(-5) + 1 - sigmoid(1))
    ])  # fmt: skip


def test_the_reference_point_is_a_mean_of_at_least_zero():
    total = torch.tensor(3.0, requires_grad=True)
    assert float(kto_reference_point(total, 4)) == 0.75
    assert not kto_reference_point(total, 4).requires_grad
    assert float(kto_reference_point(torch.tensor(-3.0), 4)) == 0.0
    assert float(kto_reference_point(torch.tensor(0.0), 0)) == 0.0


def test_names():
    settings = {"kl_coeff": 0.5, **LENGTHS}
    plain = preference_losses("sigmoid", CHOSEN, REJECTED, **settings)
    assert torch.equal(plain, dpo_loss(CHOSEN, REJECTED, 0.5))
    # Per token: 1/2 and -1/1, -2/4 and 0/2.
    per_token = torch.tensor([0.5, -0.5]), torch.tensor([-1.0, 0.0])
    normed = preference_losses("sigmoid_norm", CHOSEN, REJECTED, **settings)
    assert torch.equal(normed, dpo_loss(*per_token, 0.5))
    ipo = preference_losses("ipo", CHOSEN, REJECTED, **settings)
    assert torch.equal(ipo, ipo_loss(*per_token, 0.5))
    z = torch.tensor(0.5)
    kto = preference_losses("kto", CHOSEN, REJECTED, kl=z, **settings)
    assert torch.equal(kto, kto_loss(CHOSEN, REJECTED, z, 0.5))
    with pytest.raises(ValueError, match="loss_type='dpo' must be one of sigmoid, ipo, kto"):
        preference_losses("dpo", CHOSEN, REJECTED, **settings)


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo", "kto"])
def test_a_step_down_the_gradient_prefers_the_chosen(loss_type):
    chosen, rejected = (torch.zeros(2, requires_grad=True) for _ in range(2))
    loss = preference_losses(
        loss_type, chosen, rejected, kl_coeff=0.1, kl=torch.tensor(0.0), **LENGTHS
    ).sum()
    loss.backward()
    assert (chosen.grad < 0).all() and (rejected.grad > 0).all()
