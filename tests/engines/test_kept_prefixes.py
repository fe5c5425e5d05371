"""Conversations whose KV cache is kept over turns: the same tokens, and old turns computed once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rllib_llm.engines.batch_rows import PromptGroup, PromptQueue
from rllib_llm.engines.kv_cache import KeptPrefixes, Prefix
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Noise, Row
from tests.engines.test_torch_engine import engine, prompts, tiny_model, until_empty
from tests.engines.tiny_generations import PAD, STOPS
from tests.modules.test_architectures import spread_out
from tests.rounding import assert_as_near

PARAMS = SamplingParams(PAD, STOPS, max_new_tokens=12)
# What the environment says to conversation i after turn t.
RESULTS = [[[5 + i] * (1 + i), [9 + i] * (4 - i)] for i in range(4)]

MLA = "minicpm3"  # whose cached values are narrower than its keys


def turn_of(conversation: int, turn: int, token_ids, *, keeps: bool, params=PARAMS) -> Row:
    name = conversation if keeps else None
    return Row(
        (conversation, turn), token_ids, params, noise=Noise(1, conversation, turn),
        conversation=name,
    )  # fmt: skip


def dialogues(engine, *, keeps: bool) -> list:
    """(tokens, log-probs) of three turns of four conversations that do not wait for each other."""
    said = {i: list(prompt) for i, prompt in enumerate(prompts()[:4])}
    engine.add([turn_of(i, 0, said[i], keeps=keeps) for i in said])
    found = {}
    while engine.num_running:
        for ended in engine.step():
            i, turn = ended.id
            found[i, turn] = (ended.token_ids, ended.logprobs)
            if turn < 2:
                said[i] += [*ended.token_ids, *RESULTS[i][turn]]
                engine.add([turn_of(i, turn + 1, said[i], keeps=keeps)])
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral (sliding window)", "gpt2", MLA])
def test_what_is_sampled_does_not_depend_on_what_is_kept(family):
    model = spread_out(family, torch.float64) if family == MLA else tiny_model(family)
    kept, dropped = engine(model), engine(model)
    for with_cache, without in zip(
        dialogues(kept, keeps=True), dialogues(dropped, keeps=False), strict=True
    ):
        assert with_cache[0] == without[0]  # in double precision; log-probs are kept in single
        torch.testing.assert_close(
            torch.tensor(with_cache[1]), torch.tensor(without[1]), atol=1e-5, rtol=0
        )
    assert kept._decoder.num_prefilled < dropped._decoder.num_prefilled


def test_old_turns_are_not_prefilled_again():
    """Of a further turn only the last token, never fed before, and what is new."""
    kept = engine(tiny_model("llama"))
    params = replace(PARAMS, stop_token_ids=())
    token_ids = list(prompts()[0])
    prefilled = []
    for turn in range(3):
        before = kept._decoder.num_prefilled
        kept.add([turn_of(0, turn, token_ids, keeps=True, params=params)])
        (ended,) = until_empty(kept).values()
        prefilled.append(kept._decoder.num_prefilled - before)
        token_ids += [*ended.token_ids, 7, 8, 9]
    assert prefilled == [len(prompts()[0]), 1 + 3, 1 + 3]


def test_turns_that_come_together_are_computed_in_the_batch_s_own_cache():
    """New buffers are made where they do not suffice, and then with room for turns to come."""
    kept = engine(tiny_model("llama"))
    params = replace(PARAMS, stop_token_ids=())
    said = {i: [3 + i] * 9 for i in range(4)}
    buffers, capacities = [], []
    for turn in range(4):
        kept.add([turn_of(i, turn, said[i], keeps=True, params=params) for i in said])
        for (i, _), ended in until_empty(kept).items():
            said[i] += [*ended.token_ids, 7, 8]
        (block,) = kept._decoder.blocks
        buffers.append(block.cache.layers[0].keys)
        capacities.append(block.cache.capacity)
    # 9 + 12 and as much again; 23 + 12 and half of it again; 37 + 12 fit; 51 + 12 and half of it.
    assert capacities == [33, 52, 52, 94]
    assert buffers[1] is buffers[2]


def test_a_turn_waits_for_others_while_rows_are_sampled():
    """One row that comes back is not worth a prefill at once: here eight are sampled meanwhile, and
    a quarter of them is two steps of one row, or one step of two."""
    kept = engine(tiny_model("llama"))
    long = replace(PARAMS, stop_token_ids=(), max_new_tokens=40)
    short = replace(long, max_new_tokens=2)
    said = {i: [3 + i] * 5 for i in range(3)}
    kept.add([turn_of(i, 0, said[i], keeps=True, params=short) for i in said])
    for (i, _), ended in until_empty(kept).items():
        said[i] += [*ended.token_ids, 7]
    kept.add([turn_of(10 + i, 0, [9 + i] * 5, keeps=False, params=long) for i in range(8)])
    kept.step()
    sampling = []
    kept.add([turn_of(0, 1, said[0], keeps=True, params=long)])
    for _ in range(2):
        kept.step()
        sampling.append(kept.num_sampling)
    assert sampling == [8, 9]
    kept.add([turn_of(i, 1, said[i], keeps=True, params=long) for i in (1, 2)])
    for _ in range(2):
        kept.step()
        sampling.append(kept.num_sampling)
    assert sampling[2:] == [9, 11]  # two of nine are less than a quarter, four are not


def test_a_turn_that_was_written_otherwise_is_computed_from_there():
    """slime #117 and its kind: a template that changes what was said."""
    model = tiny_model("llama")
    kept = engine(model)
    token_ids = list(prompts()[0])
    kept.add([turn_of(0, 0, token_ids, keeps=True)])
    (ended,) = until_empty(kept).values()
    changed = [*token_ids[:-1], token_ids[-1] + 1, *ended.token_ids, 7]
    kept.add([turn_of(0, 1, changed, keeps=True)])
    plain = engine(model)
    plain.add([turn_of(0, 1, changed, keeps=False)])
    (one,), (other,) = until_empty(kept).values(), until_empty(plain).values()
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)


