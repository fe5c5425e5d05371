"""Completions that hold tokens of an environment: losses, gradients and advantages by hand.

Row 0 is `a b [x y] c`, row 1 `d [z] e`, in brackets what a tool said: read, but not sampled.
"""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.learners.batching import row_lengths, trim
from rllib_llm.shared import columns
from tests.algorithms.tiny_runs import grpo, ppo
from tests.learners import tiny_learners as tiny

EXISTS = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
SAMPLED = torch.tensor([[1, 1, 0, 0, 1], [1, 0, 1, 0, 0]]).bool()
RATIOS = [[1.1, 0.9, 1.5], [1.3, 0.5]]  # of new to old policy, of the sampled tokens
KLS = [[0.5, -0.5, 1.0], [0.25, 0.75]]  # k1 of them
RUBBISH = 7.0  # where nothing was sampled


def spread(rows, filler=RUBBISH):
    """Numbers of the sampled tokens at their places, [2, 5]."""
    whole = torch.full(SAMPLED.shape, filler)
    whole[SAMPLED] = torch.tensor([number for row in rows for number in row])
    return whole


def pairwise(function, ones, others):
    return [[*map(function, one, other)] for one, other in zip(ones, others, strict=True)]


def scripted():
    old = spread([[-1.0] * 3, [-1.0] * 2])
    return {
        columns.PROMPT_IDS: torch.tensor([[4], [4]]),
        columns.PROMPT_MASK: torch.ones(2, 1, dtype=torch.bool),
        columns.COMPLETION_IDS: torch.tensor([[5, 6, 7, 8, 9], [6, 7, 8, 0, 0]]),
        columns.COMPLETION_MASK: EXISTS,
        columns.LOSS_MASK: SAMPLED,
        columns.SAMPLER_LOGPROBS: old,
        columns.REF_LOGPROBS: old - spread(KLS),
        columns.SCORES: torch.tensor([3.0, 1.0]),
        columns.VALID: torch.ones(2, dtype=torch.bool),
        columns.FINISHED: torch.ones(2, dtype=torch.bool),
        columns.GROUP: torch.tensor([4, 4]),
    }


def loss_of(learner, batch, *, values=None):
    """(loss, gradient by the new log-probs, gradient by the new values) of a prepared batch."""
    learner.start_minibatch(batch)
    logprobs = (spread(RATIOS).log() - 1.0).requires_grad_()
    outputs = {
        columns.LOGPROBS: logprobs,
        columns.ENTROPY: torch.full(SAMPLED.shape, 0.5).where(SAMPLED, torch.tensor(RUBBISH)),
        columns.COMPUTED_AND_PADDING: torch.tensor([1.0, 0.0]),
    }
    if values is not None:
        outputs[columns.VALUES] = values.requires_grad_()
    loss = learner.compute_loss_for_module(
        module_id="default_policy", config=learner.config, batch=batch, fwd_out=outputs
    )
    loss.backward()
    return loss.item(), logprobs.grad, None if values is None else values.grad


def test_grpo():
    """Sequence means over the sampled tokens, β k3 in the loss, and an entropy bonus."""
    learner = tiny.build(
        grpo(ref_kl_coeff=0.1, entropy_coeff=0.01, ref_kl_unbiased=False).sampling(
            num_completions=2, max_new_tokens=5
        )
    )
    batch = learner.prepare(scripted())
    means = learner.means.pop()
    # Scores 3 and 1: ± 1 / (sqrt 2 + 1e-4), and 0 at what was not sampled.
    a = 1 / (2**0.5 + 1e-4)
    expected = torch.tensor([[a], [-a]]).where(SAMPLED, 0.0)
    torch.testing.assert_close(batch[columns.ADVANTAGES], expected)
    # 3 and 2 sampled tokens; KL 1.0 and 1.0; minus the log-probs 3 and 2.
    assert means["train/output_length"] == 2.5
    assert means["objective/kl"] == pytest.approx(1.0)
    assert means["objective/entropy"] == pytest.approx(2.5)
    loss, gradient, _ = loss_of(learner, batch)

    # d = log ratio + the old policy's k1; k3 = exp(-d) - 1 + d, its gradient 1 - exp(-d).
    ds = [
        [math.log(r) + k for r, k in zip(*rows, strict=True)]
        for rows in zip(RATIOS, KLS, strict=True)
    ]
    k3 = [[math.exp(-d) - 1 + d for d in row] for row in ds]
    # Row 0: -a (1.1 + 0.9 + 1.2), the last clipped; row 1: a (1.3 + 0.8), the last clipped.
    policy = (-a * (1.1 + 0.9 + 1.2) / 3 + a * (1.3 + 0.8) / 2) / 2
    kl = 0.1 * (sum(k3[0]) / 3 + sum(k3[1]) / 2) / 2
    assert loss == pytest.approx(policy + kl - 0.01 * 0.5, abs=1e-6)
    by_policy = [[-a * 1.1 / 6, -a * 0.9 / 6, 0.0], [a * 1.3 / 4, 0.0]]
    by_kl = [[0.1 * (1 - math.exp(-d)) / (2 * len(row)) for d in row] for row in ds]
    by_hand = [
        [p + k for p, k in zip(*rows, strict=True)] for rows in zip(by_policy, by_kl, strict=True)
    ]
    assert not gradient[~SAMPLED].any()
    torch.testing.assert_close(gradient, spread(by_hand, filler=0.0), atol=1e-6, rtol=1e-5)


