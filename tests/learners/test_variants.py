"""The published variants as their settings, from scores to loss, against numbers worked by hand.

Three groups of two completions, of 1, 2 | 2, 3 | 1, 1 tokens. Old log-probs are -1, new ones make
the ratios of `RATIOS`. Scores are 3, 1 | 0, 4 | 2, 2: the third group teaches nothing.
"""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.shared import columns
from tests.algorithms.tiny_runs import grpo, rloo
from tests.learners import tiny_learners as tiny

RATIOS = [[1.5], [0.5, 1.1], [1.3, 0.9], [1.25, 1.0, 0.5], [1.5], [0.5]]
SCORES = [3.0, 1.0, 0.0, 4.0, 2.0, 2.0]
# Advantages of group 1 are +A, -A, of group 2 -B, +B: half the difference over the deviation
# (ddof 1), 2 / sqrt 2 and 4 / sqrt 2.
A = 1.0 / (2**0.5 + 1e-4)
B = 2.0 / (8**0.5 + 1e-4)


def padded(rows, filler):
    return torch.tensor([row + [filler] * (3 - len(row)) for row in rows])


def scripted():
    num_rows = len(RATIOS)
    mask = padded([[True] * len(row) for row in RATIOS], False)
    ids = torch.full_like(mask, 5, dtype=torch.int64)
    return {
        columns.PROMPT_IDS: torch.full((num_rows, 1), 4),
        columns.PROMPT_MASK: torch.ones(num_rows, 1, dtype=torch.bool),
        columns.COMPLETION_IDS: ids,
        columns.COMPLETION_MASK: mask,
        columns.SAMPLER_LOGPROBS: torch.full(mask.shape, -1.0),
        columns.REF_LOGPROBS: torch.full(mask.shape, -1.0),
        columns.SCORES: torch.tensor(SCORES),
        columns.VALID: torch.ones(num_rows, dtype=torch.bool),
        columns.FINISHED: torch.ones(num_rows, dtype=torch.bool),
        columns.GROUP: torch.arange(num_rows) // 2,
    }


def loss_and_gradient(config, max_new_tokens=5, **training):
    """Loss of the scripted batch, and its gradient by the new log-probs [6, 3]."""
    settings = {"ref_kl_coeff": 0.0, "train_batch_size_per_learner": 6, **training}
    config = config(**settings).sampling(num_completions=2, max_new_tokens=max_new_tokens)
    learner = tiny.build(config)
    batch = learner.prepare(scripted())
    learner.start_minibatch(batch)
    logprobs = (padded(RATIOS, 7.0).log() - 1.0).requires_grad_()
    outputs = {
        columns.LOGPROBS: logprobs,
        columns.ENTROPY: torch.zeros_like(logprobs),
        columns.COMPUTED_AND_PADDING: torch.tensor([1.0, 0.0]),
    }
    loss = learner.compute_loss_for_module(
        module_id="default_policy", config=learner.config, batch=batch, fwd_out=outputs
    )
    loss.backward()
    return loss.item(), logprobs.grad


def test_grpo():
    loss, gradient = loss_and_gradient(grpo)
    # Per token, in units of the advantage: -min(1.5, 1.2) | 0.8, 1.1 | 1.3, 0.9 | -1.2, -1, -0.5.
    # The mean of each row, over 6 rows.
    rows = [-1.2 * A, (0.8 + 1.1) / 2 * A, (1.3 + 0.9) / 2 * B, -(1.2 + 1.0 + 0.5) / 3 * B]
    assert loss == pytest.approx(sum(rows) / 6, abs=1e-6)
    # A clipped token has no gradient, another its ratio times -advantage / (its row's tokens * 6).
    expected = [
        [0.0, 0.0, 0.0],
        [0.0, 1.1 * A / 12, 0.0],
        [1.3 * B / 12, 0.9 * B / 12, 0.0],
        [0.0, -1.0 * B / 18, -0.5 * B / 18],
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0],
    ]
    torch.testing.assert_close(gradient, torch.tensor(expected), atol=1e-6, rtol=0)


def test_dr_grpo():
    """Liu et al. 2025, section 3.2: no division by deviation or row length."""
    loss, _ = loss_and_gradient(grpo, loss_reduction="dr_grpo", scale_by_std=False)
    # Advantages 1, -1, -2, 2: sums of the rows -1.2, 1.9, 2 * 2.2, -2 * 2.7, over 6 rows of 5.
    assert loss == pytest.approx((-1.2 + 1.9 + 4.4 - 5.4) / 30, abs=1e-6)


