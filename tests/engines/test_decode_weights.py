"""Weights that are laid out for decoding: the same products."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.engines.llama_step import (
    _Projection,
    packed,
    packed_linear,
    pays,
    pays_packed,
    transposed,
)
from rllib_llm.modules.precision import use_onednn
from rllib_llm.shared.process import multiplies_bfloat16


def test_weights_lie_side_by_side_and_apart_from_powers_of_two():
    first, second = torch.randn(70, 8), torch.randn(3, 8)

    copy = transposed([first, second])

    assert torch.equal(copy, torch.cat([first, second]).t())
    assert copy.stride() == (70 + 3 + 16, 1)


def test_it_pays_on_a_cpu_in_float32_over_many_steps():
    weight = torch.zeros(2, 2)
    assert pays(weight, steps=64)
    assert not pays(weight, steps=4)
    assert not pays(weight.bfloat16(), steps=64)
    assert not pays(weight.to("meta"), steps=64)


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [
        # Rounded once, to eight bits. Elsewhere nothing packs bfloat16 (next test), and oneDNN has
        # no layout for it on processors that have AVX2 alone.
        pytest.param(
            torch.bfloat16,
            2.0**-8,
            2.0**-6,
            marks=pytest.mark.skipif(
                not multiplies_bfloat16(), reason="the processor has neither AMX nor AVX512-BF16"
            ),
        ),
        (torch.float32, 2.0**-20, 2.0**-18),  # sums of 32, each rounded to 24 bits
    ],
)
def test_packed_weights_give_the_same_products(dtype, rtol, atol):
    torch.manual_seed(0)
    inputs, weight = torch.randn(4, 32).to(dtype), torch.randn(48, 32).to(dtype)
    bias, residual = torch.randn(48).to(dtype), torch.randn(4, 48).to(dtype)
    exact = inputs.double() @ weight.double().t() + bias.double()
    with torch.inference_mode():
        laid_out = packed(weight)
        for found, expected in (
            (packed_linear(inputs, laid_out, bias), exact),
            (packed_linear(inputs, laid_out, bias, residual), exact + residual.double()),
        ):
            torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)


def test_packing_pays_in_float32_and_where_the_processor_multiplies_bfloat16():
    weight = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert pays_packed(weight, steps=64) == multiplies_bfloat16()
    assert not pays_packed(weight, steps=4)
    assert pays_packed(weight.float(), steps=64)
    assert not pays_packed(weight.float(), steps=4)
    assert not pays_packed(weight.to("meta"), steps=64)
    assert not pays_packed(torch.empty(2**13, 2**12, dtype=torch.bfloat16), steps=64)


@pytest.mark.parametrize("steps", [4, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_projection_of_onednn_is_the_linear_layers(steps, has_bias):
    """Several layers side by side, packed over many steps and as they lie over few."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, size, bias=has_bias) for size in (48, 16)]
    use_onednn(torch.nn.ModuleList(layers))
    inputs, residual = torch.randn(4, 32), torch.randn(4, 64)
    with torch.inference_mode():
        exact = torch.cat([layer.double()(inputs.double()) for layer in layers], dim=1)
        projection = _Projection([layer.float() for layer in layers], steps)
        found = projection.apply(inputs)
        added = projection.add_to(residual, inputs)
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-20, atol=2.0**-18)
    expected = exact + residual.double()
    torch.testing.assert_close(added.double(), expected, rtol=2.0**-20, atol=2.0**-18)
