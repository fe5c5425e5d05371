"""Rows of unlike length have caches of their own: each pays for its length, and no more."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

from rllib_llm.engines.decode_step import DecodePlan
from rllib_llm.engines.decoder import Decoder
from rllib_llm.engines.engine import put_batch
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Noise, Row, uniform_noise
from rllib_llm.engines.row_blocks import alike, cost_of_block, is_alike
from tests.crossed import crossed
from tests.engines.test_kept_prefixes import dialogues
from tests.engines.test_torch_engine import (
    alone,
    assert_sampled,
    engine,
    tiny_model,
    until_empty,
)
from tests.engines.tiny_generations import PAD, STOPS, continued
from tests.modules.tiny_models import VOCAB

WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
FAMILIES = {
    "llama": ("llama", {}),
    "grouped key heads": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "normed queries": ("qwen3", {}),
    "all layers slide": ("mistral (sliding window)", {}),
    "one layer slides": ("qwen2 (tied)", WINDOW),
}

# --- which rows belong together ------------------------------------------------------------------


def cost_of(parts, lengths, rows, cost) -> int:
    return sum(cost + rows[part].sum() * lengths[part].max() for part in parts)


@pytest.mark.parametrize("cost", [0, 3, 20, 100])
def test_parts_cost_the_least_there_is(cost):
    """Against all ways to cut the sorted lengths: 2 to the 6 of them."""
    rng = np.random.default_rng(cost)
    for _ in range(20):
        lengths, rows = rng.integers(1, 60, 7), rng.integers(1, 4, 7)
        order = lengths.argsort()
        ways = [
            np.split(order, [i for i, cut in enumerate(cuts, 1) if cut])
            for cuts in itertools.product([False, True], repeat=6)
        ]
        least = min(cost_of(way, lengths, rows, cost) for way in ways)
        parts = alike(lengths, rows, cost)
        assert cost_of(parts, lengths, rows, cost) == least
        assert sorted(itertools.chain(*parts)) == list(range(7))
        assert is_alike(lengths, rows, cost) == (least == cost_of([order], lengths, rows, cost))


def test_parts_of_two_kinds_of_prompts():
    lengths, rows = np.array([16] * 3 + [1500] + [16]), np.ones(5, dtype=np.int64)
    # 5 x 1500 in one block are 5936 more than 4 x 16 + 1500.
    assert alike(lengths, rows, 5935) == [[0, 1, 2, 4], [3]]
    assert alike(lengths, rows, 5936) == [[0, 1, 2, 3, 4]]


def test_what_a_block_has_to_save():
    """It falls with the bytes of a position, and a GPU has one block."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    config = AutoConfig.for_model("llama", num_key_value_heads=4, **sizes)
    grouped = AutoConfig.for_model("llama", num_key_value_heads=1, **sizes)
    cpu = torch.device("cpu")
    # Keys and values of a position and layer: 2 x 64 numbers, of 4 bytes each.
    assert cost_of_block(config, 4, cpu) == 4_000_000 / (2 * 64 * 4)
    assert cost_of_block(config, 2, cpu) == 2 * cost_of_block(config, 4, cpu)
    assert cost_of_block(grouped, 4, cpu) == 4 * cost_of_block(config, 4, cpu)
    assert cost_of_block(config, 4, torch.device("cuda")) == float("inf")


# --- what it costs -------------------------------------------------------------------------------