def test_dapo():
    """Yu et al. 2025: clip-higher (eq. 10), token mean (eq. 12), overlong punishment (eq. 13), no
    groups of equal scores (eq. 11)."""
    loss, gradient = loss_and_gradient(
        grpo,
        max_new_tokens=4,
        loss_reduction="token_mean",
        clip_param_high=0.28,
        overlong_buffer=2,
        drop_zero_variance_groups=True,
    )
    # Three of at most 4 tokens, 2 of them buffer: -0.5. So group 2 has scores 0 and 3.5.
    b = 1.75 / (1.75 * 2**0.5 + 1e-4)
    # -min(1.5, 1.28) | 0.8, 1.1 | 1.3, 0.9 | -1.25, -1, -0.5; the 8 tokens of groups 1 and 2.
    assert loss == pytest.approx(((-1.28 + 1.9) * A + (2.2 - 2.75) * b) / 8, abs=1e-6)
    assert gradient[3, 0].item() == pytest.approx(-1.25 * b / 8)  # not clipped at 0.2 above


def test_gspo():
    """Zheng et al. 2025, eq. 5 to 7: the ratio of a row is its tokens' geometric mean."""
    loss, gradient = loss_and_gradient(
        grpo, policy_loss="gspo", clip_param=0.03, clip_param_high=0.04
    )
    one, two = 1.17**0.5, 0.625 ** (1 / 3)  # 1.0817 of 1.3, 0.9; 0.8550 of 1.25, 1, 0.5
    # -min(1.5, 1.04) | max(0.74, 0.97) | max(1.08, 1.04) | -min(0.86, 0.97)
    assert loss == pytest.approx((-1.04 * A + 0.97 * A + one * B - two * B) / 6, abs=1e-6)
    # Each token of an unclipped row has the same share of the row's gradient.
    expected = torch.zeros(6, 3)
    expected[2, :2] = one * B / 2 / 6
    expected[3] = -two * B / 3 / 6
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)


def test_cispo():
    """MiniMax-M1, eq. 4 and 5: clipped weights times log-likelihood; no token loses its
    gradient."""
    loss, gradient = loss_and_gradient(
        grpo,
        policy_loss="cispo",
        clip_param=1.0,
        clip_param_high=0.2,
        loss_reduction="token_mean",
    )
    # Weights 1.2 | 0.5, 1.1 | 1.2, 0.9 | 1.2, 1, 0.5, held from above only; 10 tokens.
    per_token = [
        -1.2 * A * (math.log(1.5) - 1),
        0.5 * A * (math.log(0.5) - 1),
        1.1 * A * (math.log(1.1) - 1),
        1.2 * B * (math.log(1.3) - 1),
        0.9 * B * (math.log(0.9) - 1),
        -1.2 * B * (math.log(1.25) - 1),
        -1.0 * B * (math.log(1.0) - 1),
        -0.5 * B * (math.log(0.5) - 1),
    ]
    assert loss == pytest.approx(sum(per_token) / 10, abs=1e-6)
    assert gradient[0, 0].item() == pytest.approx(-1.2 * A / 10)


def test_dual_clip():
    """Ye et al. 2020, eq. 5: a token with a negative advantage costs at most c times it."""
    loss, gradient = loss_and_gradient(grpo, dual_clip=1.25)
    # As GRPO's, but 1.25 instead of 1.3 in row 2.
    rows = [-1.2 * A, (0.8 + 1.1) / 2 * A, (1.25 + 0.9) / 2 * B, -(1.2 + 1.0 + 0.5) / 3 * B]
    assert loss == pytest.approx(sum(rows) / 6, abs=1e-6)
    assert gradient[2].tolist() == pytest.approx([0.0, 0.9 * B / 12, 0.0])


def test_rloo_with_the_ratio_of_whole_completions():
    """Ahmadian et al. 2024 and TRL's RLOOTrainer: a completion is one action."""
    loss, gradient = loss_and_gradient(rloo, policy_loss="rloo", loss_reduction="sequence_mean")
    # Leave-one-out advantages 2, -2, -4, 4. Products of the ratios: 1.5, 0.55, 1.17, 0.625.
    # -min(3, 2.4) | max(1.1, 1.6) | 4.68 | -min(2.5, 3.2)
    assert loss == pytest.approx((-2.4 + 1.6 + 4.68 - 2.5) / 6, abs=1e-6)
    expected = torch.zeros(6, 3)
    expected[2, :2] = 4.68 / 6
    expected[3] = -2.5 / 6
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("unbiased", [False, True])
def test_k3_in_the_loss(unbiased):
    """The reference is as likely as the old policy: k3 of a token is 1/r - 1 + ln r, and with
    unbiased gradients r times that."""
    plain, _ = loss_and_gradient(grpo)
    loss, _ = loss_and_gradient(grpo, ref_kl_coeff=0.1, ref_kl_unbiased=unbiased)
    k3 = [[(r if unbiased else 1.0) * (1 / r - 1 + math.log(r)) for r in row] for row in RATIOS]
    assert loss - plain == pytest.approx(0.1 * sum(sum(row) / len(row) for row in k3) / 6, abs=1e-6)
