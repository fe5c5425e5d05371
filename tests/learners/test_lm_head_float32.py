"""lm_head_float32: the output layer computes in float32 beside a trunk in bfloat16."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.engines.llama_step import is_llama_shaped
from rllib_llm.modules.trunk import take_apart
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs
from tests.learners import tiny_learners as tiny


def build(**language_model):
    config = tiny_runs.grpo(num_epochs=1, minibatch_size=None, ref_kl_coeff=0.0)
    settings = {"model": f"{__name__}.build_untied", "mixed_precision": "bf16"}
    return tiny.build(config.language_model(**settings, **language_model))


def test_logits_are_float32_products_of_the_trained_weights():
    learner, usual = build(lm_head_float32=True), build()
    module = tiny.module_of(learner)
    model, weight = module.computing_model, module.model.lm_head.weight
    assert model.lm_head.weight is weight and weight.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    halves = take_apart(model)
    states = torch.randn(5, weight.shape[1]).bfloat16()
    logits = halves.logits(states)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, states.float() @ weight.detach().T)
    batch = tiny.judged(usual)
    found, rounded = (each.forward(batch)[columns.LOGPROBS] for each in (learner, usual))
    gap = (found - rounded).abs().max()
    # The other one's logits are rounded to 2^-8 of their size, about 1.
    assert 0 < gap < 0.1


def test_its_gradient_reaches_the_head_and_samplers_get_it_as_it_is():
    learner = build(lm_head_float32=True)
    batch = tiny.judged(learner)
    batch[columns.SCORES] = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    before = tiny.parameters(learner)
    tiny.update(learner, batch)
    module = tiny.module_of(learner)
    assert not torch.equal(before["model.lm_head.weight"], module.model.lm_head.weight)
    published = module.published_tensors()
    assert published["model.lm_head.weight"] is module.model.lm_head.weight
    assert published["model.model.norm.weight"].dtype == torch.bfloat16
    spec = learner.config.get_multi_rl_module_spec(
        spaces={"default_policy": (tiny.SPACE, tiny.SPACE)}, inference_only=True
    )
    sampler = spec.rl_module_specs["default_policy"].build()
    assert {name: t.dtype for name, t in sampler.published_tensors().items()} == {
        name: t.dtype for name, t in published.items()
    }
    assert is_llama_shaped(sampler.model)


def test_samplers_log_probs_are_nearer_to_the_learner_s(ray_session):
    gaps = {}
    for exact in (True, False):
        config = tiny_runs.grpo(num_epochs=1, minibatch_size=None, ref_kl_coeff=0.0, lr=0.0)
        config.language_model(
            model=f"{__name__}.build_untied", mixed_precision="bf16", lm_head_float32=exact
        )
        with tiny_runs.built(config) as algorithm:
            gaps[exact] = algorithm.train()["sampler"]["logprob_gap"]
    assert gaps[True] <= gaps[False]


def test_a_head_that_is_the_embedding_is_refused():
    with pytest.raises(Problems) as error:
        tiny.build(tiny_runs.grpo().language_model(mixed_precision="bf16", lm_head_float32=True))
    assert error.value.found[0].name == "lm_head_float32"


def build_untied():
    """A model whose logits differ, so that rounding its head to 16 bits shows above other
    roundings."""
    from rllib_llm.examples import arithmetic

    model, tokenizer = arithmetic.build_model(
        3, hidden_size=16, num_layers=1, num_heads=2, max_len=32, tie_word_embeddings=False
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model, tokenizer


def test_without_bfloat16_it_warns():
    with pytest.warns(UserWarning, match="lm_head_float32"):
        tiny_runs.grpo().language_model(lm_head_float32=True).validate()
