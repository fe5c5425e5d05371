"""Values that come with the completions: those of a forward pass over prompt and completion."""

from __future__ import annotations

import copy

import torch

from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import uniform_noise
from rllib_llm.modules.logprobs import score_completions
from rllib_llm.modules.rl_modules import ValueHead
from rllib_llm.shared import columns
from tests.crossed import crossed
from tests.engines.tiny_generations import PAD, STOPS, ragged_prompts
from tests.modules.tiny_models import tiny_model
from tests.rounding import assert_as_near, neighbour

STEPS, N = 24, 2


def sampled(model, value_head, steps=STEPS, **settings):
    ids, mask = ragged_prompts()
    return generate(
        model, ids, mask, SamplingParams(PAD, stop_token_ids=STOPS, max_new_tokens=steps),
        num_completions=N, noise=uniform_noise(3, range(len(ids) * N), steps),
        value_head=value_head, **settings,
    )  # fmt: skip


def random_value_head(model) -> ValueHead:
    torch.manual_seed(1)
    value_head = ValueHead(model.config.hidden_size)
    torch.nn.init.normal_(value_head.linear.weight)
    torch.nn.init.normal_(value_head.linear.bias)
    return value_head


@torch.no_grad()
def of_a_forward_pass(model, value_head, out):
    ids, mask = (prompt.repeat_interleave(N, dim=0) for prompt in ragged_prompts())
    states = score_completions(
        model, ids, mask, out.completion_ids, out.completion_mask, hidden=True
    ).hidden
    return value_head.linear(states).squeeze(-1).where(out.completion_mask, 0.0)


@crossed(
    2,
    max_rows=[None, 2 * N],  # all at once, or let in as others end
    steps=[8, STEPS],  # too few for weights laid out anew, and enough
    family=["llama", "qwen3", "gpt2", "gemma2 (soft-cap)"],
)
def test_values_are_those_of_a_forward_pass(family, steps, max_rows):
    model = tiny_model(family)
    value_head = random_value_head(model)
    out = sampled(model, value_head, steps, max_rows=max_rows)
    assert len(out.completion_mask.sum(dim=1).unique()) > 1
    exact_head = copy.deepcopy(value_head).double()
    exact = of_a_forward_pass(copy.deepcopy(model).double(), exact_head, out)
    near = [of_a_forward_pass(neighbour(model, seed), exact_head, out) for seed in range(3)]
    expected = of_a_forward_pass(model, value_head, out)
    assert_as_near(out.values, expected, exact, neighbours=near)
    assert torch.equal(out.columns()[columns.SAMPLER_VALUES], out.values)


def test_they_change_nothing_else():
    model = tiny_model("llama")
    alone, judged = sampled(model, None), sampled(model, random_value_head(model))
    assert alone.values is None and columns.SAMPLER_VALUES not in alone.columns()
    assert torch.equal(alone.completion_ids, judged.completion_ids)
    torch.testing.assert_close(alone.logprobs, judged.logprobs, atol=1e-5, rtol=0)
    assert not model.model.layers[0]._forward_hooks  # which would stop the fast paths
