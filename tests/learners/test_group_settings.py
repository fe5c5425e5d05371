"""Truncated rows, several rewards, turns, entropy control and a reference that follows: what the
settings make of a batch, beside formulas written out here."""

from __future__ import annotations

import copy

import pytest
import torch

from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs
from tests.algorithms.tiny_runs import grpo, ppo, rloo
from tests.learners import tiny_learners as tiny

SCORES = [1.0, 2.0, 6.0, 0.0, 0.0, 3.0]


def plain_grpo(**training):
    return grpo(ref_kl_coeff=0.0, num_epochs=1, minibatch_size=None, **training)


def judged(learner, lengths=(3, 5, 1, 4, 2, 5), **changed):
    batch = tiny.judged(learner, lengths)
    batch[columns.SCORES] = torch.tensor(SCORES)
    return {**batch, **changed}


# --- mask_truncated -----------------------------------------------------------------------------


def test_truncated_rows_leave_the_loss_and_stay_in_the_baseline():
    learner = tiny.build(plain_grpo(mask_truncated=True))
    whole = tiny.build(plain_grpo())
    batch = judged(learner)
    finished = batch[columns.FINISHED]  # every other row
    made, usual = learner.prepare(dict(batch)), whole.prepare(dict(batch))
    # As TRL's: the completion mask times ~is_truncated, advantages of all rows.
    expected = batch[columns.COMPLETION_MASK] & finished.unsqueeze(1)
    assert torch.equal(made[columns.LOSS_MASK], expected)
    assert torch.equal(made[columns.ADVANTAGES], usual[columns.ADVANTAGES])
    assert learner.report()["means"]["train/masked_truncated"] == pytest.approx(0.5)


