"""Scores to token rewards to loss, and the metrics on the way, against numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.algorithms.reinforce_pp import ReinforcePPConfig
from rllib_llm.shared import columns
from tests.algorithms.tiny_runs import MODEL, TEXTS, assert_same_weights, grpo, ppo, rloo
from tests.learners import tiny_learners as tiny


def reinforce(**training):
    settings = {"train_batch_size_per_learner": 3, "ref_kl_coeff": 0.1, **training}
    return ReinforcePPConfig().language_model(model=MODEL).training(**settings)


def scripted():
    """Three completions of 2, 3 and 1 tokens; the third was not judged. Padding holds garbage."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
    return {
        columns.PROMPT_IDS: torch.tensor([[4], [5], [6]]),
        columns.PROMPT_MASK: torch.ones(3, 1, dtype=torch.bool),
        columns.COMPLETION_IDS: torch.tensor([[4, 5, 0], [6, 7, 8], [9, 0, 0]]),
        columns.COMPLETION_MASK: mask,
        columns.SAMPLER_LOGPROBS: torch.tensor(
            [[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0], [-3.0, 9.0, 9.0]]
        ),
        columns.REF_LOGPROBS: torch.tensor(
            [[-1.5, -1.0, 5.0], [-2.0, -1.5, -1.0], [-7.0, 2.0, 2.0]]
        ),
        columns.SCORES: torch.tensor([2.0, 4.0, 100.0]),
        columns.VALID: torch.tensor([True, True, False]),
        columns.FINISHED: torch.tensor([True, False, True]),
    }


def prepared_means(config, batch):
    learner = tiny.build(config)
    learner.prepare(batch)
    return learner, learner.means.pop()


def test_objective_metrics_by_hand():
    _, means = prepared_means(reinforce(), scripted())
    # KL of row 0: 0.5 - 1.0 = -0.5; of row 1: 1.0 + 0.5 + 0.0 = 1.5. Mean 0.5; row 2 is invalid.
    # Minus the sum of the log-probs: 3 and 3. beta = 0.1.
    assert means == pytest.approx({
        "objective/kl": 0.5,
        "objective/entropy": 3.0,
        "objective/non_score_reward": -0.05,
        "objective/scores": 3.0,
        "objective/rlhf_reward": 2.95,
        "objective/ref_kl_coeff": 0.1,
        "val/finished": 0.5,
        "val/num_eos_tokens": 1.0,
        "train/output_length": 2.5,
        "train/num_invalid": 1.0,
    })  # fmt: skip


def test_a_kl_in_the_loss_is_no_part_of_the_reward():
    _, means = prepared_means(reinforce(ref_kl_in="loss", ref_kl_estimator="k3"), scripted())
    assert means["objective/kl"] == pytest.approx(0.5)  # reported all the same
    assert means["objective/non_score_reward"] == 0
    assert means["objective/rlhf_reward"] == pytest.approx(3.0)


def test_scores_are_penalised_then_clipped_then_scaled():
    batch = scripted()
    batch[columns.SCORES] = torch.tensor([5.0, -1.0, 0.5])
    batch[columns.VALID] = torch.ones(3, dtype=torch.bool)
    settings = {"ref_kl_coeff": 0.0, "missing_eos_penalty": 1.0, "length_penalty": 0.1,
                "score_clip": 2.0}  # fmt: skip
    # EOS missing in row 1: 5, -2, 0.5. Lengths 2, 3, 1: 4.8, -2.3, 0.4. Clipped: 2, -2, 0.4.
    _, means = prepared_means(reinforce(**settings), batch)
    assert means["objective/rlhf_reward"] == pytest.approx(0.4 / 3)
    assert means["objective/scores"] == pytest.approx(4.5 / 3)
    # Their deviation with ddof 1: sqrt((1.8667^2 + 2.1333^2 + 0.2667^2) / 2) = 2.01329.
    learner, means = prepared_means(reinforce(**settings, scale_scores=True), batch)
    assert means["objective/rlhf_reward"] == pytest.approx(0.4 / 3 / 2.01329, rel=1e-5)
    assert learner.score_scales[0].count == 3


