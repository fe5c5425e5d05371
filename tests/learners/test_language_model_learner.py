"""What all learners share: cutting batches, one optimiser step, refusing what is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.learners.metrics import MAX_IN_A_ROW, MEANS, NUM_PARAMETERS, REPORT
from rllib_llm.shared import columns
from tests.algorithms.tiny_runs import assert_same_weights, grpo, ppo
from tests.learners import tiny_learners as tiny


@pytest.mark.parametrize("cut", [
    pytest.param({"micro_batch_size": 1}, marks=pytest.mark.slow), {"micro_batch_size": 4},
    {"micro_batch_tokens": 12},
])  # fmt: skip
def test_micro_batches_do_not_change_the_update(cut):
    whole = tiny.build(ppo(minibatch_size=None, num_epochs=1))
    parts = tiny.build(ppo(minibatch_size=None, num_epochs=1, **cut))
    batch = tiny.judged(whole)
    metrics, cut_metrics = tiny.update(whole, batch), tiny.update(parts, batch)
    # Adam's first step divides the gradient by itself: compare the gradients.
    gradients, cut_gradients = tiny.first_gradients(whole), tiny.first_gradients(parts)
    assert_same_weights(gradients, cut_gradients, rtol=1e-4, atol=1e-6)
    assert cut_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6, nan_ok=True)


def test_batches_that_do_not_divide_are_learnt_whole():
    learner = tiny.build(ppo(minibatch_size=4, num_epochs=2))
    seen = []
    inner = learner.start_minibatch
    learner.start_minibatch = lambda minibatch: (
        seen.append(minibatch[columns.ROW_ID].tolist()), inner(minibatch))  # fmt: skip
    tiny.update(learner, tiny.judged(learner, lengths=(3, 5, 1, 4, 2, 5, 1, 2, 3, 4)))
    # 10 rows in mini-batches of 4: 4 + 4 + 2 in each of 2 epochs, every row once per epoch.
    assert [len(rows) for rows in seen] == [4, 4, 2, 4, 4, 2]
    assert sorted(sum(seen[:3], [])) == sorted(sum(seen[3:], [])) == list(range(10))
    assert seen[:3] != seen[3:]
    assert learner.num_updates == 6


def test_an_update_is_a_function_of_seed_and_batch():
    def learn(seed):
        config = ppo(minibatch_size=2)
        config.debugging(seed=seed)
        learner = tiny.build(config)
        tiny.update(learner, tiny.judged(learner))
        return tiny.parameters(learner)

    one, same, other = learn(0), learn(0), learn(1)
    assert_same_weights(one, same)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_the_number_of_parameters_is_reported_by_every_update():
    learner = tiny.build(ppo())
    batch = tiny.judged(learner)
    num = sum(parameter.numel() for parameter in tiny.module_of(learner).parameters())
    told = []
    for _ in range(3):
        tiny.update(learner, batch)
        told.append(learner.report()[NUM_PARAMETERS])
    counts = {"num_trainable_parameters": num, "num_non_trainable_parameters": 0}
    assert told == [{"default_policy": counts}] * 3


def test_the_batch_given_is_left_as_it_was():
    learner = tiny.build(ppo())
    batch = tiny.judged(learner)
    batch[columns.VALID][0] = False
    before = {name: column.clone() for name, column in batch.items()}
    learner.prepare(batch)
    assert batch.keys() == before.keys()
    for name, column in before.items():
        assert torch.equal(batch[name], column), name


def test_learning_rate_zero_changes_nothing():
    learner = tiny.build(ppo(lr=0.0, minibatch_size=2, num_epochs=3, weight_decay=0.1))
    before = tiny.parameters(learner)
    metrics = tiny.update(learner, tiny.judged(learner))
    assert learner.num_updates == 9
    assert_same_weights(tiny.parameters(learner), before)
    assert metrics["policy/clipfrac_avg"] == 0
    # Rows are packed in other company in each mini-batch: float32 round-off of a log-prob, squared.
    assert metrics["policy/approxkl_avg"] < 1e-12
    assert metrics["val/ratio"] == pytest.approx(1.0, abs=1e-6)


def test_the_schedule_counts_optimiser_steps():
    # Warm-up over 3 steps: 1/4, 2/4, 3/4 of lr, then all of it.
    config = ppo(minibatch_size=3, num_epochs=2, lr=0.4, lr_num_warmup_updates=3)
    learner = tiny.build(config)
    metrics = tiny.update(learner, tiny.judged(learner))
    assert metrics["lr"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.4) / 4)
    assert learner.learning_rate == 0.4


def test_gradients_are_clipped_to_their_global_norm():
    free = tiny.build(ppo(minibatch_size=None, num_epochs=1, grad_clip=None))
    clipped = tiny.build(ppo(minibatch_size=None, num_epochs=1, grad_clip=0.01))
    batch = tiny.judged(free)
    norm = tiny.update(free, batch)["grad_norm"]
    assert norm > 0.01
    assert tiny.update(clipped, batch)["grad_norm"] == pytest.approx(norm, rel=1e-6)
    gradients, scaled = tiny.first_gradients(free), tiny.first_gradients(clipped)
    assert math.sqrt(sum(float(g.square().sum()) for g in gradients.values())) == pytest.approx(
        norm, rel=1e-4
    )
    for name in gradients:
        torch.testing.assert_close(scaled[name], gradients[name] * 0.01 / norm, rtol=1e-3,
                                   atol=1e-8)  # fmt: skip


def bad_batch(learner):
    batch = tiny.judged(learner)
    batch[columns.REF_LOGPROBS][1, 0] = torch.nan
    return batch


def test_a_loss_that_is_not_finite_is_refused(tmp_path):
    learner = tiny.build(
        ppo(minibatch_size=None, num_epochs=1, refused_batch_dir=str(tmp_path / "refused"))
    )
    good = tiny.judged(learner)
    tiny.update(learner, good)
    before = tiny.parameters(learner)
    moments = {name: g.clone() for name, g in tiny.first_gradients(learner).items()}

    metrics = tiny.update(learner, bad_batch(learner))

    assert metrics["num_refused_updates"] == learner.get_extra_state()["num_refused_updates"] == 1
    assert learner.num_updates == 1
    assert_same_weights(tiny.parameters(learner), before)
    assert_same_weights(tiny.first_gradients(learner), moments)
    (optimizer,) = learner._named_optimizers.values()
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    (file,) = (tmp_path / "refused").iterdir()
    kept = torch.load(file)
    assert torch.isnan(kept[columns.REF_LOGPROBS]).sum() == 1
    assert {"val/ratio", "val/ratio_square"} <= metrics.keys()

    tiny.update(learner, good)
    assert learner.num_updates == 2


def test_several_refusals_in_a_row_end_the_run(tmp_path):
    learner = tiny.build(ppo(minibatch_size=None, num_epochs=1, refused_batch_dir=str(tmp_path)))
    for _ in range(MAX_IN_A_ROW - 1):
        tiny.update(learner, bad_batch(learner))
    with pytest.raises(FloatingPointError, match=r"3 times in a row: lower lr") as caught:
        tiny.update(learner, bad_batch(learner))
    assert str(tmp_path) in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 3


def test_each_refused_mini_batch_of_an_update_is_kept(tmp_path):
    # NaN in one of the rows reaches all through whitening: every mini-batch is refused.
    learner = tiny.build(ppo(minibatch_size=3, num_epochs=1, refused_batch_dir=str(tmp_path)))
    tiny.update(learner, bad_batch(learner))
    assert learner.get_extra_state()["num_refused_updates"] == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_state_goes_back_in_time():
    learner = tiny.build(ppo(ref_kl_target=3.0, ref_kl_horizon=100, scale_scores=True))
    batch = tiny.judged(learner)
    tiny.update(learner, batch)
    state = copy_state(learner.get_state())
    early = tiny.parameters(learner)
    after_two = tiny.update(learner, batch), tiny.parameters(learner)
    tiny.update(learner, batch)

    learner.set_state(state)

    assert_same_weights(tiny.parameters(learner), early)
    assert learner.num_updates == 2  # 6 rows in one mini-batch, 2 epochs
    again = tiny.update(learner, batch), tiny.parameters(learner)
    assert again[0] == pytest.approx(after_two[0], rel=0, abs=0, nan_ok=True)
    assert_same_weights(again[1], after_two[1])


def copy_state(state):
    import copy

    return copy.deepcopy(state)


def test_optimiser_settings_follow_the_config_after_a_restore():
    old = tiny.build(ppo(lr=1e-3))
    batch = tiny.judged(old)
    tiny.update(old, batch)
    new = tiny.build(ppo(lr=5e-4, adam_betas=(0.8, 0.9), adam_epsilon=1e-6, weight_decay=0.25))
    new.set_state(old.get_state())
    (optimizer,) = new._named_optimizers.values()
    assert_same_weights(tiny.parameters(new), tiny.parameters(old))
    tiny.update(new, batch)
    for group, decay in zip(optimizer.param_groups, (0.25, 0.0), strict=True):  # norms have none
        found = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        assert found == {"lr": 5e-4, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": decay}
    # The moments are the old ones: 2 steps of the old learner, then 2 of the new.
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}


def with_dropout(**training):
    """A learner whose adapters have dropout and are not the zeros that they start as."""
    learner = tiny.build(grpo(**training).language_model(lora={"r": 4, "dropout": 0.5}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in tiny.module_of(learner).named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return learner


def test_passes_without_gradient_have_no_dropout():
    """Held-out losses, old log-probs and references are of the policy, not of a thinned one."""
    learner = with_dropout()
    batch = tiny.completions()
    first, second = (
        learner.evaluate_rows(batch, [columns.LOGPROBS])[columns.LOGPROBS] for _ in range(2)
    )
    assert torch.equal(first, second)
    training = tiny.module_of(learner).forward_train(batch)[columns.LOGPROBS]
    assert (training - first).abs().max() > 0.01
    tiny.module_of(learner).eval()
    assert torch.equal(learner.evaluate_rows(batch, [columns.LOGPROBS])[columns.LOGPROBS], first)


@pytest.mark.parametrize("learn", [
    tiny.update,
    lambda learner, batch: learner.forward_backward(batch, version=0),
])  # fmt: skip
def test_a_sampler_that_shares_the_module_decodes_without_dropout(learn):
    """Turn by turn it asks the model itself, whose log-probs are the policy's each time."""
    learner = with_dropout()
    batch = tiny.judged(learner)
    learn(learner, batch)
    model = tiny.module_of(learner).computing_model
    with torch.no_grad():
        first, second = (model(batch[columns.COMPLETION_IDS]).logits for _ in range(2))
    assert torch.equal(first, second)


