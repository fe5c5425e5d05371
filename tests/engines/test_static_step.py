"""A decode step that is recorded and repeated gives the completions of one that is not."""

from __future__ import annotations

import copy

import pytest
import torch

from rllib_llm.engines.decode_step import (
    CudaGraph,
    DecodePlan,
    StaticLlamaStep,
    can_be_recorded,
    open_decode_step,
    positions_of_record,
    visible,
)
from rllib_llm.engines.decoder import Decoder
from rllib_llm.engines.engine import generate, put_batch
from rllib_llm.engines.kv_cache import SharedPromptCache
from rllib_llm.engines.llama_step import LlamaStep
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Completions, uniform_noise
from tests.engines.recording import Recording
from tests.modules.tiny_models import VOCAB, tiny_model
from tests.rounding import assert_as_near

PAD = 0
SHORT, LONG = (9, 3, 5, 1, 7), (115, 3, 61, 1, 107)
CASES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2 (tied)", {}),
    "qwen3": ("qwen3", {}),
    "mistral, window": ("mistral (sliding window)", {}),
    "qwen2, window in one layer": (
        "qwen2 (tied)",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
}


def prompts(lengths=SHORT, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and mask [5, longest]."""
    torch.manual_seed(5)
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    ids = torch.randint(3, VOCAB, mask.shape).masked_fill(~mask, PAD)
    return ids.to(device), mask.to(device)


class Records:
    """Opens decode steps that are recorded, and counts the records."""

    def __init__(self, record=Recording) -> None:
        self.record = record
        self.made = []

    def open(self, plan, steps, value_head=None):
        return StaticLlamaStep(LlamaStep(plan.model, steps, value_head), self._record)

    def _record(self, function, previous):
        self.made.append(self.record(function, previous))
        return self.made[-1]


def completions(model, params, n, open_step, lengths=SHORT, device="cpu") -> Completions:
    ids, mask = prompts(lengths, device)
    steps = params.max_new_tokens
    noise = uniform_noise(1, range(len(ids) * n), steps).to(device)
    room = (len(ids) * n, ids.shape[1] + steps)
    decoder = Decoder(
        DecodePlan.of(model), steps=steps, steps_between_looks=2, room=room,
        open_step=open_step, block_cost=float("inf"),
    )  # fmt: skip
    put_batch(decoder, ids, mask, params, n, noise)
    with torch.inference_mode():
        while decoder.num_rows:
            decoder.step()
    return decoder.buffers.completions(params)


@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_transformers_over_a_border(case):
    family, settings = CASES[case]
    model = tiny_model(family, **settings)
    params = SamplingParams(pad_token_id=PAD, max_new_tokens=30, greedy=True)
    records = Records()
    out = completions(model, params, 2, records.open, LONG)
    ids, mask = prompts(LONG)
    expected = model.generate(
        input_ids=ids, attention_mask=mask.long(), do_sample=False, max_new_tokens=30,
        eos_token_id=None, pad_token_id=PAD,
    )[:, 115:].repeat_interleave(2, dim=0)  # fmt: skip
    assert torch.equal(out.completion_ids, expected)
    assert len(records.made) == 2  # positions 115 to 144, a border at 128
    plain = completions(model, params, 2, open_decode_step, LONG)
    exact = completions(copy.deepcopy(model).double(), params, 2, open_decode_step, LONG)
    assert_as_near(out.logprobs, plain.logprobs, exact.logprobs.double())


@pytest.mark.parametrize("case", CASES)
def test_sampled_rows_that_end_are_dropped(case):
    family, settings = CASES[case]
    model = tiny_model(family, **settings)
    params = SamplingParams(
        pad_token_id=PAD, max_new_tokens=40, stop_token_ids=(2, 3, 4, 5), top_p=0.95
    )
    records = Records()
    out = completions(model, params, 8, records.open)
    plain = completions(model, params, 8, open_decode_step)
    assert torch.equal(out.completion_ids, plain.completion_ids)
    assert torch.equal(out.completion_mask, plain.completion_mask)
    exact = completions(copy.deepcopy(model).double(), params, 8, open_decode_step)
    assert_as_near(out.logprobs, plain.logprobs, exact.logprobs.double())
    # One for all 40 rows, one more where at most 10 are left while 16 tokens are to come.
    left = out.completion_mask.sum(dim=0)
    assert left[24] < 40 and len(records.made) == 1 + bool(left[24] <= 10)


def test_a_record_of_few_rows_replaces_a_wasteful_one():
    model = tiny_model("llama")
    records = Records()
    step = records.open(DecodePlan.of(model), 64)
    with torch.inference_mode():
        cache, positions = prefilled(model, rows=40, capacity=64)
        step(torch.full((40,), 7), positions, [(cache, None)])
        assert (step.num_rows, step.num_positions) == (40, 64)
        cache.move_rows(torch.tensor([20]), torch.tensor([3]), 11)
        step(torch.full((11,), 8), positions[:11] + 1, [(cache, None)])
        assert len(records.made) == 1  # 11 of 40 rows are more than a quarter
        cache.move_rows(torch.tensor([10]), torch.tensor([0]), 9)
        logits = step(torch.full((9,), 9), positions[:9] + 2, [(cache, None)])
        assert (step.num_rows, len(records.made)) == (16, 2)  # rounded up to eight
        assert logits.shape == (9, VOCAB)
        assert cache.length == 12


def prefilled(model, rows: int, capacity: int) -> tuple[SharedPromptCache, torch.Tensor]:
    """A cache of the same 9 tokens in all rows, and the next positions."""
    cache = SharedPromptCache(len(model.model.layers), capacity)
    model(input_ids=prompts()[0][:1].expand(rows, -1), past_key_values=cache)
    return cache, torch.full((rows,), 9)


def test_few_tokens_are_not_worth_a_record():
    model = tiny_model("llama")
    for max_new_tokens, num_records in ((15, 0), (16, 1)):
        params = SamplingParams(pad_token_id=PAD, max_new_tokens=max_new_tokens, greedy=True)
        records = Records()
        out = completions(model, params, 1, records.open)
        plain = completions(model, params, 1, open_decode_step)
        assert torch.equal(out.completion_ids, plain.completion_ids)
        assert len(records.made) == num_records


def test_a_replay_reads_the_inputs_as_they_are_now():
    # The same record, other tokens, positions and column: other logits, those of the plain step.
    model = tiny_model("mistral (sliding window)")
    records = Records()
    step = records.open(DecodePlan.of(model), 64)
    with torch.inference_mode():
        cache, positions = prefilled(model, rows=3, capacity=64)
        other, _ = prefilled(model, rows=3, capacity=64)
        for layer in cache.layers:  # what memory may hold that was never written
            layer.keys[:, :, 9:] = layer.values[:, :, 9:] = torch.nan
        plain = LlamaStep(model, 64)
        for i in range(5):
            tokens = torch.tensor([11, 12, 13]) + 7 * i
            logits = step(tokens, positions + i, [(cache, None)])
            expected = plain(tokens, positions + i, [(other, None)])
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    assert len(records.made) == 1
    for layer, same in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, :14], same.keys[:, :, :14])
        assert layer.length == same.length == 14


def test_what_a_record_reads_lives_as_long_as_the_step():
    # A graph keeps addresses, not tensors.
    model = tiny_model("qwen3")
    records = Records()
    step = records.open(DecodePlan.of(model), 64)
    with torch.inference_mode():
        cache, positions = prefilled(model, rows=3, capacity=64)
        step(torch.tensor([11, 12, 13]), positions, [(cache, None)])
    held = [step.tokens, step.positions, step.column, *model.parameters(), *model.buffers()]
    held += [buffer for layer in cache.layers for buffer in (layer.keys, layer.values)]
    for layer in step.step.layers:
        held += [layer.qkv.matrix, layer.output.matrix, layer.down.matrix]
        held += [layer.gate.matrix, layer.up.matrix]
    held.append(step.step.head.matrix)
    addresses = {tensor.untyped_storage().data_ptr() for tensor in held}
    assert records.made[0].inputs <= addresses
    for tensor in (step.tokens, step.positions, step.column, cache.layers[1].values):
        assert tensor.untyped_storage().data_ptr() in records.made[0].inputs


def test_positions_of_a_record():
    assert positions_of_record(length=0, capacity=1000) == 128
    assert positions_of_record(length=127, capacity=1000) == 128
    assert positions_of_record(length=128, capacity=1000) == 256
    assert positions_of_record(length=100, capacity=144) == 128  # 16 are left for the next
    assert positions_of_record(length=100, capacity=143) == 143
    assert positions_of_record(length=100, capacity=120) == 120


def test_visible_columns():
    column, positions = torch.tensor([3]), torch.tensor([3, 1])  # the second row: two of padding
    everything = [[1, 1, 1, 1, 0], [0, 0, 1, 1, 0]]
    last_three = [[0, 1, 1, 1, 0], [0, 0, 1, 1, 0]]
    assert visible(column, positions, 5, None).int().tolist() == everything
    assert visible(column, positions, 5, 3).int().tolist() == last_three


def test_rotations_that_depend_on_the_longest_row_are_not_recorded():
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert can_be_recorded(tiny_model("llama"))
    assert not can_be_recorded(tiny_model("llama", rope_parameters=dynamic))


def test_nothing_is_recorded_on_a_cpu():
    model = tiny_model("llama")
    step = open_decode_step(DecodePlan.of(model), 64, cuda_graphs=True)
    assert type(step) is LlamaStep


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_graphs_give_the_same_tokens(case, greedy):
    family, settings = CASES[case]
    model = tiny_model(family, **settings).cuda()
    params = SamplingParams(
        pad_token_id=PAD, max_new_tokens=60, stop_token_ids=() if greedy else (2,), greedy=greedy
    )
    ids, mask = prompts(LONG, "cuda")
    noise = uniform_noise(1, range(40), 60)
    with_graphs, without = (
        generate(model, ids, mask, params, num_completions=8, noise=noise, cuda_graphs=cuda_graphs)
        for cuda_graphs in (True, False)
    )
    assert torch.equal(with_graphs.completion_ids, without.completion_ids)
    torch.testing.assert_close(with_graphs.logprobs, without.logprobs, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_graph_serves_all_tokens_up_to_a_border():
    model = tiny_model("llama").cuda()
    device = torch.device("cuda")
    records = Records(lambda function, previous: CudaGraph(function, previous, device))
    params = SamplingParams(pad_token_id=PAD, max_new_tokens=60, greedy=True)
    completions(model, params, 8, records.open, LONG, "cuda")
    assert len(records.made) == 2