@pytest.mark.parametrize("in_flight", ["finish", "keep", "recompute"])
def test_nothing_is_kept_beyond_the_weights_that_computed_it(in_flight):
    """NeMo #4018: keys and values of old weights served up to 17 updates later."""
    model, newer = tiny_model("llama"), tiny_model("llama", seed=5)
    weights = {name: value.clone() for name, value in newer.state_dict().items()}
    kept = engine(model)
    token_ids = list(prompts()[0])
    kept.add([turn_of(0, 0, token_ids, keeps=True)])
    (ended,) = until_empty(kept).values()
    further = [*token_ids, *ended.token_ids, 7]
    kept.add([turn_of(1, 0, list(prompts()[1]), keeps=True)])
    kept.step()  # one more, under way while the weights change
    kept.add([turn_of(0, 1, further, keeps=True)])  # with its prefix, waiting
    kept.load(weights, 1, in_flight)
    found = until_empty(kept)
    plain = engine(newer)
    plain.add([turn_of(0, 1, further, keeps=False)])
    (expected,) = until_empty(plain).values()
    assert found[0, 1].token_ids == expected.token_ids
    assert found[0, 1].logprobs == pytest.approx(expected.logprobs, abs=1e-9)
    assert len(kept._kept._prefixes) <= 1  # of the turn that the new weights sampled
    assert not kept._decoder.taken_along


def prefix(*token_ids: int) -> Prefix:
    states = torch.zeros(1, len(token_ids), 2)
    return Prefix(list(token_ids), [(states, states)])


def test_prefixes_are_bounded_and_taken_once():
    kept = KeptPrefixes(max_bytes=2 * prefix(1, 2).num_bytes)  # 2 x 2 x 2 floats: 32 bytes each
    for name in "abc":
        kept.put(name, prefix(1, 2))
    assert kept.take("a", [1, 2, 3]) is None  # it waited longest
    assert kept.take("b", [1, 2, 3]).token_ids == [1, 2]
    assert kept.take("b", [1, 2, 3]) is None
    assert kept.take("c", [1, 2]).token_ids == [1]  # one is left, whose logits are wanted
    kept.put("d", prefix(1, 2))
    assert kept.take("d", [4, 2, 3]) is None
    kept.put("e", prefix(*range(100)))
    assert kept.take("e", list(range(101))) is None  # more than fits


@pytest.mark.parametrize("family", ["llama", "mistral (sliding window)", "gpt2"])
def test_in_bfloat16_prompts_and_turns_are_read_in_sizes_that_come_again(family):
    half = tiny_model(family).bfloat16()
    exact = tiny_model(family).bfloat16().double()
    dialogue = iter(dialogues(engine(half), keeps=True))
    found: list[torch.Tensor] = []
    expected: dict[torch.nn.Module, list[torch.Tensor]] = {half: [], exact: []}
    for i, prompt in enumerate(prompts()[:4]):
        said = list(prompt)
        for turn in range(3):
            token_ids, logprobs = next(dialogue)
            found.append(torch.tensor(logprobs))
            for model, logprobs_of in expected.items():
                with torch.no_grad():
                    logits = model(torch.tensor([said + token_ids])).logits[0, len(said) - 1 : -1]
                scores = logits.double().log_softmax(dim=-1)
                logprobs_of.append(scores.gather(1, torch.tensor(token_ids)[:, None]).squeeze(1))
            said += token_ids
            if turn < 2:
                said += RESULTS[i][turn]

    assert_as_near(found, *expected.values(), factor=3.0, computed=torch.bfloat16)
    sizes: list[int] = []

    def note(embedding, arguments) -> None:
        if arguments[0].shape[1] > 1:
            sizes.append(arguments[0].numel())

    half.get_input_embeddings().register_forward_pre_hook(note)
    dialogues(engine(half), keeps=True)
    # But for a turn of a row that has no 16 positions yet.
    assert sum(size % 16 == 0 for size in sizes) > 3
    assert all(size % 16 == 0 or size < 16 for size in sizes)


def test_the_bound_on_prompts_counts_the_tokens_that_are_read():
    """Turns of 4,000 tokens of which 3,950 are cached are 50 each: 32 of them fit into 8,192; of
    whole prompts, 2."""
    for prefix, fit in ((Prefix([0] * 3950, []), 32), (None, 2)):
        queue = PromptQueue()
        text = torch.zeros(4000)
        queue.extend([PromptGroup(text, [i], [None], [0], prefix) for i in range(32)])
        assert queue.fitting(64, 8192, True) == fit
