"""Prompts let in as rows end: the same tokens as all at once, however few places there are."""

from __future__ import annotations

import functools

import pytest
import torch

from rllib_llm.engines.decode_step import DecodePlan
from rllib_llm.engines.decoder import Decoder
from rllib_llm.engines.engine import capacity, generate, put_batch
from rllib_llm.engines.kv_cache import SharedPromptCache
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import uniform_noise
from tests.crossed import crossed
from tests.engines.tiny_generations import centred, exact_logprobs
from tests.modules.tiny_models import VOCAB, tiny_model
from tests.rounding import assert_as_near

PAD = 0
STOPS = tuple(range(2, 10))
NUM_GROUPS, N, STEPS = 9, 2, 24


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Nine prompts of 1 to 9 tokens, left-padded, two columns more than needed."""
    torch.manual_seed(5)
    lengths = torch.tensor([3, 9, 1, 5, 2, 8, 4, 7, 6])
    mask = torch.arange(11) >= 11 - lengths[:, None]
    return torch.randint(10, VOCAB, (NUM_GROUPS, 11)).masked_fill(~mask, PAD), mask


NOISE = uniform_noise(1, range(NUM_GROUPS * N), STEPS)


def completions(model, *, max_rows, looks=1, noise=NOISE, **settings):
    params = SamplingParams(PAD, **{"stop_token_ids": STOPS, "max_new_tokens": STEPS, **settings})
    return generate(
        model, *prompts(), params, num_completions=N, noise=noise, max_rows=max_rows,
        steps_between_looks=looks,
    )  # fmt: skip


@functools.cache
def all_at_once(family, **settings):
    """Completions without a bound on rows, the noise that draws them whatever the round-off, and
    their log-probs in float64."""
    model = tiny_model(family, **settings)
    first = completions(model, max_rows=None)
    noise = centred(NOISE, model, *prompts(), first, N)
    expected = completions(model, max_rows=None, noise=noise)
    return expected, noise, exact_logprobs(model, *prompts(), expected, N)


def assert_same(out, expected, exact):
    assert torch.equal(out.completion_ids, expected.completion_ids)
    assert torch.equal(out.completion_mask, expected.completion_mask)
    assert torch.equal(out.finished, expected.finished)
    assert_as_near(out.logprobs, expected.logprobs, exact)


@crossed(
    family=["llama", "qwen3", "mistral (sliding window)", "gpt2", "gemma2 (soft-cap)",
            "bloom (alibi)"],
    max_rows=[1, 3 * N + 1, 8 * N],  # rounded to 1, 3 and 8 groups
)  # fmt: skip
def test_any_number_of_places_gives_the_same_completions(family, max_rows):
    own_head = {"tie_word_embeddings": False} if family[:5] in ("gemma", "bloom") else {}
    expected, noise, exact = all_at_once(family, **own_head)
    assert len(expected.completion_mask.sum(dim=1).unique()) > 4, "lengths should be mixed"
    model = tiny_model(family, **own_head)
    assert_same(completions(model, max_rows=max_rows, noise=noise), expected, exact)


@pytest.mark.parametrize("looks", [2, 8, 100])
def test_rows_that_have_ended_and_are_not_yet_dropped_change_nothing(looks):
    for family in ("llama", "gpt2"):
        expected, noise, exact = all_at_once(family)
        found = completions(tiny_model(family), max_rows=2 * N, looks=looks, noise=noise)
        assert_same(found, expected, exact)


@pytest.mark.parametrize(
    "settings",
    [
        {"greedy": True},
        {"min_new_tokens": 7},
        {"greedy": True, "min_new_tokens": 7},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_new_tokens": 3},
        {"max_new_tokens": 1},
        {"stop_token_ids": range(VOCAB)},  # every row ends with its first token
        {"stop_token_ids": (96,)},  # nearly none ends before the limit
    ],
    ids=str,
)
def test_settings_mean_the_same(settings):
    model = tiny_model("llama")
    expected = completions(model, max_rows=None, **settings)
    exact = completions(model.double(), max_rows=None, **settings).logprobs.double()
    assert_same(completions(tiny_model("llama"), max_rows=3 * N, **settings), expected, exact)


def test_places_are_filled_again_and_the_cache_stays_small():
    """Of 18 rows with 6 places the cache holds 6; fewer steps are taken than one by one."""
    model = tiny_model("llama")
    ids, mask = prompts()
    params = SamplingParams(PAD, stop_token_ids=STOPS, max_new_tokens=STEPS)
    noise = uniform_noise(1, range(NUM_GROUPS * N), STEPS)
    decoder = Decoder(
        DecodePlan.of(model), steps=STEPS, max_rows=3 * N,
        room=(3 * N, capacity(9, params, 1)),
    )  # fmt: skip
    put_batch(decoder, ids, mask, params, N, noise)
    most, addresses = 0, set()
    with torch.inference_mode():
        while decoder.num_rows:
            decoder.step()
            most = max(most, len(decoder.rows))
            (block,) = decoder.blocks
            addresses.add(block.cache.layers[0].keys.data_ptr())
    assert most == 3 * N and len(addresses) == 1
    assert len(block.cache.layers[0].keys) == 3 * N
    # Nine tokens of the longest prompt, twice 24 and one for the step between two looks.
    assert block.cache.layers[0].keys.shape[2] == 9 + 2 * STEPS + 1
    assert not len(decoder.queue) and not len(decoder.rows)


def test_a_cache_lets_rows_in_that_end_where_the_others_end():
    cache = SharedPromptCache(1, capacity=0)
    prompts = [SharedPromptCache(1, length) for length in (3, 1)]
    for value, prompt in enumerate(prompts, start=1):
        states = torch.full((1, 1, 4 - value if value == 1 else 1, 2), float(value))
        prompt.layers[0].update(states, -states)
    cache.admit(prompts[0], [2], room=(4, 6))
    step = torch.full((2, 1, 1, 2), 9.0)
    cache.layers[0].update(step, -step)
    cache.admit(prompts[1], [2], room=(4, 6))
    assert cache.length == 4
    layer = cache.layers[0]
    assert layer.num_rows == 4
    assert layer.keys[:2, 0, :4, 0].tolist() == [[1, 1, 1, 9]] * 2
    assert layer.keys[2:, 0, 3, 0].tolist() == [2, 2]
    # The first two rows leave; three columns are padding now.
    cache.move_rows(torch.tensor([2, 3]), torch.tensor([0, 1]), 2)
    cache.look_from(3)
    assert layer.get_seq_length() == 1 and layer.get_mask_sizes(1) == (2, 0)
    cache.shift(2)
    assert (layer.first, layer.length) == (1, 2)
    keys, values = layer.update(step, -step)
    assert keys[:, 0, :, 0].tolist() == [[2, 9]] * 2
    assert torch.equal(values, -keys)
