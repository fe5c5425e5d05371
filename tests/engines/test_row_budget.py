"""Memory of a row, of a process's share of a GPU, and what happens where it does not suffice."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import uniform_noise
from rllib_llm.engines.row_blocks import FEWER_ROWS, bytes_of_row, bytes_to_plan, row_budget
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


GIB = 2**30


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "share", "expected"),
    [
        (80, 0, 0, 1.0, 0.8 * 80),
        # Two processes that see 76 free GiB beside their own 2: either plans with its half.
        (76, 2, 2, 0.5, 0.8 * (40 - 2)),
        # The other has taken more than its half.
        (20, 10, 4, 0.5, 0.8 * (20 + 10 - 4)),
        # Torch holds 10 GiB of which 4 are in use: 6 are free.
        (60, 10, 4, 1.0, 0.8 * 66),
        (60, 45, 45, 0.5, 0.0),
    ],
)
def test_a_process_plans_with_its_own_share_of_a_gpu(free, reserved, allocated, share, expected):
    planned = bytes_to_plan(
        free=free * GIB, total=80 * GIB, reserved=reserved * GIB, allocated=allocated * GIB,
        share=share,
    )  # fmt: skip

    assert planned == pytest.approx(expected * GIB)


class ShortOfMemory(LlamaForCausalLM):
    """A model on a device that holds the logits of `most` prompts."""

    most = 3

    def forward(self, input_ids=None, **inputs):
        if input_ids.shape[1] == 5 and len(input_ids) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(input_ids=input_ids, **inputs)


def test_completions_are_the_same_when_memory_runs_out():
    model = tiny_model("llama")
    short = ShortOfMemory(model.config).eval()
    short.load_state_dict(model.state_dict())
    ids = torch.randint(3, 20, (8, 5), generator=torch.Generator().manual_seed(0))
    params = SamplingParams(pad_token_id=0, max_new_tokens=4)
    settings = {"num_completions": 2, "noise": uniform_noise(0, range(16), 4)}
    mask, told = torch.ones_like(ids, dtype=torch.bool), []

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        less = generate(short, ids, mask, params, on_fewer_rows=told.append, **settings)

    assert told == [8, 4]
    assert [str(each.message) for each in said] == [FEWER_ROWS.format(n) for n in told]
    assert torch.equal(
        less.completion_ids, generate(model, ids, mask, params, **settings).completion_ids
    )


def test_rows_of_one_prompt_that_do_not_fit_end_the_run():
    short = ShortOfMemory(tiny_model("llama").config).eval()
    short.most = 0
    ids = torch.full((2, 5), 7)
    params = SamplingParams(pad_token_id=0, max_new_tokens=4, greedy=True)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with pytest.raises(torch.OutOfMemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generate(short, ids, mask, params, num_completions=8)
