"""Sampled completions follow the model's distribution, each row by itself, with its log-probs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Completions, uniform_noise
from rllib_llm.modules.logprobs import score_completions
from tests.engines.tiny_generations import (
    MODELS,
    PAD,
    STOPS,
    exact_logprobs,
    greedy,
    ragged_prompts,
    sampled,
    seeded,
)
from tests.modules.tiny_models import FAMILIES, tiny_model
from tests.rounding import assert_as_near


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"temperature": 0.6}),
        ("llama", {"top_k": 4}),
        ("llama", {"top_p": 0.7}),
        ("llama", {"top_k": 6, "top_p": 0.8}),
        ("qwen2 (tied)", {}),
        ("mistral (sliding window)", {}),
        ("gpt2", {}),
        ("gemma2 (soft-cap)", {}),
    ],
)
def test_pairs_of_tokens_follow_the_exact_distribution(family, settings):
    """Behind a prompt without and one with padding."""
    model = seeded(family.split()[0], vocab_size=12, initializer_range=0.3, **FAMILIES[family])
    ids, mask = torch.tensor([[3, 5, 7], [0, 0, 9]]), torch.tensor([[1, 1, 1], [0, 0, 1]]).bool()
    draws = 10_000

    out = sampled(model, ids, mask, n=draws, max_new_tokens=2, **settings)

    pairs = out.completion_ids[:, 0] * 12 + out.completion_ids[:, 1]
    for prompt, found in ((ids[:1], pairs[:draws]), (ids[1:, 2:], pairs[draws:])):
        first = exact_probabilities(model, prompt, **settings)
        after = torch.cat([prompt.expand(12, -1), torch.arange(12)[:, None]], dim=1)
        expected = (first.T * exact_probabilities(model, after, **settings)).flatten()
        assert_drawn_from(found, expected)


def assert_drawn_from(found: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's chi-square: `found` [draws] of the outcomes with `probabilities` [outcomes]."""
    expected = probabilities * len(found)
    counts = torch.bincount(found, minlength=len(probabilities)).double()
    assert counts[expected == 0].sum() == 0, "tokens outside the truncated set were drawn"
    # It needs about 5 expected per cell: rarer outcomes are pooled.
    common = expected >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]]).clamp(min=1e-9)
    degrees = int(common.sum())
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1.0)).sum().item()
    # Mean k and variance 2k: four standard deviations are passed once in ten thousand runs or less.
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


def exact_probabilities(model, ids, temperature=1.0, top_k=0, top_p=1.0) -> torch.Tensor:
    """[batch, vocab] float64 probabilities of the next token, truncated by plain loops."""
    with torch.no_grad():
        rows = (model(ids).logits[:, -1].double() / temperature).softmax(dim=-1)
    truncated = torch.zeros_like(rows)
    for row, kept in zip(rows, truncated, strict=True):
        order = row.argsort(descending=True)[: top_k or None]
        mass, wanted = 0.0, top_p * float(row[order].sum())
        for token in order:
            if mass < wanted:
                kept[token] = row[token]
            mass += float(row[token])
    return truncated / truncated.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral (sliding window)"])
def test_a_rows_tokens_do_not_depend_on_its_batch(family):
    model = tiny_model(family)
    ids, mask = ragged_prompts()
    together = sampled(model, ids, mask, n=3, stop_token_ids=STOPS)
    exact = exact_logprobs(model, ids, mask, together, n=3)
    noise = uniform_noise(1, range(15), 30)
    params = SamplingParams(pad_token_id=PAD, max_new_tokens=30, stop_token_ids=STOPS)

    # Every group alone, without the columns that only longer prompts need; rows in another order.
    for group in range(5):
        own = mask[group].nonzero()[0].item()
        rows = torch.tensor([2, 0, 1]) + 3 * group
        alone = generate(
            model,
            ids[group : group + 1, own:],
            mask[group : group + 1, own:],
            params,
            num_completions=3,
            noise=noise[rows],
        )
        length = alone.completion_ids.shape[1]
        assert torch.equal(alone.completion_ids, together.completion_ids[rows, :length])
        assert not together.completion_mask[rows, length:].any()
        assert_as_near(alone.logprobs, together.logprobs[rows, :length], exact[rows, :length])


@pytest.mark.parametrize("looks", [2, 7, 100])
def test_when_ended_rows_leave_does_not_change_the_completions(looks):
    model = tiny_model("llama")
    ids, mask = ragged_prompts()

    expected = sampled(model, ids, mask, n=3, stop_token_ids=STOPS)
    out = sampled(model, ids, mask, n=3, stop_token_ids=STOPS, looks=looks)

    assert torch.equal(out.completion_ids, expected.completion_ids)
    assert torch.equal(out.completion_mask, expected.completion_mask)
    assert torch.equal(out.finished, expected.finished)
    exact = exact_logprobs(model, ids, mask, expected, n=3)
    assert_as_near(out.logprobs, expected.logprobs, exact)


def test_padding_in_front_of_all_prompts_changes_nothing():
    model = tiny_model("llama")

    expected = sampled(model, *ragged_prompts(), stop_token_ids=STOPS)
    out = sampled(model, *ragged_prompts(extra=4), stop_token_ids=STOPS)

    assert torch.equal(out.completion_ids, expected.completion_ids)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.7}, {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_new_tokens": 6}],
)
@pytest.mark.parametrize(
    "name", ["llama", "qwen2 (window)", "gpt2", "mistral (sliding window)", "gemma2 (window)"]
)
def test_logprobs_are_the_trainers_before_truncation(name, settings):
    family, changes = MODELS[name]
    model = tiny_model(family, **changes)
    ids, mask = ragged_prompts()

    out = sampled(model, ids, mask, n=2, stop_token_ids=STOPS, **settings)

    of_which = (ids, mask, out, 2, settings["temperature"])
    assert_as_near(out.logprobs, score(model, *of_which), exact_logprobs(model, *of_which))


def test_greedy_logprobs_know_the_temperature_too():
    model = tiny_model("llama")
    ids, mask = ragged_prompts()

    out = greedy(model, ids, mask, temperature=2.0)

    of_which = (ids, mask, out, 1, 2.0)
    assert_as_near(out.logprobs, score(model, *of_which), exact_logprobs(model, *of_which))


def score(model, ids, mask, out: Completions, n: int, temperature: float) -> torch.Tensor:
    """The trainer's log-probs [batch, T] of completions, from one pass without a cache."""
    prompts = [column.repeat_interleave(n, dim=0) for column in (ids, mask)]
    with torch.no_grad():
        return score_completions(
            model, *prompts, out.completion_ids, out.completion_mask, temperature=temperature
        ).logprobs