def test_tokens_that_are_masked_as_stale_count_for_length_penalties():
    """The policy wrote three tokens, of which one is learnt from; not one that a tool inserted."""
    for version, expected in ((0, -0.3), (-1, -0.1)):
        batch = scripted()
        batch[columns.SCORES] = torch.zeros(3)
        batch[columns.VALID] = torch.tensor([False, True, False])
        mask = batch[columns.COMPLETION_MASK].clone()
        mask[1, :2] = False
        batch[columns.LOSS_MASK] = mask
        batch[columns.WEIGHTS_VERSION] = torch.full((3, 3), version).where(~mask, 1)
        _, means = prepared_means(reinforce(ref_kl_coeff=0.0, length_penalty=0.1), batch)
        assert means["objective/rlhf_reward"] == pytest.approx(expected)


def test_the_adaptive_coefficient_moves_towards_its_target():
    config = reinforce(ref_kl_target=1.0, ref_kl_horizon=100.0)
    learner, means = prepared_means(config, scripted())
    # KL 0.5 is half its target: the error is clipped at -0.2; 2 valid samples of a horizon of 100.
    assert means["objective/ref_kl_coeff"] == pytest.approx(0.1)
    assert learner.ref_kl.value == pytest.approx(0.1 * (1 - 0.2 * 2 / 100))


def test_the_adaptive_coefficient_and_the_score_scale_are_part_of_the_state():
    config = reinforce(ref_kl_target=1.0, ref_kl_horizon=100.0, scale_scores=True)
    learner, _ = prepared_means(config, scripted())
    restored = tiny.build(config)
    restored.set_state(learner.get_state())
    assert restored.ref_kl.value == learner.ref_kl.value != 0.1
    assert restored.score_scales[0].state_dict() == learner.score_scales[0].state_dict()
    assert restored.score_scales[0].count == 2
    # A coefficient that was set anew wins over the checkpoint's.
    explored = tiny.build(reinforce(ref_kl_coeff=0.3, ref_kl_target=1.0, ref_kl_horizon=100.0))
    explored.set_state(learner.get_state())
    assert explored.ref_kl.value == 0.3


def test_a_penalty_on_a_reference_that_is_not_there_is_refused():
    batch = scripted()
    del batch[columns.REF_LOGPROBS]
    with pytest.raises(ValueError, match=r"ref_kl_coeff=0.1 must be 0 without a reference"):
        tiny.build(reinforce()).prepare(batch)
    _, means = prepared_means(reinforce(ref_kl_coeff=0.0), batch)
    assert "objective/kl" not in means  # a 0 would look measured


ALSO = pytest.mark.slow  # the rule of a loss that another case has too


@pytest.mark.parametrize(
    "config, settings",
    [
        pytest.param(ppo, {}, marks=ALSO),
        (ppo, {"critic": "separate", "ptx_data": TEXTS, "ptx_coeff": 0.5}),
        pytest.param(reinforce, {}, marks=ALSO),
        pytest.param(rloo, {}, marks=ALSO),
        (rloo, {"policy_loss": "rloo", "loss_reduction": "sequence_mean"}),
        (grpo, {}),
        pytest.param(grpo, {"loss_reduction": "dr_grpo", "scale_by_std": False}, marks=ALSO),
        (grpo, {"loss_reduction": "token_mean", "clip_param_high": 0.28, "ref_kl_coeff": 0.0,
                "overlong_buffer": 2, "drop_zero_variance_groups": True}),
        (grpo, {"policy_loss": "gspo", "clip_param": 3e-4, "clip_param_high": 4e-4}),
        (grpo, {"policy_loss": "cispo", "clip_param": 1.0, "clip_param_high": 4.0}),
        pytest.param(grpo, {"dual_clip": 3.0}, marks=ALSO),
        (grpo, {"off_policy": "decoupled"}),
        pytest.param(grpo, {"off_policy": "decoupled_loglinear"}, marks=ALSO),
        (grpo, {"off_policy": "bypass"}),
        (grpo, {"lora": {"r": 4}}),
    ],
    ids=["ppo", "ppo-ptx", "reinforce++", "rloo", "rloo-completions", "grpo", "dr_grpo", "dapo",
         "gspo", "cispo", "dual clip", "recomputed", "loglinear", "bypass",
         "lora"],
)  # fmt: skip
def test_the_first_mini_batch_is_exactly_on_policy(config, settings):
    lora = settings.get("lora")
    settings = {name: value for name, value in settings.items() if name != "lora"}
    config = config(minibatch_size=None, num_epochs=1, micro_batch_size=1, **settings)
    config.language_model(lora=lora)
    learner = tiny.build(config)
    batch = tiny.judged(learner)
    # Each row alone, here as in the update, whose order is drawn: on some processors a matrix
    # product of more rows rounds otherwise.
    sampled = learner.evaluate_rows(batch, [columns.LOGPROBS])
    batch[columns.SAMPLER_LOGPROBS] = sampled[columns.LOGPROBS]
    metrics = tiny.update(learner, batch)
    assert metrics["val/ratio"] == metrics["val/ratio_square"] == 1.0
    assert metrics["policy/approxkl_avg"] == metrics["policy/clipfrac_avg"] == 0.0
    assert metrics["sampler/logprob_gap"] == 0.0


