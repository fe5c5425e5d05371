"""Weights that are laid out for decoding: the same products."""

from __future__ import annotations

import torch

from rllib_llm.engines.llama_step import (
    packed,
    packed_linear,
    pays,
    pays_packed,
    transposed,
)
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


def test_packed_weights_give_the_same_products():
    torch.manual_seed(0)
    inputs, weight = torch.randn(4, 32).bfloat16(), torch.randn(48, 32).bfloat16()
    bias, residual = torch.randn(48).bfloat16(), torch.randn(4, 48).bfloat16()
    exact = inputs.double() @ weight.double().t() + bias.double()
    with torch.inference_mode():
        laid_out = packed(weight)
        # Rounded once, to eight bits.
        for found, expected in (
            (packed_linear(inputs, laid_out, bias), exact),
            (packed_linear(inputs, laid_out, bias, residual), exact + residual.double()),
        ):
            torch.testing.assert_close(found.double(), expected, rtol=2.0**-8, atol=2.0**-6)


def test_packing_pays_in_bfloat16_where_the_processor_multiplies_it():
    weight = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert pays_packed(weight, steps=64) == multiplies_bfloat16()
    assert not pays_packed(weight, steps=4)
    assert not pays_packed(weight.float(), steps=64)
    assert not pays_packed(weight.to("meta"), steps=64)
    assert not pays_packed(torch.empty(2**13, 2**12, dtype=torch.bfloat16), steps=64)
