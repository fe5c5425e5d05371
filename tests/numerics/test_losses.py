"""Losses against hand-worked numbers, TRL 1.16.0 and themselves under any split of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_llm.numerics.kl import kl_estimate
from rllib_llm.numerics.losses import (
    POLICY_LOSSES,
    REDUCTIONS,
    LossDenominators,
    cross_entropy_tokens,
    importance_ratio,
    policy_loss,
    preference_loss,
    reduce_loss,
    value_loss,
)
from rllib_llm.numerics.off_policy import importance_weights, log_ratio
from tests.crossed import crossed

# The tensors on which TRL's numbers below were recorded: GRPOTrainer._compute_loss of TRL 1.16.0
# (torch 2.13.0), one process, no accumulation, max_completion_length = 8.
OLD = torch.tensor([[-1.2, -0.7, -2.1, -0.4], [-0.9, -1.5, -0.3, 0.0], [-2.2, -0.6, 0.0, 0.0]])
NEW = torch.tensor([[-0.8, -0.9, -2.0, -0.9], [-1.3, -1.2, -0.35, 0.0], [-2.0, -0.2, 0.0, 0.0]])
REF = torch.tensor([[-1.0, -0.5, -1.9, -0.8], [-1.0, -1.6, -0.5, 0.0], [-2.5, -0.3, 0.0, 0.0]])
SAMPLER = torch.tensor([[-1.2, -1.9, -2.1, -0.3], [-0.2, -1.5, -0.3, 0.0], [-2.2, -0.7, 0.0, 0.0]])
ADVANTAGES = torch.tensor([1.5, -0.5, -1.0])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]).bool()
MAX_COMPLETION_LEN = 8
TRUNCATED = importance_weights(log_ratio(OLD, SAMPLER, MASK), MASK, upper=2.0).weights


def loss_and_grad(reduction: str, kl_coeff=0.0, unbiased_kl=False, **settings_):
    new = NEW.clone().requires_grad_()
    policy = policy_loss(new, OLD, ADVANTAGES, MASK, **settings_)
    per_token = policy.per_token
    if kl_coeff:
        ratio = importance_ratio(new, OLD, MASK) if unbiased_kl else None
        per_token = per_token + kl_coeff * kl_estimate(new, REF, "k3", ratio=ratio)
    denominators = LossDenominators.count(MASK, MAX_COMPLETION_LEN)
    loss = reduce_loss(per_token, MASK, reduction, denominators)
    loss.backward()
    return loss.item(), new.grad, policy


TRL = {
    "grpo": (
        {"reduction": "grpo"},
        0.1581832,
        [
            [0, -0.102341, -0.138146, -0.075816],
            [0, 0.074992, 0.052846, 0],
            [0.203567, 0.248637, 0, 0],
        ],
    ),
    "dapo, clip-higher": (
        {"reduction": "dapo", "clip_high": 0.28},
        -0.1613196,
        [
            [0, -0.136455, -0.184195, -0.101088],
            [0, 0.074992, 0.052846, 0],
            [0.135711, 0.165758, 0, 0],
        ],
    ),
    "dr_grpo": (
        {"reduction": "dr_grpo"},
        -0.0554949,
        [
            [0, -0.051171, -0.069073, -0.037908],
            [0, 0.028122, 0.019817, 0],
            [0.050892, 0.062159, 0, 0],
        ],
    ),
    "gspo": (
        {"reduction": "grpo", "kind": "gspo", "clip_low": 3e-2, "clip_high": 4e-2},
        0.1360049,
        [[-0.118904] * 4, [0, 0, 0, 0], [0.224976, 0.224976, 0, 0]],
    ),
    # TRL's epsilon_high of cispo is the largest ratio itself (1.2), and it has no lower bound.
    "cispo": (
        {"reduction": "dapo", "kind": "cispo", "clip_low": 1.0, "clip_high": 0.2},
        0.301938,
        [
            [-0.2, -0.136455, -0.184195, -0.101088],
            [0.03724, 0.066667, 0.052846, 0],
            [0.133333, 0.133333, 0, 0],
        ],
    ),
    # TRL's "delta".
    "dual clip": (
        {"reduction": "grpo", "dual_clip": 1.3},
        0.1234425,
        [[0, -0.102341, -0.138146, -0.075816], [0, 0, 0.052846, 0], [0.203567, 0, 0, 0]],
    ),
    "k3 in the loss": (
        {"reduction": "grpo", "kl_coeff": 0.1},
        0.1625011,
        [
            [0.001511, -0.10644, -0.139023, -0.076693],
            [-0.003887, 0.078655, 0.054394, 0],
            [0.210125, 0.250224, 0, 0],
        ],
    ),
    # TRL's use_bias_correction_kl.
    "k3 times the ratio in the loss": (
        {"reduction": "grpo", "kl_coeff": 0.1, "unbiased_kl": True},
        0.1629445,
        [
            [0.002486, -0.10507, -0.139067, -0.076322],
            [-0.002234, 0.080992, 0.054431, 0],
            [0.213746, 0.251124, 0, 0],
        ],
    ),
    # TRL's vllm_importance_sampling_mode "token_truncate" with clip_max 2.
    "truncated importance sampling": (
        {"reduction": "dapo", "weights": TRUNCATED},
        -0.2797626,
        [
            [0, -0.27291, -0.184195, -0.091469],
            [0, 0.074992, 0.052846, 0],
            [0.135711, 0.183191, 0, 0],
        ],
    ),
}


@pytest.mark.parametrize("name", TRL)
def test_loss_and_gradient_equal_trl(name):
    settings_, expected_loss, expected_grad = TRL[name]
    loss, grad, _ = loss_and_grad(**settings_)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    torch.testing.assert_close(grad, torch.tensor(expected_grad), atol=2e-6, rtol=0)


def test_ppo_hand_worked():
    # Ratios 1.5, 0.5, 1.1 at epsilon 0.2:
    # A = 1:  max(-1.5, -1.2) = -1.2 clipped; max(-0.5, -0.8) = -0.5; max(-1.1, -1.1) = -1.1.
    # A = -1: max(1.5, 1.2) = 1.5; max(0.5, 0.8) = 0.8 clipped; max(1.1, 1.1) = 1.1.
    old = torch.zeros(2, 3)
    new = torch.tensor([[1.5, 0.5, 1.1]] * 2).log()
    policy = policy_loss(new, old, torch.tensor([1.0, -1.0]), torch.ones(2, 3).bool())
    torch.testing.assert_close(
        policy.per_token, torch.tensor([[-1.2, -0.5, -1.1], [1.5, 0.8, 1.1]])
    )
    assert policy.stats["clipped"].tolist() == [[True, False, False], [False, True, False]]
    torch.testing.assert_close(policy.stats["ratio"], torch.tensor([[1.5, 0.5, 1.1]] * 2))


def test_clip_fraction_equals_trl():
    # clip_ratio/region_mean of TRL for grpo at 0.2: 2 of 9 tokens.
    _, _, policy = loss_and_grad("grpo")
    assert policy.stats["clipped"].sum().item() == 2


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_gradient_raises_good_tokens_and_lowers_bad_ones(kind):
    new = OLD.clone().requires_grad_()
    policy_loss(new, OLD, ADVANTAGES, MASK, kind=kind).per_token.sum().backward()
    # A descent step follows -grad: its sign is the advantage's, 0 where masked out.
    expected = ADVANTAGES.sign().unsqueeze(1) * MASK
    assert torch.equal(-new.grad.sign(), expected)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_first_update_invariants(kind):
    policy = policy_loss(NEW, NEW.clone(), ADVANTAGES, MASK, kind=kind)
    assert (policy.stats["ratio"] == 1.0).all()
    assert not policy.stats["clipped"].any()


def test_on_policy_gradient_is_reinforce_whatever_the_kind():
    grads = []
    for kind in ("ppo", "cispo", "gspo"):
        new = OLD.clone().requires_grad_()
        policy = policy_loss(new, OLD, ADVANTAGES, MASK, kind=kind)
        policy.per_token.sum().backward()
        grads.append(new.grad)
    reinforce = -ADVANTAGES.unsqueeze(1) * MASK
    for grad in grads:
        torch.testing.assert_close(grad, reinforce)


def test_sequence_ratio_hand_worked():
    # Row 0: mean of (0.4, -0.2, 0.1, -0.5) is -0.05; row 2: mean of (0.2, 0.4) is 0.3.
    ratio = importance_ratio(NEW, OLD, MASK, "sequence")
    torch.testing.assert_close(ratio[0], torch.full((4,), math.exp(-0.05)))
    torch.testing.assert_close(ratio[2], torch.tensor([math.exp(0.3), math.exp(0.3), 1.0, 1.0]))


def test_sequence_ratio_has_the_gradient_of_the_sequence_likelihood():
    # d/d logp_t of mean_t(ratio_t) must be that of exp(mean_t (logp_t - old_t)): s / length.
    new = NEW.clone().requires_grad_()
    lengths = MASK.sum(dim=1)
    ratio = importance_ratio(new, OLD, MASK, "sequence")
    ((ratio * MASK).sum(dim=1) / lengths).sum().backward()
    expected = ratio.detach() / lengths.unsqueeze(1) * MASK
    torch.testing.assert_close(new.grad, expected)


def test_product_ratio_has_the_value_and_gradient_of_the_likelihood_ratio():
    # Row 0: 0.4 - 0.2 + 0.1 - 0.5 = -0.2; row 2: 0.2 + 0.4. d/d logp_t of the row's mean over
    # tokens must be that of exp(sum_t (logp_t - old_t)): the ratio itself.
    new = NEW.clone().requires_grad_()
    ratio = importance_ratio(new, OLD, MASK, "product")
    torch.testing.assert_close(ratio[0], torch.full((4,), math.exp(-0.2)))
    torch.testing.assert_close(ratio[2], torch.tensor([math.exp(0.6), math.exp(0.6), 1.0, 1.0]))
    ((ratio * MASK).sum(dim=1) / MASK.sum(dim=1)).sum().backward()
    torch.testing.assert_close(new.grad, ratio.detach() * MASK)


@pytest.mark.parametrize("length", [2, 500])
def test_the_product_ratio_of_a_far_policy_is_finite_and_so_is_its_gradient(length):
    # The log-ratio of the whole completion is 100: exp() would be infinite, and inf * 0 NaN where
    # the clipped side is taken. The ratio is held to e^20; A = -1 takes it, A = 1 the clipped side.
    old = torch.zeros(2, length, dtype=torch.float32) - 1.0
    new = (old + 100.0 / length).requires_grad_()
    mask = torch.ones(2, length, dtype=torch.bool)
    policy = policy_loss(new, old, torch.tensor([-1.0, 1.0]), mask, kind="rloo")
    per_row = policy.per_token.mean(dim=1)
    assert per_row.tolist() == pytest.approx([math.exp(20.0), -1.2], rel=1e-5)
    per_row.sum().backward()
    far = torch.full((length,), math.exp(20.0))
    torch.testing.assert_close(new.grad, torch.stack([far, torch.zeros(length)]))


@pytest.mark.parametrize(
    "clip, expected, second_row", [(0.2, 0.3414589, 0.1434514), (0.1, 0.3480076, 0.0)]
)
def test_rloo_equals_trl(clip, expected, second_row):
    # RLOOTrainer._compute_loss of TRL 1.16.0. The ratios of the rows are e^-0.2 = 0.819,
    # e^-0.15 = 0.861 and e^0.6 = 1.822; at 0.1 the second, whose advantage is negative, is clipped.
    new = NEW.clone().requires_grad_()
    policy = policy_loss(new, OLD, ADVANTAGES, MASK, kind="rloo", clip_low=clip, clip_high=clip)
    loss = reduce_loss(policy.per_token, MASK, "sequence_mean", LossDenominators.count(MASK))
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    rows = torch.tensor([[-0.4093654], [second_row], [0.6073731]])
    torch.testing.assert_close(new.grad, rows * MASK, atol=2e-6, rtol=0)
    # Its closed form in the row sums: -min(s A, clip(s) A), mean over rows.
    s = ((NEW - OLD) * MASK).sum(dim=1).exp()
    closed = -torch.minimum(s * ADVANTAGES, s.clamp(1 - clip, 1 + clip) * ADVANTAGES).mean()
    torch.testing.assert_close(loss.detach(), closed)


def test_masked_out_rubbish_changes_nothing():
    rubbish = torch.where(MASK, torch.zeros(()), torch.tensor(math.nan))
    new = (NEW + rubbish).requires_grad_()
    for kind in POLICY_LOSSES:
        clean = policy_loss(NEW, OLD, ADVANTAGES, MASK, kind=kind)
        dirty = policy_loss(new, OLD + rubbish, ADVANTAGES.unsqueeze(1) + rubbish, MASK, kind=kind)
        torch.testing.assert_close(dirty.per_token, clean.per_token)
        (grad,) = torch.autograd.grad(dirty.per_token.sum(), new)
        assert (grad[~MASK] == 0).all()
        assert (dirty.stats["ratio"][~MASK] == 1).all()


# --- value loss ----------------------------------------------------------------------------------


def test_value_loss_hand_worked():
    # V_old = 0, clip 0.2. V = 1, R = 2: V error 1, clipped V = 0.2 has error 1.8^2 = 3.24: 1.62.
    # V = 1, R = 0.5: V error 0.25, clipped error 0.09: 0.125. V = 0.1, R = 1: 0.81 both: 0.405.
    values = torch.tensor([[1.0, 1.0, 0.1, 5.0]], requires_grad=True)
    returns = torch.tensor([[2.0, 0.5, 1.0, 9.0]])
    mask = torch.tensor([[True, True, True, False]])
    per_token, clipped = value_loss(values, torch.zeros(1, 4), returns, mask, clip=0.2)
    torch.testing.assert_close(per_token.detach(), torch.tensor([[1.62, 0.125, 0.405, 0.0]]))
    assert clipped.tolist() == [[True, False, False, False]]
    # Where clipping decided there is no gradient; elsewhere it is V - R.
    per_token.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, 0.5, -0.9, 0.0]]))


def test_value_loss_without_clip_is_half_the_squared_error():
    per_token, clipped = value_loss(
        torch.tensor([[3.0]]),
        torch.zeros(1, 1),
        torch.tensor([[1.0]]),
        torch.ones(1, 1).bool(),
        clip=None,
    )
    assert per_token.item() == 2.0
    assert not clipped.any()


# --- importance weights, cross-entropy, preferences ----------------------------------------------


def test_cross_entropy_counts_targets_only():
    per_token = cross_entropy_tokens(
        torch.tensor([[-0.5, -2.0, -9.0]]), torch.tensor([[True, True, False]])
    )
    assert per_token.tolist() == [[0.5, 2.0, 0.0]]


def test_preference_loss_equals_trl():
    # RewardTrainer's expression in TRL 1.16.0.
    chosen, rejected = torch.tensor([1.0, -0.5, 2.0]), torch.tensor([0.2, 0.4, -1.0])
    per_pair, correct = preference_loss(chosen, rejected)
    torch.testing.assert_close(per_pair, torch.tensor([0.37110066, 1.24115384, 0.04858735]))
    assert correct.tolist() == [True, False, True]


def test_preference_loss_of_equal_scores_is_log_two_and_not_correct():
    per_pair, correct = preference_loss(torch.zeros(1), torch.zeros(1))
    assert per_pair.item() == pytest.approx(math.log(2))
    assert not correct.any()


# --- reductions ----------------------------------------------------------------------------------


def test_reductions_hand_worked():
    # Rows (1, 2, 3) and (10): token mean 16/4; row means 2 and 10, mean 6; dr_grpo 16/(2*5);
    # sequence sum 16/2.
    per_token = torch.tensor([[1.0, 2.0, 3.0], [10.0, 77.0, 77.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    denominators = LossDenominators.count(mask, max_completion_len=5)
    expected = {
        "dapo": 4.0,
        "token_mean": 4.0,
        "grpo": 6.0,
        "sequence_mean": 6.0,
        "dr_grpo": 1.6,
        "sequence_sum": 8.0,
    }
    values = {name: reduce_loss(per_token, mask, name, denominators).item() for name in REDUCTIONS}
    assert values == pytest.approx(expected)


def test_rows_without_tokens_are_no_sequences():
    mask = torch.tensor([[True, True], [False, False]])
    denominators = LossDenominators.count(mask)
    assert (int(denominators.num_tokens), int(denominators.num_sequences)) == (2, 1)
    assert reduce_loss(torch.ones(2, 2), mask, "grpo", denominators).item() == 1.0


def test_an_empty_share_is_zero_not_nan():
    mask = torch.zeros(2, 3).bool()
    for name in REDUCTIONS:
        assert reduce_loss(torch.ones(2, 3), mask, name, LossDenominators.count(mask)).item() == 0.0


@st.composite
def cut_batches(draw):
    """A seed, row lengths, the cuts of the rows and the extra padding of each part."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any))
    inner = list(range(1, len(lengths)))
    cuts = sorted(draw(st.sets(st.sampled_from(inner)))) if inner else []
    padding = [draw(st.integers(0, 3)) for _ in range(len(cuts) + 1)]
    order = draw(st.permutations(range(len(lengths))))
    return draw(st.integers(0, 2**16)), lengths, cuts, padding, order


