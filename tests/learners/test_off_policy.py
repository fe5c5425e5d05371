"""The correction inside a learner: denominators, rejected rows, and what is reported."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.shared import columns
from tests.algorithms.tiny_runs import grpo
from tests.learners import tiny_learners as tiny

LENGTHS = (3, 5, 1, 4, 2, 5)


def older(learner, gap=0.5):
    """A batch whose first row was sampled by a policy `gap` nats away, three updates ago."""
    batch = tiny.judged(learner, LENGTHS)
    mask = batch[columns.COMPLETION_MASK]
    batch[columns.SAMPLER_LOGPROBS][0] -= gap * mask[0]
    versions = torch.where(mask, 0, -1).int()
    versions[0] -= 3 * mask[0]  # nothing is older than version 0 but here
    batch[columns.WEIGHTS_VERSION] = versions
    return batch


def settings(**changes):
    return grpo(**{"minibatch_size": None, "num_epochs": 1, "off_policy": "decoupled", **changes})


def test_what_is_reported_by_hand():
    """Row 0, 3 of the 20 tokens, has r = e^0.5 = 1.6487 and age 3; all others r = 1, age 0."""
    learner = tiny.build(settings(off_policy_upper=1.5))
    found = tiny.update(learner, older(learner))
    k3 = 1.648721 - 1 - 0.5
    expected = {
        "k1": -0.5 * 3 / 20, "k3": k3 * 3 / 20, "k1_lag_3": -0.5, "k3_lag_3": k3,
        "weight": (17 + 3 * 1.5) / 20, "weight_square": (17 + 3 * 1.5**2) / 20,
        "bounded_share": 3 / 20, "rejected_share": 0.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert found[f"off_policy/{name}"] == pytest.approx(value, rel=1e-4), name
    assert found["off_policy/k3_lag_0"] == pytest.approx(0.0, abs=1e-6)
    assert "off_policy/k3_lag_1" not in found


@pytest.mark.parametrize("off_policy", [
    "decoupled", pytest.param("bypass", marks=pytest.mark.slow),
])  # fmt: skip
def test_rejection_leaves_denominators_as_they_are(off_policy):
    """The gradient of a batch with row 0 rejected is that of one whose row 0 has advantage 0."""

    def gradients(**changes):
        learner = tiny.build(settings(off_policy=off_policy, ref_kl_coeff=0.0, **changes))
        batch = older(learner)
        if not changes:
            batch[columns.SAMPLER_LOGPROBS] = tiny.judged(learner, LENGTHS)[
                columns.SAMPLER_LOGPROBS
            ]
            zeroed = learner.compute_advantages

            def without_row_0(rows, scores, kl):
                made = zeroed(rows, scores, kl)
                made[columns.ADVANTAGES][0] = 0.0
                return made

            learner.compute_advantages = without_row_0
        metrics = tiny.update(learner, batch)
        return tiny.first_gradients(learner), metrics

    rejected, metrics = gradients(rejection="k3", rejection_upper=0.1)
    expected, _ = gradients()
    assert metrics["off_policy/rejected_share"] == pytest.approx(3 / 20)
    for name, gradient in expected.items():
        torch.testing.assert_close(rejected[name], gradient, atol=1e-6, rtol=1e-4)


def test_micro_batches_change_nothing():
    def metrics(**changes):
        learner = tiny.build(settings(rejection="k1", rejection_lower=-0.2, **changes))
        return tiny.update(learner, older(learner))

    whole, cut = metrics(), metrics(micro_batch_size=1)
    for name in (name for name in whole if name.startswith(("off_policy/", "loss/"))):
        assert cut[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_loglinear_lies_between_sampler_and_present():
    """Three updates old: α = 3/4, so the loss's ratio is e^(0.5/4) where θ is 0.5 nats away."""
    learner = tiny.build(settings(off_policy="decoupled_loglinear"))
    found = tiny.update(learner, older(learner))
    # The mean ratio: 17 tokens of 1, 3 of e^0.125; w = e^(0.75 * 0.5) for the three.
    assert found["val/ratio"] == pytest.approx((17 + 3 * 1.133148) / 20, rel=1e-4)
    assert found["off_policy/weight"] == pytest.approx((17 + 3 * 1.454991) / 20, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, 1),  # old log-probs are those of the training pass
        ({"minibatch_size": 3}, 3),  # of the second mini-batch they are asked for beforehand
        ({"ref_kl_in": "reward"}, 2),  # the KL in the rewards is made of them
    ],
)
def test_no_pass_is_made_for_old_logprobs_that_another_pass_gives(changes, passes):
    learner = tiny.build(settings(micro_batch_size=6, **changes))
    batch = older(learner)
    forward, calls = learner.forward, []

    def counted(micro_batch, **options):
        calls.append(len(micro_batch[columns.PROMPT_IDS]))
        return forward(micro_batch, **options)

    learner.forward = counted
    found = tiny.update(learner, batch)
    assert len(calls) == passes
    # Row 0's tokens weigh e^0.5, bounded by 2, wherever its old log-probs come from.
    assert found["off_policy/weight"] == pytest.approx((17 + 3 * 1.648721) / 20, rel=1e-4)


def test_a_loss_of_ones_own_reads_the_old_logprobs_of_its_pass():
    config = settings()
    gaps = []

    class Own(config.get_default_learner_class()):
        def compute_loss_for_module(self, *, batch, fwd_out, **kwargs):
            gaps.append(fwd_out[columns.LOGPROBS].detach() - batch[columns.OLD_LOGPROBS])
            return super().compute_loss_for_module(batch=batch, fwd_out=fwd_out, **kwargs)

    learner = tiny.build(config.learners(learner_class=Own))
    tiny.update(learner, older(learner))
    assert gaps and all(not gap.any() for gap in gaps)
