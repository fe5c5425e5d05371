"""Attention in bfloat16 by products, against the same attention of the same numbers in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rllib_llm.modules.packed_attention import (
    AttentionLayout,
    half_attention,
    lay_out_heads,
    packed_attention,
    reads_half,
)
from rllib_llm.modules.packing import completion_rows, pack_dense

HEAD_DIM = 16


def layout_of(
    rows: int, prompt: int, completion: int, *, shared: bool, mixed: bool, recurring: bool = False
) -> AttentionLayout:
    """Rows of which four have each prompt, or one; of one length, or of 1 to the longest."""
    groups = rows // 4 if shared else rows
    prompts = torch.randint(100, (groups, prompt)).repeat_interleave(rows // groups, dim=0)
    prompt_mask = torch.ones(rows, prompt, dtype=torch.bool)
    prompt_mask[:4, : prompt // 2] = not mixed
    lengths = torch.randint(1, completion + 1, (rows, 1)) if mixed else completion
    mask = torch.arange(completion).expand(rows, -1) < lengths
    rows_of_text = completion_rows(prompts, prompt_mask, torch.randint(100, mask.shape), mask)
    packed = pack_dense(rows_of_text, recurring=recurring)
    assert packed.layout is not None
    return packed.layout


def differences(
    layout: AttentionLayout, heads: int, key_heads: int, size: float
) -> tuple[list[float], list[float]]:
    """Relative difference from float64 of result, gradients of query, key and value: of ours, and
    of the same computed by torch in bfloat16. `size`: standard deviation of the scores."""
    tokens = len(layout.places)
    made = [torch.randn(tokens, n, HEAD_DIM) for n in (heads, key_heads, key_heads)]
    made[0] *= size
    made.append(torch.randn(tokens, heads * HEAD_DIM))
    made = [tensor.bfloat16() for tensor in made]
    module = SimpleNamespace(num_key_value_groups=heads // key_heads, training=False)
    scale = HEAD_DIM**-0.5

    def by_torch(*states: torch.Tensor) -> torch.Tensor:
        spread = (state.transpose(0, 1).unsqueeze(0) for state in states)
        return packed_attention(module, *spread, None, layout, scaling=scale)[0][0].flatten(1)

    def ours(*states: torch.Tensor) -> torch.Tensor:
        return half_attention(*states, lay_out_heads(layout, heads, key_heads), scale)

    def results(attend, dtype: torch.dtype) -> list[torch.Tensor]:
        *states, grad = (tensor.to(dtype) for tensor in made)
        states = [state.requires_grad_() for state in states]
        attended = attend(*states)
        return [attended, *torch.autograd.grad(attended, states, grad)]

    exact = [found.detach() for found in results(by_torch, torch.float64)]

    def away(found: list[torch.Tensor]) -> list[float]:
        return [
            float((a.detach() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)
        ]

    return away(results(ours, torch.bfloat16)), away(results(by_torch, torch.bfloat16))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("recurring", [True, False])
def test_result_and_gradients_are_exact_up_to_rounding(shared, mixed, key_heads, recurring):
    torch.manual_seed(0)
    layout = layout_of(8, 6, 11, shared=shared, mixed=mixed, recurring=recurring)
    ours, _ = differences(layout, 4, key_heads, 1.0)
    # Each number is rounded a few times, by 2^-9 at most: 0.2 %.
    assert max(ours) < 0.006


@pytest.mark.parametrize("size", [4.0, 16.0])
def test_large_scores_are_not_rounded(size):
    """Scores rounded to eight bits would be off by 2^-9 of them: at 48, three deviations, by a
    tenth, and their weights with them. The gradients are nearly as near as those of torch's
    float32, or within a hundredth of their size: the result, of which they have the mean, is
    rounded to eight bits."""
    torch.manual_seed(0)
    layout = layout_of(8, 6, 11, shared=True, mixed=False)
    ours, by_torch = differences(layout, 4, 4, size)
    for ours_is_off, torch_is_off in zip(ours, by_torch, strict=True):
        assert ours_is_off < max(3 * torch_is_off, 0.01)


# More than 2^21 scores: five rows and then three, or three heads of each row and then three.
@pytest.mark.parametrize("rows, completion, heads", [(8, 200, 8), (2, 800, 6)])
def test_many_scores_are_computed_in_parts(rows, completion, heads):
    torch.manual_seed(0)
    layout = layout_of(rows, 20, completion, shared=False, mixed=completion == 200)
    ours, _ = differences(layout, heads, heads, 1.0)
    assert max(ours) < 0.008


def test_long_rows_and_other_precisions_are_left_to_torch():
    layout = layout_of(4, 2, 3, shared=True, mixed=False)
    assert reads_half(layout, torch.bfloat16, torch.device("cpu"))
    assert not reads_half(layout, torch.float32, torch.device("cpu"))
    assert not reads_half(layout, torch.bfloat16, torch.device("meta"))
    long = layout_of(2, 1, 4098, shared=False, mixed=False)  # 4098^2 scores, more than 2^24
    assert not reads_half(long, torch.bfloat16, torch.device("cpu"))