@pytest.mark.parametrize("off_policy", [None, "decoupled"])
def test_the_gap_to_the_sampler_is_measured_whoever_gives_the_old_log_probs(off_policy):
    """A sampler 0.25 nats off at every other token: the gap is that of the first mini-batch, not
    what later steps add."""
    config = grpo(minibatch_size=None, num_epochs=3, lr=0.05, micro_batch_size=2,
                  off_policy=off_policy, off_policy_weights=None)  # fmt: skip
    learner = tiny.build(config)
    batch = tiny.judged(learner)
    mask = batch[columns.COMPLETION_MASK]
    off = 0.25 * (torch.arange(mask.shape[1]) % 2)
    batch[columns.SAMPLER_LOGPROBS] = (batch[columns.SAMPLER_LOGPROBS] + off) * mask
    metrics = tiny.update(learner, batch)
    # Lengths 3, 5, 1, 4, 2, 5 have 1, 2, 0, 2, 1, 2 odd places among 20 tokens.
    assert metrics["sampler/logprob_gap"] == pytest.approx(0.25 * 8 / 20, rel=1e-5)
    assert metrics["policy/approxkl_avg"] > 1e-3


@pytest.mark.parametrize("level, mode, weights", [
    ("token", "truncate", [2.0, 0.5, 1.0]),
    ("token", "mask", [0.0, 0.5, 1.0]),
    # Log weights 1.8, -0.69 and 0 add up to 1.11: e^1.11 = 3.0 is above the cap.
    ("sequence", "truncate", [2.0, 2.0, 2.0]),
    ("sequence", "mask", [0.0, 0.0, 0.0]),
])  # fmt: skip
def test_importance_weights_of_tokens_and_completions(level, mode, weights):
    config = grpo(off_policy="decoupled", off_policy_weights=mode, off_policy_level=level)
    batch = {
        columns.OLD_LOGPROBS: torch.tensor([[-1.0, -3.0, -2.0, 9.0]]),
        columns.SAMPLER_LOGPROBS: torch.tensor([[-2.8, -3.0 + 0.6931472, -2.0, 0.0]]),
        columns.COMPLETION_MASK: torch.tensor([[True, True, True, False]]),
    }
    logprobs, mask = torch.zeros(1, 4), batch[columns.COMPLETION_MASK]
    _, found = tiny.build(config).correction.apply(batch, logprobs, mask)
    assert found[0, :3].tolist() == pytest.approx(weights)


def test_a_batch_that_is_not_finite_leaves_running_numbers_finite(tmp_path):
    config = ppo(minibatch_size=None, num_epochs=1, scale_scores=True, ref_kl_target=1.0,
                 ref_kl_coeff=0.1, refused_batch_dir=str(tmp_path))  # fmt: skip
    learner = tiny.build(config)
    good = tiny.judged(learner)
    bad = {name: column.clone() for name, column in good.items()}
    bad[columns.SCORES][1] = torch.inf
    bad[columns.REF_LOGPROBS][2, 0] = torch.nan
    metrics = tiny.update(learner, bad)
    assert metrics["num_refused_updates"] == 1 and learner.num_updates == 0
    assert learner.ref_kl.value == 0.1
    # Scores 0, 2, 3, 4, 5 were taken in: mean 2.8.
    assert learner.score_scales[0].count == 5 and learner.score_scales[0].mean == pytest.approx(2.8)
    tiny.update(learner, good)
    assert learner.num_updates == 1


