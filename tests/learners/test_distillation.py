"""The learner's divergence from a teacher: beside logits of both models, whatever the chunks."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.algorithms.distillation import DistillationConfig
from rllib_llm.modules import logprobs
from rllib_llm.numerics.distillation import divergence_stats, likeliest_stats
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs
from tests.algorithms.tiny_runs import grpo, ppo, rloo
from tests.learners import tiny_learners as tiny

TEACHER = f"{tiny_runs.HERE}.build_teacher"
ONE_STEP = {"num_epochs": 1, "minibatch_size": None}


def distill(temperature=1.0, **training):
    settings = {**ONE_STEP, "grad_clip": None, "teacher": TEACHER, **training}
    return tiny_runs._rlhf(DistillationConfig(), **settings).sampling(temperature=temperature)


def judged(learner):
    batch = tiny.judged(learner)
    del batch[columns.REF_LOGPROBS]
    return batch


def dense_logits(model, batch, prompt_ids=None, prompt_mask=None):
    """[B, T, V] float64 of the positions that predict completion tokens, row by row."""
    ids = batch[columns.PROMPT_IDS] if prompt_ids is None else prompt_ids
    mask = batch[columns.PROMPT_MASK] if prompt_mask is None else prompt_mask
    rows = []
    length = batch[columns.COMPLETION_IDS].shape[1]
    for i in range(len(ids)):
        prompt = ids[i][mask[i]]
        text = torch.cat([prompt, batch[columns.COMPLETION_IDS][i]]).unsqueeze(0)
        rows.append(model(text).logits[0, len(prompt) - 1 : len(prompt) - 1 + length].double())
    return torch.stack(rows)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_is_the_mean_divergence_over_the_vocabulary(beta, monkeypatch):
    monkeypatch.setattr(logprobs, "_CHUNK_LOGITS", 40)  # two tokens' logits at a time
    learner = tiny.build(distill(distill_beta=beta, temperature=1.3))
    batch = judged(learner)
    policy, teacher = tiny.module_of(learner).model, learner.teacher.model
    student = dense_logits(policy, batch) / 1.3
    with torch.no_grad():
        goal = dense_logits(teacher, batch) / 1.3
    mask = batch[columns.COMPLETION_MASK]
    per_token, kl, agrees = divergence_stats(student, goal, beta)
    loss = per_token[mask].mean()
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    found = tiny.update(learner, batch)
    assert found["loss/distill_avg"] == pytest.approx(float(loss), rel=1e-4)
    assert found["train/teacher_kl"] == pytest.approx(float(kl[mask].mean()), rel=1e-4)
    assert found["train/teacher_agreement"] == pytest.approx(float(agrees[mask].mean()))
    assert found["loss/policy_avg"] == 0
    ours = tiny.first_gradients(learner)
    for (name, _), expected in zip(policy.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(ours[f"model.{name}"], expected.float(), rtol=1e-3, atol=1e-6)


def test_a_teacher_reads_prompts_of_its_own():
    """And is asked about tokens that the policy wrote alone, not those of tools between them."""
    learner = tiny.build(distill())
    batch = judged(learner)
    where = batch[columns.COMPLETION_MASK].clone()
    where[:, 1] = False
    batch[columns.LOSS_MASK] = where
    ids = torch.randint(3, 13, (6, 7))
    mask = torch.arange(7) >= torch.arange(6).unsqueeze(1) % 4
    given = {columns.TEACHER_PROMPT_IDS: ids.where(mask, 0), columns.TEACHER_PROMPT_MASK: mask}
    with torch.no_grad():
        student = dense_logits(tiny.module_of(learner).model, batch)
        goal = dense_logits(learner.teacher.model, batch, *given.values())
    expected = divergence_stats(student, goal, 1.0)[0][where].mean()
    found = tiny.update(learner, {**batch, **given})
    assert found["loss/distill_avg"] == pytest.approx(float(expected), rel=1e-4)


def test_a_teacher_in_the_environment_names_its_likeliest_tokens():
    learner = tiny.build(distill(teacher_in="environment", teacher_top_k=4))
    other = tiny.build(distill())
    assert learner.teacher is None
    batch = judged(learner)
    with torch.no_grad():
        goal = dense_logits(other.teacher.model, batch).log_softmax(-1)
        student = dense_logits(tiny.module_of(learner).model, batch)
    top, ids = goal.topk(4)
    given = {
        columns.TEACHER_TOP_IDS: ids.int(), columns.TEACHER_TOP_LOGPROBS: top.float(),
        columns.TEACHER_LOGPROBS: top[..., 0].float(),
    }  # fmt: skip
    with pytest.raises(Problems) as error:  # an environment that has no teacher
        learner.prepare(dict(batch))
    assert error.value.found[0].name == "teacher_in"
    found = tiny.update(learner, {**batch, **given})
    where = batch[columns.COMPLETION_MASK]
    expected = likeliest_stats(student, ids, top, 1.0)[0][where].mean()
    assert found["loss/distill_avg"] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("make", [
    grpo, *(pytest.param(make, marks=pytest.mark.slow) for make in (rloo, ppo))
])  # fmt: skip
def test_beside_rewards_the_losses_add_up(make):
    settings = {**ONE_STEP, "ref_kl_coeff": 0.0, "grad_clip": None}
    both = tiny.build(make(**settings).distillation(teacher=TEACHER, coeff=0.3))
    rewards = tiny.build(make(**settings))
    teacher = tiny.build(distill(loss_reduction=both.config.loss_reduction))
    batch = judged(both)
    for learner in (both, rewards, teacher):
        tiny.update(learner, batch)
    sums = [tiny.first_gradients(each) for each in (both, rewards, teacher)]
    for name, gradient in sums[0].items():
        expected = sums[1][name] + 0.3 * sums[2].get(name, torch.zeros(()))
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


def test_the_policy_gradient_of_the_sampled_token_is_an_advantage():
    settings = {**ONE_STEP, "ref_kl_coeff": 0.0}
    learner = tiny.build(grpo(**settings).distillation(
        teacher=TEACHER, coeff=0.5, loss="policy_gradient"))  # fmt: skip
    usual = tiny.build(grpo(**settings))
    batch = judged(learner)
    with torch.no_grad():
        goal = dense_logits(learner.teacher.model, batch).log_softmax(-1)
    ids, mask = batch[columns.COMPLETION_IDS], batch[columns.COMPLETION_MASK]
    goal = goal.gather(-1, ids.unsqueeze(-1)).squeeze(-1).float()
    gain = (goal - batch[columns.SAMPLER_LOGPROBS]).where(mask, 0.0)
    found, plain = (each.prepare(dict(batch))[columns.ADVANTAGES] for each in (learner, usual))
    torch.testing.assert_close(found, plain + 0.5 * gain, rtol=1e-4, atol=1e-5)


def test_a_teacher_that_is_the_policy_agrees_and_follows():
    learner = tiny.build(distill(teacher="policy", teacher_update_every=1, teacher_update_mix=0.5,
                                 lr=1e-2))  # fmt: skip
    batch = judged(learner)
    prompts = {columns.TEACHER_PROMPT_IDS: batch[columns.PROMPT_IDS].flip(0),
               columns.TEACHER_PROMPT_MASK: batch[columns.PROMPT_MASK].flip(0)}  # fmt: skip
    same = tiny.build(distill(teacher="policy"))
    assert tiny.update(same, batch)["loss/distill_avg"] == pytest.approx(0, abs=1e-6)
    before = tiny.parameters(learner)
    assert tiny.update(learner, {**batch, **prompts})["loss/distill_avg"] > 1e-4
    after = tiny.parameters(learner)
    for name, weight in learner.teacher.model.named_parameters():
        expected = 0.5 * before[f"model.{name}"] + 0.5 * after[f"model.{name}"]
        torch.testing.assert_close(weight, expected)


def test_a_teacher_of_another_vocabulary_is_refused_by_name():
    with pytest.raises(Problems) as error:
        tiny.build(distill(teacher="rllib_llm.examples.reviews_model.build_model"))
    assert error.value.found[0].name == "teacher"


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"teacher": None}, "teacher"),
        ({"teacher": {"model": TEACHER, "url": "http://x/v1"}}, "teacher.url"),
        ({"teacher": "policy", "teacher_in": "environment"}, "teacher_in"),
        ({"on_policy_share": 0.5}, "distill_data"),
        ({"distill_beta": 1.5}, "distill_beta"),
        ({"on_policy_share": 0.5, "distill_data": tiny_runs.TEXTS, "teacher_in": "environment"},
         "teacher_in"),
    ],
)  # fmt: skip
def test_what_cannot_teach_is_refused(settings, name):
    config = tiny_runs._rlhf(DistillationConfig()).distillation(**{"teacher": TEACHER, **settings})
    assert name in [p.name for p in config.problems() if p.severity == "error"]