def test_equal_seeds_learn_the_same_when_old_log_probs_are_recomputed():
    weights = []
    for seed in (1, 2):
        learner = with_dropout(off_policy="decoupled", num_epochs=2)
        batch = tiny.judged(learner)
        torch.manual_seed(seed)  # whatever else has drawn in this process
        tiny.update(learner, batch)
        weights.append(tiny.parameters(learner))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def one_step(**training):
    return grpo(minibatch_size=None, num_epochs=1, **training)


def test_gradients_without_a_step_are_taken_or_refused_never_added_unseen():
    learner, other = (tiny.build(one_step()) for _ in range(2))
    batch = tiny.judged(learner)
    learner.forward_backward(batch, version=0)
    with pytest.raises(RuntimeError, match=r"call optimizer_step\(\) before"):
        tiny.update(learner, batch)
    learner.optimizer_step()
    tiny.update(other, batch)
    for name, expected in tiny.parameters(other).items():
        torch.testing.assert_close(tiny.parameters(learner)[name], expected, rtol=1e-4, atol=1e-6)
    learner.forward_backward(batch, version=1)
    learner.set_state(copy_state(other.get_state()))  # a restore drops gradients of other weights
    expected = tiny.update(other, batch)["grad_norm"]
    assert tiny.update(learner, batch)["grad_norm"] == pytest.approx(expected, rel=1e-5)


