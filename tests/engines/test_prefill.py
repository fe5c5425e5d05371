"""Long prompts in pieces: the same logits and the same cache, with fewer positions at once."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.engines.decode_step import DecodePlan, prefill, recurring_length
from tests.engines.test_torch_engine import tiny_model

LENGTHS = (9, 4, 7)


def prompts():
    """Left-padded ids and mask [3, 9]."""
    mask = torch.arange(9) >= 9 - torch.tensor(LENGTHS).unsqueeze(1)
    return (torch.arange(27).reshape(3, 9) * 5 % 23 + 1).where(mask, 0), mask


def filled(model, piece_tokens: int):
    """Logits, the cache, and how many tokens each pass had."""
    ids, mask = prompts()
    cache, passes = DecodePlan.of(model).make_cache(12), []

    def count(module, args, kwargs):
        passes.append(kwargs["input_ids"].numel())

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    with torch.no_grad():
        logits = prefill(model, None, ids, mask, cache, piece_tokens=piece_tokens)
    hook.remove()
    return logits, cache, passes


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral (sliding window)", "gpt2"])
def test_pieces_compute_what_the_whole_does(family):
    model = tiny_model(family)  # in double precision
    whole, whole_cache, passes = filled(model, 100)
    assert passes == [27]
    mask = prompts()[1]
    for piece_tokens, expected in ((7, [6, 6, 6, 6, 3]), (1, [3] * 9), (12, [12, 12, 3])):
        logits, cache, passes = filled(model, piece_tokens)
        assert passes == expected
        torch.testing.assert_close(logits, whole, atol=1e-10, rtol=0)
        for layer, other in zip(cache.layers, whole_cache.layers, strict=True):
            for name in ("keys", "values"):
                mine, theirs = (
                    getattr(each, name)[:, :, :9].transpose(1, 2)[mask] for each in (layer, other)
                )
                torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)


def test_a_few_positions_more_make_sizes_that_come_again():
    # Prompts, longest: 16 and 32 tokens; 8 x 32; 3 x 48 = 144; 256 a step from 2048 on: 2 x 1152,
    # and from 8192 on: 256 x 33.
    lengths = {(1, 9): 16, (1, 20): 32, (8, 32): 32, (3, 41): 48, (2, 1060): 1152, (256, 33): 33}
    assert {key: recurring_length(*key) for key in lengths} == lengths
    # 31 x 128 would be 28 % more; 31 x 112 is a multiple of 16.
    assert recurring_length(31, 100) == 112


def test_prompts_of_any_length_have_few_sizes():
    # 16 ... 128, and 8 numbers in each of five octaves up to 4096.
    assert len({recurring_length(1, length) for length in range(1, 4097)}) == 8 + 5 * 8
    several = {(num, n) for num in range(1, 17) for n in range(1, 257)}
    sizes = {num * recurring_length(num, length) for num, length in several}
    assert all(size % 16 == 0 for size in sizes)
    assert all(n <= recurring_length(num, n) <= n + max(15, n // 8) for num, n in several)