def test_ppo():
    """KL in the reward, GAE across what was not sampled, token means, the critic's loss."""
    settings = {"gamma": 0.9, "lambda_": 0.5, "whiten_advantages": False, "ref_kl_coeff": 0.1}
    learner = tiny.build(ppo(**settings, vf_clip_param=None, vf_loss_coeff=0.1))
    batch = scripted()
    batch[columns.SAMPLER_VALUES] = spread([[1.0, 2.0, 3.0], [0.5, 1.0]])
    batch = learner.prepare(batch)
    # Rewards -0.1 KL, and the score at the last sampled token. V and A come from the next sampled
    # token, γλ = 0.45.
    # Row 0: r = -0.05, 0.05, 3 - 0.1 = 2.9, V = 1, 2, 3:
    #   δ = -0.05 + 0.9 * 2 - 1 = 0.75, 0.05 + 0.9 * 3 - 2 = 0.75, 2.9 - 3 = -0.1;
    #   A = -0.1, 0.75 - 0.045 = 0.705, 0.75 + 0.45 * 0.705 = 1.06725.
    # Row 1: r = -0.025, 1 - 0.075 = 0.925, V = 0.5, 1:
    #   δ = -0.025 + 0.9 - 0.5 = 0.375, -0.075;  A = -0.075, 0.375 - 0.03375 = 0.34125.
    a = [[1.06725, 0.705, -0.1], [0.34125, -0.075]]
    returns = [[2.06725, 2.705, 2.9], [0.84125, 0.925]]
    torch.testing.assert_close(batch[columns.ADVANTAGES], spread(a, 0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(batch[columns.RETURNS], spread(returns, 0.0), atol=1e-6, rtol=0)

    values = [[1.5, 2.0, 2.0], [1.0, 1.0]]
    loss, gradient, by_values = loss_of(learner, batch, values=spread(values))
    # Of 5 sampled tokens: -min(A r, A clip r): 1.1, 0.9 and 1.5 with a negative A is not clipped;
    # 1.3 is held to 1.2, and 0.5 to 0.8 with a negative A.
    policy = -(1.1 * a[0][0] + 0.9 * a[0][1] + 1.5 * a[0][2] + 1.2 * a[1][0] + 0.8 * a[1][1]) / 5
    errors = [v - r for v, r in zip(sum(values, []), sum(returns, []), strict=True)]
    critic = 0.1 * sum(0.5 * error**2 for error in errors) / 5
    assert loss == pytest.approx(policy + critic, abs=1e-6)
    by_hand = [[-1.1 * a[0][0] / 5, -0.9 * a[0][1] / 5, -1.5 * a[0][2] / 5], [0.0, 0.0]]
    torch.testing.assert_close(gradient, spread(by_hand, 0.0), atol=1e-6, rtol=1e-5)
    value_gradient = torch.zeros(SAMPLED.shape)
    value_gradient[SAMPLED] = 0.1 * torch.tensor(errors) / 5
    torch.testing.assert_close(by_values, value_gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("config", [ppo, pytest.param(grpo, marks=pytest.mark.slow)])
def test_what_the_environment_said_is_read_and_not_learnt(config):
    """Through the model: other ids there change the loss, other numbers beside them do not."""
    learner = tiny.build(config(minibatch_size=None, num_epochs=1, micro_batch_size=1))
    batch = scripted()
    # Each row alone, as the update reads it: the ratio of one computation to itself is exactly 1.
    sampled = learner.evaluate_rows(batch, [columns.LOGPROBS])
    batch[columns.SAMPLER_LOGPROBS] = sampled[columns.LOGPROBS]
    assert not batch[columns.SAMPLER_LOGPROBS][~SAMPLED].any()
    batch[columns.REF_LOGPROBS] = batch[columns.SAMPLER_LOGPROBS] - 0.5

    def gradients(**changed):
        other = tiny.build(learner.config)
        metrics = tiny.update(other, {**batch, **changed})
        return tiny.first_gradients(other), metrics

    expected, metrics = gradients()
    assert metrics["val/ratio"] == 1.0 and metrics["sampler/logprob_gap"] == 0.0
    assert metrics["train/output_length"] == 2.5
    rubbish = torch.where(SAMPLED, batch[columns.REF_LOGPROBS], -50.0)
    found, same = gradients(**{columns.REF_LOGPROBS: rubbish})
    assert same == metrics
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    # Each sampled token is predicted behind all that exists before it.
    ids = batch[columns.COMPLETION_IDS].clone()
    ids[0, 2:4] = torch.tensor([10, 11])
    with torch.no_grad():
        one, other = (
            tiny.module_of(learner).forward_train({**batch, columns.COMPLETION_IDS: which})[
                columns.LOGPROBS
            ]
            for which in (batch[columns.COMPLETION_IDS], ids)
        )
        text = torch.tensor([[4, 5, 6, 7, 8, 9]])
        alone = torch.log_softmax(tiny.module_of(learner).model(text).logits[0], -1)
    assert torch.equal(one[0, :2], other[0, :2]) and one[0, 4] != other[0, 4]
    wanted = [float(alone[0, 5]), float(alone[1, 6]), float(alone[4, 9])]
    assert one[0, [0, 1, 4]].tolist() == pytest.approx(wanted, rel=1e-4)


def test_rows_are_measured_and_cut_by_what_is_read():
    """What comes behind the last sampled token is not read; what lies between is."""
    batch = scripted()
    assert row_lengths(batch).tolist() == [6, 4]
    batch[columns.LOSS_MASK] = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 0, 0]]).bool()
    assert row_lengths(batch).tolist() == [3, 4]
    trimmed = trim(batch)
    for name in (columns.COMPLETION_IDS, columns.COMPLETION_MASK, columns.LOSS_MASK):
        assert torch.equal(trimmed[name], batch[name][:, :3])