@crossed(reduction=["grpo", "dapo", "dr_grpo", "sequence_sum"], kind=[*POLICY_LOSSES])
@settings(max_examples=25, deadline=None)
@given(batch=cut_batches())
def test_loss_and_gradient_do_not_depend_on_the_split(kind, reduction, batch):
    """Whole = any order of rows, cut anywhere, each part padded differently."""
    seed, lengths, cuts, padding, order = batch
    generator = torch.Generator().manual_seed(seed)
    num_rows, longest = len(lengths), max(lengths)
    new, old, ref = (-torch.rand(num_rows, longest, generator=generator) for _ in range(3))
    advantages = torch.randn(num_rows, generator=generator)
    mask = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)
    denominators = LossDenominators.count(mask, max_completion_len=7)

    def loss_of(new_, rows, extra):
        def pad(x):
            return torch.nn.functional.pad(x[rows], (0, extra))

        policy = policy_loss(pad(new_), pad(old), advantages[rows], pad(mask), kind=kind)
        kl = kl_estimate(pad(new_), pad(ref), "k3")
        return reduce_loss(policy.per_token + 0.1 * kl, pad(mask), reduction, denominators)

    whole_new = new.clone().requires_grad_()
    whole = loss_of(whole_new, torch.arange(num_rows), 0)
    whole.backward()

    split_new = new.clone().requires_grad_()
    parts = torch.tensor(order).tensor_split(cuts)
    split = torch.zeros(())
    for rows, extra in zip(parts, padding, strict=True):
        share = loss_of(split_new, rows, extra)
        share.backward()
        split = split + share.detach()
    torch.testing.assert_close(split, whole.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(split_new.grad, whole_new.grad, atol=1e-6, rtol=1e-5)


# --- errors --------------------------------------------------------------------------------------


def test_unknown_losses_and_reductions_are_refused():
    with pytest.raises(ValueError, match="kind='trpo' must be one of ppo, gspo, rloo, cispo"):
        policy_loss(NEW, OLD, ADVANTAGES, MASK, kind="trpo")
    with pytest.raises(ValueError, match="reduction='mean' must be one of"):
        reduce_loss(NEW, MASK, "mean", LossDenominators.count(MASK))