class Attended(TorchFunctionMode):
    """Row positions that attention goes over, all layers and steps together."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            rows, _, positions, _ = args[1].shape
            self.positions += rows * positions
        return func(*args, **(kwargs or {}))


LENGTHS, STEPS = (2, 20, 2, 2), 5


def decoder(cost: float, lengths=LENGTHS, steps=STEPS) -> Decoder:
    """Of a model with two layers; nothing is sampled yet."""
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    ids = torch.randint(3, VOCAB, mask.shape, generator=torch.Generator().manual_seed(0))
    rows = len(lengths)
    noise = uniform_noise(0, range(rows), steps)
    room = rows, max(lengths) + steps
    plan = DecodePlan.of(tiny_model("llama"))
    made = Decoder(plan, steps=steps, room=room, block_cost=cost)
    params = SamplingParams(PAD, max_new_tokens=steps)
    put_batch(made, ids.masked_fill(~mask, PAD), mask, params, 1, noise)
    return made


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        # Behind the first token, which is the prefill's, four steps whose attention sees the
        # prompt and 1 to 4 tokens: 3 x (3 + 4 + 5 + 6) and 21 + 22 + 23 + 24, in two layers.
        (0, 2 * (3 * 18 + 90)),
        # 4 x 22 positions of one block are 54 more than of two: 54 has to be saved, or more.
        (53, 2 * (3 * 18 + 90)),
        (54, 2 * (4 * 90)),
    ],
)
def test_positions_that_steps_attend_to(cost, expected):
    rows = decoder(cost)
    with torch.inference_mode(), Attended() as attended:
        rows.step()
        attended.positions = 0
        while rows.num_rows:
            rows.step()
    assert attended.positions == expected


@pytest.mark.parametrize(
    ("cost", "expected"), [(0, 3 * (2 + STEPS) + 20 + STEPS), (1e9, 4 * (20 + STEPS))]
)
def test_positions_that_are_held(cost, expected):
    rows = decoder(cost)
    with torch.inference_mode():
        rows.step()
    held = sum(block.cache.layers[0].keys[:, 0, :, 0].numel() for block in rows.blocks)
    assert held == expected


def test_caches_go_with_the_decoder():
    """And do not wait for the collector of garbage: the next one needs the memory."""
    rows = decoder(0)
    with torch.inference_mode():
        rows.step()
    held = weakref.ref(next(iter(rows.blocks)).cache)
    del rows
    assert held() is None


def test_rows_do_not_pay_for_one_that_has_left():
    """Of one block: 22 positions each while the long row is there, then their own."""
    rows = decoder(1e9)
    with torch.inference_mode():
        rows.step()
        rows.remove([1])
        with Attended() as attended:
            rows.step()
    assert attended.positions == 2 * 3 * (2 + 1)


def test_rows_of_one_length_are_in_one_block_bit_for_bit():
    logits = []
    for cost in (0, float("inf")):
        rows = decoder(cost, lengths=(7, 7, 7))
        with torch.inference_mode():
            while rows.num_rows:
                rows.step()
                assert len(rows.blocks) == 1
        logits.append(rows.buffers.completions(SamplingParams(PAD)).logprobs)
    assert torch.equal(*logits)


def test_a_block_of_few_rows_moves_in_with_a_longer_one():
    """Three short rows save 3 x 18 positions beside the long one, and one of them 18: half of what
    a new block has to save, and no more."""
    rows = decoder(36)
    with torch.inference_mode():
        rows.step()
        assert [len(block) for block in rows.blocks] == [3, 1]
        rows.remove([0])
        assert len(rows.blocks) == 2
        rows.remove([2])
        (block,) = rows.blocks
        assert block.lengths.tolist() == [20, 2]
        while rows.num_rows:
            rows.step()


def test_rows_that_trickle_in_do_not_fill_the_block_of_a_long_one():
    """Each of them alone would save half of what a block has to, and all of them more than that."""
    ours = engine_with(tiny_model("llama", max_position_embeddings=128), 60)
    params = SamplingParams(PAD, max_new_tokens=24)
    ours.add([Row("long", [5] * 40, params)])
    ours.step()
    for i in range(6):
        ours.add([Row((i, k), [5] * 10, params) for k in range(2)])
        ours.step()
        ours.abort([(i, 0)])  # where a row leaves, blocks are joined
        ours.step()
    blocks = sorted(ours._decoder.blocks, key=lambda block: -block.span)
    short = [(block.lengths < block.span).sum() for block in blocks]
    assert len(blocks) == 2 and sum(map(len, blocks)) == 7
    # (40 - 10) * 2 positions are 60. A later row is shorter by what the long one has sampled.
    assert short[0] <= 2


def test_a_batch_in_parts_holds_nothing_of_the_batch_before():
    """Of 12 long rows that ended together; the short row of the next batch would have their cache,
    and its long ones one of their own."""
    ours = engine_with(tiny_model("llama", max_position_embeddings=128), 40)
    ours.add(rows_of((100,) * 12))
    until_empty(ours)
    ours.add(rows_of((2, 60, 60)))
    ours.step()
    shapes = [block.cache.layers[0].keys.shape[::2] for block in ours._decoder.blocks]
    assert shapes == [(1, 2 + 2 * 24), (2, 60 + 2 * 24)]  # with room for as many tokens again


def test_models_without_blocks_have_one():
    """GPT-2 has no step that knows them; longrope rotates all rows as the longest."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4,
                "original_max_position_embeddings": 16, **factors}  # fmt: skip
    for model in (tiny_model("gpt2"), tiny_model("llama", rope_parameters=longrope)):
        assert engine(model)._decoder.blocks.cost == float("inf")
    assert engine(tiny_model("llama"))._decoder.blocks.cost < float("inf")