@pytest.mark.parametrize("reduction", [
    "token_mean", pytest.param("sequence_mean", marks=pytest.mark.slow),
    pytest.param("dr_grpo", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_gradient_is_that_of_a_batch_without_them_but_with_their_scores(reduction):
    learner = tiny.build(plain_grpo(mask_truncated=True, loss_reduction=reduction))
    batch = judged(learner)
    kept = batch[columns.FINISHED].nonzero().squeeze(1)
    advantages = learner.prepare(dict(batch))[columns.ADVANTAGES][kept]
    tiny.update(learner, batch)

    other = tiny.build(plain_grpo(loss_reduction=reduction))
    other.compute_advantages = lambda batch, scores, kl: {columns.ADVANTAGES: advantages}
    tiny.update(other, tiny.take(batch, kept))
    for name, gradient in tiny.first_gradients(learner).items():
        torch.testing.assert_close(gradient, tiny.first_gradients(other)[name], rtol=1e-4,
                                   atol=1e-7)  # fmt: skip


def test_a_batch_of_truncated_rows_alone_changes_nothing():
    learner = tiny.build(plain_grpo(mask_truncated=True))
    before = tiny.parameters(learner)
    batch = judged(learner, **{columns.FINISHED: torch.zeros(6, dtype=torch.bool)})
    found = tiny.update(learner, batch)
    assert found["train/masked_truncated"] == 1 and found["grad_norm"] == 0
    tiny_runs.assert_same_weights(before, tiny.parameters(learner))


# --- several rewards ----------------------------------------------------------------------------


def parts(*given, weights=(1.0, 0.5)):
    found = {}
    for i, (part, weight) in enumerate(zip(given, weights, strict=True)):
        found[f"{columns.REWARD_PART}{i}"] = torch.tensor(part)
        found[f"{columns.REWARD_WEIGHT}{i}"] = torch.full((6,), weight)
    return found


def test_gdpo_normalises_each_reward_and_their_sum():
    learner = tiny.build(plain_grpo(reward_aggregation="normalize_then_sum"))
    one, two = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0], [5.0, 9.0, 1.0, 2.0, 2.0, 2.0]
    found = learner.prepare(judged(learner, **parts(one, two)))[columns.ADVANTAGES][:, 0]
    total = torch.zeros(6, dtype=torch.float64)
    for part, weight in ((one, 1.0), (two, 0.5)):
        groups = torch.tensor(part, dtype=torch.float64).view(2, 3)
        centred = groups - groups.mean(1, keepdim=True)
        total += weight * (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    expected = (total - total.mean()) / (total.std() + 1e-4)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_gdpo_wants_several_rewards():
    learner = tiny.build(plain_grpo(reward_aggregation="normalize_then_sum"))
    with pytest.raises(Problems) as error:
        learner.prepare(judged(learner))
    assert error.value.found[0].name == "reward_aggregation"


def test_gdpo_in_a_run_of_two_rewards(ray_session):
    config = plain_grpo(reward_aggregation="normalize_then_sum")
    functions = [f"{tiny_runs.HERE}.num_digits", {"function": lengths_of, "weight": 0.1}]
    config.environment(env_config={**config.env_config, "reward_functions": functions})
    with tiny_runs.built(config) as algorithm:
        result = algorithm.train()
    assert {"num_digits_rewards", "lengths_of_rewards"} <= result["train"].keys()


def lengths_of(completions):
    return [float(len(text)) for text in completions]


# --- turns --------------------------------------------------------------------------------------


def turns_of(learner):
    """Six rows of two groups, each of two turns with a token of the environment's between."""
    batch = judged(learner, (4, 4, 4, 4, 4, 4))
    mask = batch[columns.COMPLETION_MASK].clone()
    mask[:, 2] = False
    for name in (columns.PROMPT_IDS, columns.PROMPT_MASK):  # a group's rows have one prompt
        batch[name] = batch[name][::3].repeat_interleave(3, 0)
    ids = batch[columns.COMPLETION_IDS]
    ids[:, 2] = torch.tensor([3, 3, 4, 5, 5, 5])  # the third row's world says something else
    rewards = torch.zeros(6, 4)
    rewards[:, 1] = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 1.0])  # at the end of the first turn
    return {
        **batch, columns.LOSS_MASK: mask, columns.REWARDS: rewards,
        columns.WEIGHTS_VERSION: torch.zeros(6, 4, dtype=torch.int32).where(mask, -1),
    }  # fmt: skip


def centred(values):
    return values - values.mean()


@pytest.mark.parametrize("peers", ["turn", "state"])
def test_turn_advantages_compare_returns_among_peers(peers):
    settings = {"scale_by_std": False, "gamma": 0.5, "turn_advantage_coeff": 2.0}
    learner = tiny.build(plain_grpo(turn_advantages=peers, **settings))
    batch = turns_of(learner)
    found = learner.prepare(dict(batch))[columns.ADVANTAGES]
    scores, first = torch.tensor(SCORES), batch[columns.REWARDS][:, 1]
    last = scores - first  # what is earned at the end
    returns = first + 0.5 * last  # GiGPO, eq. 7
    for group in (slice(0, 3), slice(3, 6)):
        whole = centred(scores[group])
        one = whole + 2 * centred(returns[group])
        two = centred(last[group])
        if peers == "state" and group.start == 0:  # the third row is alone in its state
            two = torch.cat([centred(last[:2]), torch.zeros(1)])
        two = whole + 2 * two
        torch.testing.assert_close(found[group, 0], one)
        torch.testing.assert_close(found[group, 1], one)
        torch.testing.assert_close(found[group, 3], two)
        assert not found[group, 2].any()


def test_without_rewards_of_turns_all_turns_of_rloo_have_the_advantage_twice():
    # Every turn's return is the score, and its peers are the group: A + 1 A.
    learner = tiny.build(rloo(ref_kl_coeff=0.0, turn_advantages="turn"))
    batch = turns_of(learner)
    del batch[columns.REWARDS]
    other = tiny.build(rloo(ref_kl_coeff=0.0))
    found, usual = (each.prepare(dict(batch))[columns.ADVANTAGES] for each in (learner, other))
    torch.testing.assert_close(found, 2 * usual)


# --- entropy ------------------------------------------------------------------------------------


def test_top_entropy_share_keeps_the_policy_loss_of_uncertain_tokens():
    learner = tiny.build(plain_grpo(top_entropy_share=0.3))
    usual = tiny.build(plain_grpo())
    batch = judged(learner)
    with torch.no_grad():
        entropy = tiny.module_of(learner).forward_train(batch)[columns.ENTROPY]
    mask = batch[columns.COMPLETION_MASK]
    kept = mask & (entropy >= torch.quantile(entropy[mask], 0.7))
    found = learner.prepare(dict(batch))
    expected = usual.prepare(dict(batch))[columns.ADVANTAGES].where(kept, 0.0)
    assert torch.equal(found[columns.ADVANTAGES], expected)
    assert torch.equal(found[columns.LOSS_MASK], mask)  # denominators are those of all tokens


def test_the_entropy_coefficient_is_steered_to_its_target_and_resumes():
    config = plain_grpo(entropy_coeff=0.01, entropy_target=50.0, entropy_coeff_delta=0.004)
    learner = tiny.build(config)
    batch = judged(learner)
    found = tiny.update(learner, batch)
    assert found["effective/entropy_coeff"] == pytest.approx(0.014)
    assert tiny.update(learner, batch)["effective/entropy_coeff"] == pytest.approx(0.018)
    again = tiny.build(config)
    again.set_state(learner.get_state())
    assert tiny.update(again, batch)["effective/entropy_coeff"] == pytest.approx(0.022)
    above = tiny.build(plain_grpo(entropy_coeff=0.01, entropy_target=0.01))
    assert "effective/entropy_coeff" not in tiny.update(above, batch)


# --- reference_update ---------------------------------------------------------------------------


@pytest.mark.parametrize("mix", [pytest.param(1.0, marks=pytest.mark.slow), 0.25])
def test_the_reference_follows_every_so_many_steps(mix):
    config = grpo(
        num_epochs=1, minibatch_size=2, reference_in="learner", reference_update_every=2,
        reference_update_mix=mix, lr=1e-2,
    )  # fmt: skip
    learner = tiny.build(config)
    batch = judged(learner)
    del batch[columns.REF_LOGPROBS]
    policy = tiny.module_of(learner).model
    expected = {name: p.detach().clone() for name, p in policy.named_parameters()}
    seen = []
    step = learner.after_step

    def after_step():
        seen.append({name: p.detach().clone() for name, p in policy.named_parameters()})
        step()

    learner.after_step = after_step
    for _ in range(2):  # three steps each
        tiny.update(learner, batch)
    for number, weights in enumerate(seen, start=1):
        if number % 2 == 0:
            for name in expected:
                expected[name] = mix * weights[name] + (1 - mix) * expected[name]
    found = dict(learner.reference.model.named_parameters())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)
    again = tiny.build(config)
    again.set_state(copy.deepcopy(learner.get_state()))
    other = dict(again.reference.model.named_parameters())
    assert all(torch.equal(other[name], found[name]) for name in found)


@pytest.mark.parametrize(
    "make, settings, name",
    [
        (grpo, {"reference_update_every": 5}, "reference_update_every"),
        (grpo, {"entropy_target": 0.3, "entropy_coeff": 2.0}, "entropy_coeff"),
        (grpo, {"reward_aggregation": "normalize_then_sum", "turn_advantages": "turn"},
         "turn_advantages"),
        (grpo, {"reward_aggregation": "normalize_then_sum", "ref_kl_in": "reward"}, "ref_kl_in"),
        (ppo, {"top_entropy_share": 0.0}, "top_entropy_share"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(make, settings, name):
    assert [p.name for p in make(**settings).problems() if p.severity == "error"] == [name]
