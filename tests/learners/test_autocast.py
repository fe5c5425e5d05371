"""bf16 arithmetic on float32 weights: near the float32 step, and not it."""

from __future__ import annotations

import torch

from rllib_llm import columns
from tests.algorithms import tiny_runs
from tests.learners import tiny_learners as tiny

# bfloat16 has 8 bits of mantissa: a relative step of 2^-8 = 0.004 in every product.
STEP = 2.0**-8


def build(autocast_dtype):
    config = tiny_runs.ppo(num_epochs=1, minibatch_size=None, entropy_coeff=0.01)
    return tiny.build(config.language_model(autocast_dtype=autocast_dtype))


def test_weights_moments_and_log_probs_stay_float32_and_near():
    exact, half = build(None), build("bfloat16")
    batch = tiny.judged(exact)
    outputs = [learner.forward(batch) for learner in (exact, half)]
    for name in (columns.LOGPROBS, columns.ENTROPY, columns.VALUES):
        assert outputs[1][name].dtype == torch.float32
        torch.testing.assert_close(outputs[1][name], outputs[0][name], rtol=0, atol=20 * STEP)
    assert not torch.equal(outputs[0][columns.LOGPROBS], outputs[1][columns.LOGPROBS])
    for learner in (exact, half):
        tiny.update(learner, batch)
    assert all(tensor.dtype == torch.float32 for tensor in tiny.parameters(half).values())
    gradients = [tiny.first_gradients(learner) for learner in (exact, half)]
    assert all(gradient.dtype == torch.float32 for gradient in gradients[1].values())
    flat = [torch.cat([g.flatten() for g in grads.values()]) for grads in gradients]
    assert torch.cosine_similarity(*flat, dim=0) > 0.995


def test_sampler_and_trainer_use_the_same_arithmetic():
    from rllib_llm.engines.engine import generate
    from rllib_llm.engines.noise import uniform_noise
    from rllib_llm.engines.params import SamplingParams

    learner = build("bfloat16")
    batch = tiny.completions([3, 3, 3, 3])
    params = SamplingParams(max_new_tokens=5, stop_token_ids=(2,), pad_token_id=0)
    sampled = tiny.module_of(learner).forward_exploration(
        batch, generate=generate, params=params, noise=uniform_noise(0, torch.arange(4), 5)
    )
    scored = learner.forward({**batch, **sampled})[columns.LOGPROBS]
    torch.testing.assert_close(scored, sampled[columns.SAMPLER_LOGPROBS], rtol=0, atol=20 * STEP)