# --- what is sampled -----------------------------------------------------------------------------

PARAMS = SamplingParams(PAD, STOPS, max_new_tokens=24, min_new_tokens=2)


def rows_of(lengths=(9, 70, 3, 41, 1, 8, 66)) -> list[Row]:
    torch.manual_seed(3)
    return [
        Row(i, torch.randint(10, VOCAB, (length,)).tolist(), PARAMS, noise=Noise(1, i))
        for i, length in enumerate(lengths)
    ]


def engine_with(model, cost: float, **settings):
    made = engine(model, **settings)
    made._decoder.blocks.cost = cost
    return made


@crossed(cost=[0, 40], case=[*FAMILIES])
def test_rows_of_unlike_length_are_sampled_as_if_alone(case, cost):
    family, settings = FAMILIES[case]
    model = tiny_model(family, max_position_embeddings=128, **settings)
    ours = engine_with(model, cost)
    ours.add(rows_of())
    found, most = {}, 0
    while ours.num_running:
        found |= {each.id: each for each in ours.step()}
        most = max(most, len(ours._decoder.blocks))
    assert most == (7 if cost == 0 else 2)  # 70, 66 and 41; 9 and less
    for row in rows_of():
        assert_sampled(found[row.id], alone(model, row))


@crossed(max_rows=[None, 3], cost=[0, 40, 200])
def test_rows_of_unlike_length_may_come_and_go_at_any_step(cost, max_rows):
    model = tiny_model("llama", max_position_embeddings=128)
    expected = {row.id: alone(model, row) for row in rows_of()}
    ours, found, parts = engine_with(model, cost, max_rows=max_rows), [], {}
    for turn in range(4):
        for row in rows_of():
            ours.add([replace(row, id=(turn, row.id))])
            for _ in range(turn + 1):
                found += ours.step()
        again = (turn, 1)  # a long one, taken out and added again, if it has not ended
        parts |= {each.id: each for each in ours.abort([again]) if each.finish == "aborted"}
        if again in parts:
            row = replace(rows_of()[1], id=again)
            ours.add([continued(row, parts[again])])
    assert parts, "a row should have been taken out"
    for (turn, i), ended in until_empty(ours, found).items():
        before = parts.get((turn, i))
        if before is not None:
            ended = replace(ended, token_ids=before.token_ids + ended.token_ids,
                            logprobs=before.logprobs + ended.logprobs)  # fmt: skip
        assert_sampled(ended, expected[i])
    assert len(ours._decoder.blocks) == 1


@pytest.mark.parametrize("cost", [0, 30])
def test_conversations_go_on_in_blocks(cost):
    """Their turns come back one by one, each as long as it is."""
    model = tiny_model("llama")
    ours, dropped = engine_with(model, cost), engine(model)
    for with_blocks, plain in zip(
        dialogues(ours, keeps=True), dialogues(dropped, keeps=False), strict=True
    ):
        assert with_blocks[0] == plain[0]
        assert with_blocks[1] == pytest.approx(plain[1], abs=1e-5)
    assert ours._decoder.num_prefilled < dropped._decoder.num_prefilled


def test_buffers_of_a_few_long_rows_do_not_grow_for_many_short_ones():
    ours = engine_with(tiny_model("llama", max_position_embeddings=128), 40)
    ours.add(rows_of((100,)))
    until_empty(ours)
    ours.add(rows_of((2,) * 12))
    ours.step()
    (block,) = ours._decoder.blocks
    # 12 rows of 2 + 24 positions, and not of the 100 + 2 * 24 of the one before.
    assert block.cache.layers[0].keys.shape[::2] == (12, 2 + 24)
