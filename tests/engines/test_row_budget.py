"""Memory of a row, and that a CPU has no bound."""

from __future__ import annotations

from transformers import AutoConfig

from rllib_llm.engines.row_budget import bytes_of_row, row_budget
from tests.modules.tiny_models import tiny_model


def test_a_row_costs_its_keys_values_and_logits():
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
        hidden_size=128, vocab_size=1000,
    )  # fmt: skip

    # Keys and values: 2 x 3 layers x 2 heads x 16 numbers x 2 bytes x 100 positions; logits:
    # 8 copies of 1000 float32.
    assert bytes_of_row(config, positions=100, itemsize=2) == 2 * 3 * 2 * 16 * 2 * 100 + 32_000


def test_models_without_grouped_key_heads():
    config = AutoConfig.for_model("gpt2", n_layer=2, n_head=4, n_embd=64, vocab_size=10)

    assert bytes_of_row(config, positions=5, itemsize=4) == 2 * 2 * 64 * 5 * 4 + 8 * 10 * 4


def test_a_cpu_has_no_bound():
    assert row_budget(tiny_model("llama"), positions=1000) is None
