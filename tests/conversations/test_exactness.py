"""From the engine to the gradient: rows are what was sampled, and nothing else is learnt from."""

from __future__ import annotations

import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.algorithms.grpo import GRPOConfig
from rllib_llm.rollouts.judged_batch import SampleRequest
from rllib_llm.shared import columns
from tests.conversations.templates import FAMILIES
from tests.learners import tiny_learners as tiny
from tests.rollouts.tiny_samplers import build_sampler


def config(family, **changes):
    settings = {"env": "tests.conversations.family_models.Chatty", **changes}
    return (
        GRPOConfig()
        .environment(settings.pop("env"), env_config=settings.pop("env_config", {}))
        .language_model(model=f"tests.conversations.family_models.build_{family}")
        # Any of a hundred tokens ends a turn, so that a random model takes several.
        .sampling(num_completions=2, max_new_tokens=12, stop_token_ids=list(range(300, 400)))
        .training(train_batch_size_per_learner=8, ref_kl_coeff=0.0, **settings)
    )


def sampled(family, **changes):
    runner = build_sampler(config(family, **changes))
    batch = runner.sampler.sample(SampleRequest(0, 4, 2))
    runner.stop()
    return batch


# One that works on bytes and the one that puts a space in front of every text. What the engine saw
# is compared for every family in test_conversation.py.
SOME = [
    pytest.param(family, marks=() if family in ("chatml", "mistral") else pytest.mark.slow)
    for family in FAMILIES
]


@pytest.mark.parametrize("family", SOME)
def test_trainer_and_engine_agree_on_every_sampled_token(family):
    batch = sampled(family)
    mask = batch.columns[columns.LOSS_MASK]
    exists = batch.columns[columns.COMPLETION_MASK]
    assert int((exists & ~mask).sum()) > 20  # turns of the environment lie between
    learner = tiny.build(config(family))
    with torch.no_grad():
        outputs = tiny.module_of(learner).forward_train(dict(batch.columns))
    gap = (outputs[columns.LOGPROBS] - batch.columns[columns.SAMPLER_LOGPROBS])[mask].abs()
    assert float(gap.max()) < 1e-4


@pytest.mark.parametrize("family", SOME)
def test_nothing_that_the_environment_said_has_a_gradient(family):
    batch = sampled(family)
    learner = tiny.build(config(family))
    module = tiny.module_of(learner)

    def gradients(poison):
        prepared = learner.prepare(dict(batch.columns))
        mask = columns.sampled_mask(prepared)
        for name in (columns.ADVANTAGES, columns.OLD_LOGPROBS, columns.SAMPLER_LOGPROBS):
            prepared[name] = prepared[name].where(mask, poison)
        learner.start_minibatch(prepared)
        outputs = module.forward_train(prepared)
        outputs[columns.LOGPROBS].retain_grad()
        module.zero_grad()
        learner.compute_loss_for_module(
            module_id=DEFAULT_MODULE_ID, config=learner.config, batch=prepared, fwd_out=outputs
        ).backward()
        assert not outputs[columns.LOGPROBS].grad[~mask].any()
        assert outputs[columns.LOGPROBS].grad[mask].any()
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    for one, other in zip(gradients(0.0), gradients(1e3), strict=True):
        assert torch.equal(one, other)


def test_the_same_request_gives_the_same_conversations():
    one, two = sampled("chatml"), sampled("chatml", env_config={"max_concurrent": 1})
    for name in (columns.COMPLETION_IDS, columns.LOSS_MASK, columns.SCORES, columns.REWARDS):
        assert torch.equal(one.columns[name], two.columns[name]), name


def test_one_update_from_conversations():
    batch = sampled("qwen3")
    learner = tiny.build(config("qwen3"))
    before = tiny.parameters(learner)
    metrics = tiny.update(learner, batch.columns)
    assert metrics["train/num_invalid"] == 0
    assert metrics["sampler/logprob_gap"] < 1e-4
    assert any(not torch.equal(before[name], now) for name, now in tiny.parameters(learner).items())