def test_token_metrics_weigh_every_token_alike():
    learner = tiny.build(ppo(minibatch_size=None, num_epochs=1, micro_batch_size=4))
    batch = tiny.judged(learner)
    mask = batch[columns.COMPLETION_MASK]
    with torch.no_grad():
        entropy = tiny.module_of(learner).forward_train(batch)[columns.ENTROPY]
    metrics = tiny.update(learner, batch)
    assert metrics["policy/entropy_avg"] == pytest.approx(float(entropy[mask].mean()), rel=1e-5)
    # Not the mean of the rows' means, nor of the micro-batches' means.
    rows = (entropy * mask).sum(1) / mask.sum(1)
    assert metrics["policy/entropy_avg"] != pytest.approx(float(rows.mean()), rel=1e-5)


def test_padding_changes_nothing():
    config = ppo(minibatch_size=None, num_epochs=1)
    learner, padded_learner = tiny.build(config), tiny.build(config)
    batch = tiny.judged(learner)
    padded = dict(batch)
    for name in (columns.COMPLETION_IDS, columns.COMPLETION_MASK, columns.SAMPLER_LOGPROBS,
                 columns.REF_LOGPROBS):  # fmt: skip
        padded[name] = torch.nn.functional.pad(batch[name], (0, 3))
    for name in (columns.PROMPT_IDS, columns.PROMPT_MASK):
        padded[name] = torch.nn.functional.pad(batch[name], (2, 0))
    metrics, padded_metrics = tiny.update(learner, batch), tiny.update(padded_learner, padded)
    assert padded_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7, nan_ok=True)
    assert_same_weights(tiny.first_gradients(learner), tiny.first_gradients(padded_learner),
                        rtol=1e-4, atol=1e-7)  # fmt: skip


def test_rows_without_a_judgement_teach_nothing():
    config = ppo(minibatch_size=None, num_epochs=1)
    learner, other = tiny.build(config), tiny.build(config)
    batch = tiny.judged(learner)
    batch[columns.VALID] = torch.tensor([True, False, True, True, False, True])
    batch[columns.SCORES][1] = 1e6
    tiny.update(learner, batch)
    tiny.update(other, tiny.take(batch, batch[columns.VALID]))
    assert_same_weights(tiny.first_gradients(learner), tiny.first_gradients(other), rtol=1e-4,
                        atol=1e-6)  # fmt: skip


def test_a_better_completion_becomes_likelier():
    learner = tiny.build(ppo(minibatch_size=None, num_epochs=1, ref_kl_coeff=0.0, lr=1e-4))
    batch = tiny.judged(learner)
    batch[columns.SCORES] = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0, 0.0])

    def gap():
        with torch.no_grad():
            rows = tiny.module_of(learner).forward_train(batch)[columns.LOGPROBS].sum(1)
        return float(rows[0] - rows[1])

    before = gap()
    tiny.update(learner, batch)
    assert gap() > before


def test_epochs_stop_when_the_policy_has_moved_too_far():
    def steps(target_kl):
        learner = tiny.build(ppo(minibatch_size=None, num_epochs=4, lr=0.05, target_kl=target_kl))
        tiny.update(learner, tiny.judged(learner))
        return learner.num_updates

    # Nothing has moved before the first step; after it approxkl is far above 1.5e-6.
    assert steps(1e-6) == 2
    assert steps(None) == 4


def test_groups_of_equal_scores_are_found_where_the_kl_is_part_of_the_score():
    learner = tiny.build(rloo(drop_zero_variance_groups=True, ref_kl_coeff=0.1))
    batch = tiny.judged(learner)
    batch[columns.SCORES] = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 2.0])
    reference = batch[columns.REF_LOGPROBS].clone()
    batch[columns.REF_LOGPROBS] = reference + 0.1 * torch.arange(6.0).unsqueeze(1)
    prepared = learner.prepare(batch)
    assert prepared[columns.LOSS_MASK].sum(1).tolist() == [0, 0, 0, 4, 2, 5]
    assert learner.means.pop()["train/zero_variance_groups"] == pytest.approx(0.5)


def test_lengths_count_groups_that_the_loss_drops():
    learner = tiny.build(rloo(drop_zero_variance_groups=True, ref_kl_coeff=0.0))
    batch = tiny.judged(learner)
    batch[columns.SCORES] = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 2.0])
    prepared = learner.prepare(batch)
    means = learner.means.pop()
    assert prepared[columns.LOSS_MASK].sum(1).tolist() == [0, 0, 0, 4, 2, 5]
    assert means["train/output_length"] == pytest.approx((3 + 5 + 1 + 4 + 2 + 5) / 6)
    assert means["train/zero_variance_groups"] == pytest.approx(0.5)
