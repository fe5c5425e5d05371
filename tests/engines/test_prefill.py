"""Long prompts in pieces: the same logits and the same cache, with fewer positions at once."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.engines.kv_cache import make_cache
from rllib_llm.engines.prefill import prefill
from tests.engines.test_torch_engine import tiny_model

LENGTHS = (9, 4, 7)


def prompts():
    """Left-padded ids and mask [3, 9]."""
    mask = torch.arange(9) >= 9 - torch.tensor(LENGTHS).unsqueeze(1)
    return (torch.arange(27).reshape(3, 9) * 5 % 23 + 1).where(mask, 0), mask


def filled(model, piece_tokens: int):
    """Logits, the cache, and how many tokens each pass had."""
    ids, mask = prompts()
    cache, passes = make_cache(model.config, 1, 12), []

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