def test_passes_that_fail_drop_the_gradients_that_were_added():
    learner = tiny.build(one_step())
    batch = tiny.judged(learner)
    learner.forward_backward(batch, version=0)
    broken = batch | {columns.COMPLETION_IDS: torch.full_like(batch[columns.COMPLETION_IDS], 999)}
    with pytest.raises(IndexError):  # no embedding has that row
        learner.forward_backward(broken, version=0)
    with pytest.raises(RuntimeError, match=r"call forward_backward\(batch\)"):
        learner.optimizer_step()
    # Nor are its counts among the next batch's, whose ratio is that of an on-policy pass.
    means = learner.forward_backward(batch, version=0)[REPORT][MEANS]
    assert means["val/ratio"] == pytest.approx(1, abs=1e-5)
    learner.optimizer_step()
    tiny.update(learner, batch)


@pytest.mark.parametrize("before", ["nothing", "an update"])
def test_gradients_in_half_precision_are_exactly_on_policy(before):
    """As an update's first mini-batch: compared with the very pass that is learnt from."""
    learner = tiny.build(one_step().language_model(mixed_precision="bf16"))
    batch = tiny.judged(learner)
    if before == "an update":
        tiny.update(learner, batch)
        batch = tiny.judged(learner)
    means = learner.forward_backward(batch, version=learner.num_updates)[REPORT][MEANS]
    assert means["val/ratio"] == 1 and means["policy/approxkl_avg"] == 0


def test_steps_that_nobody_published_make_no_token_older():
    """Ages are published versions, whatever the number of steps between, and of failed batches."""
    learner = tiny.build(one_step(off_policy="decoupled_loglinear", off_policy_weights=None))
    batch = tiny.judged(learner)
    broken = batch | {columns.COMPLETION_IDS: torch.full_like(batch[columns.COMPLETION_IDS], 999)}
    with pytest.raises(IndexError):
        learner.forward_backward(broken, version=0)
    for _ in range(3):
        means = learner.forward_backward(batch, version=0)[REPORT][MEANS]
        assert "off_policy/k1_lag_0" in means and "off_policy/k1_lag_1" not in means
        learner.optimizer_step()
    means = tiny.update(learner, batch, version=0)
    assert "off_policy/k1_lag_0" in means and "off_policy/k1_lag_1" not in means
