"""Learners of a mixture of experts: the routers' auxiliary loss, and the sampler's experts."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rllib_llm.learners.batching import take_rows, trim
from rllib_llm.modules.routers import routed
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.algorithms.tiny_runs import HERE, TEXTS, grpo, ppo, sft
from tests.learners import tiny_learners as tiny

MIXTURE = f"{HERE}.build_mixture"
COEFF = 0.5


def mixture(make, **settings):
    made = make(**{"num_epochs": 1, "minibatch_size": None, "grad_clip": None, **settings})
    return made.language_model(model=MIXTURE)


def by_transformers(model, batch):
    """Their loss on padded rows, over what a pass reads: all real tokens but each row's last."""
    ids, real = (
        torch.cat([batch[one], batch[other]], dim=1)
        for one, other in ((columns.PROMPT_IDS, columns.COMPLETION_IDS),
                           (columns.PROMPT_MASK, columns.COMPLETION_MASK))
    )  # fmt: skip
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    found = model(
        input_ids=ids, attention_mask=real.long(), position_ids=positions,
        output_router_logits=True,
    )  # fmt: skip
    read = torch.nn.functional.pad(real, (0, 1))[:, 1:] & real
    return load_balancing_loss_func(tuple(found.router_logits), 6, 2, read)


@pytest.mark.parametrize("make", [grpo, pytest.param(ppo, marks=pytest.mark.slow)])
def test_the_gradient_of_the_auxiliary_loss_is_added(make):
    plain, balanced = (
        tiny.build(mixture(make, ref_kl_coeff=0.0).experts(router_aux_coeff=coeff))
        for coeff in (0.0, COEFF)
    )
    batch = tiny.judged(plain)
    model = tiny.module_of(plain).model
    expected = by_transformers(model, batch)
    names = {f"model.{name}": p for name, p in model.named_parameters()}
    gradients = torch.autograd.grad(COEFF * expected, list(names.values()), allow_unused=True)
    assert "train/router_aux_loss" not in tiny.update(plain, batch)
    found = tiny.update(balanced, batch)
    assert found["train/router_aux_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    before, after = tiny.first_gradients(plain), tiny.first_gradients(balanced)
    for name, gradient in zip(names, gradients, strict=True):
        gradient = torch.zeros_like(before[name]) if gradient is None else gradient
        torch.testing.assert_close(after[name] - before[name], gradient, rtol=1e-3, atol=1e-5)


def test_micro_batches_count_by_their_share_of_sampled_tokens():
    learner = tiny.build(
        mixture(grpo, ref_kl_coeff=0.0, micro_batch_size=2, micro_batch_tokens=None)
        .experts(router_aux_coeff=COEFF)
    )  # fmt: skip
    batch = tiny.judged(learner)
    counts = batch[columns.COMPLETION_MASK].sum(dim=1)
    model, expected = tiny.module_of(learner).model, 0.0
    for rows in learner.micro_batch_rows(batch):
        part = by_transformers(model, trim(take_rows(batch, rows)))
        expected += float(part.detach() * counts[rows].sum() / counts.sum())
    assert tiny.update(learner, batch)["train/router_aux_loss"] == pytest.approx(expected, rel=1e-5)


def test_sft_has_it_too():
    from rllib_llm.data.texts import TextSource

    plain, balanced = (
        tiny.build(mixture(sft).experts(router_aux_coeff=coeff)) for coeff in (0.0, COEFF)
    )
    tokenizer = tiny.module_of(plain).tokenizer
    batch = TextSource(TEXTS, tokenizer=tokenizer, max_length=16).batch(0, 6)
    found, usual = tiny.update(balanced, batch), tiny.update(plain, batch)
    assert found["loss/sft"] == pytest.approx(usual["loss/sft"])
    assert 2 <= found["train/router_aux_loss"] <= 6  # k where experts are used alike, E where one
    gates = [name for name in tiny.first_gradients(plain) if name.endswith("mlp.gate.weight")]
    for name in gates:
        assert not torch.equal(*(tiny.first_gradients(each)[name] for each in (plain, balanced)))


@pytest.mark.parametrize("settings", [{"router_aux_coeff": 0.1}, {"routing_replay": True}])
def test_a_dense_model_is_refused(settings):
    with pytest.raises(Problems) as refused:
        tiny.build(grpo().experts(**settings))
    assert refused.value.found[0].name == "model"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (grpo().experts(routing_replay=True).sampling(engine="vllm").env_runners(num_env_runners=1),
         "routing_replay"),
        (grpo().experts(routing_replay=True).sampling(generate_function=f"{HERE}.num_digits"),
         "routing_replay"),
        (sft().experts(router_aux_coeff=0.1).framework(torch_compile_learner=True),
         "router_aux_coeff"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(config, name):
    with pytest.raises(Problems) as refused:
        config.validate()
    assert name in [problem.name for problem in refused.value.found]


# --- the sampler's experts


def with_other_experts(learner, batch):
    """The experts that a sampler would have chosen whose routers like the worst experts best, and
    its log-probs: those of the learner's model with these experts."""
    model = tiny.module_of(learner).model
    ids = torch.cat([batch[columns.PROMPT_IDS], batch[columns.COMPLETION_IDS]], dim=1)
    with routed(model) as chosen, torch.no_grad():
        model(input_ids=ids)
    worst = [(-logits).topk(2).indices for logits in chosen.logits]
    held = torch.stack(worst, dim=1).flatten(1).to(torch.int16).unflatten(0, ids.shape)
    prompts, completions = held.split([4, ids.shape[1] - 4], dim=1)
    batch = {**batch, columns.PROMPT_EXPERTS: prompts, columns.COMPLETION_EXPERTS: completions}
    with torch.no_grad():
        scored = tiny.module_of(learner).forward_train(batch)
    return {**batch, columns.SAMPLER_LOGPROBS: scored[columns.LOGPROBS]}


@pytest.mark.parametrize("make", [grpo, pytest.param(ppo, marks=pytest.mark.slow)])
def test_the_ratio_is_1_with_the_sampler_s_experts_alone(make):
    learner = tiny.build(
        mixture(make, ref_kl_coeff=0.0, micro_batch_size=2, micro_batch_tokens=None)
        .experts(routing_replay=True)
    )  # fmt: skip
    batch = with_other_experts(learner, tiny.judged(learner))
    found = tiny.update(learner, batch)
    assert found["val/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert found["sampler/logprob_gap"] < 1e-5
    without = tiny.build(mixture(make, ref_kl_coeff=0.0))
    names = (columns.PROMPT_EXPERTS, columns.COMPLETION_EXPERTS)
    plain = {name: column for name, column in batch.items() if name not in names}
    assert tiny.update(without, plain)["sampler/logprob_gap"] > 0.1


@pytest.mark.parametrize("settings", [
    {"gradient_checkpointing": True}, {"lora": {"target_modules": "all-linear"}},
])  # fmt: skip
def test_adapters_and_recomputed_layers_take_them_too(settings):
    learner = tiny.build(
        mixture(grpo, ref_kl_coeff=0.0).experts(routing_replay=True, router_aux_coeff=COEFF)
        .language_model(**settings)
    )  # fmt: skip
    batch = with_other_experts(learner, tiny.judged(learner))
    found = tiny.update(learner, batch)
    assert found["sampler/logprob_gap"] < 1e-5 and found["grad_norm"] > 0
    if "lora" not in settings:
        whole = tiny.build(
            mixture(grpo, ref_kl_coeff=0.0).experts(routing_replay=True, router_aux_coeff=COEFF)
        )
        tiny.update(whole, batch)
        for name, gradient in tiny.first_gradients(whole).items():
            torch.testing.assert_close(
                tiny.first_gradients(learner)[name], gradient, rtol=1e-4, atol=1e-6
            )


def test_a_batch_without_them_is_refused():
    learner = tiny.build(mixture(grpo).experts(routing_replay=True))
    with pytest.raises(Problems) as refused:
        tiny.update(learner, tiny.judged(learner))
    assert refused.value.found[0].name == "routing_replay"
