"""Our decode loop as an engine: rows come, go and come again; each is sampled as if alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended, Noise, Row, uniform_noise
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.modules.logprobs import score_completions
from rllib_llm.shared.errors import Problems
from tests.crossed import crossed
from tests.engines.tiny_generations import PAD, STOPS, continued, ragged_prompts, seeded
from tests.modules import tiny_models
from tests.modules.tiny_models import VOCAB

PARAMS = SamplingParams(PAD, STOPS, max_new_tokens=24)
SETTINGS = [
    PARAMS,
    replace(PARAMS, temperature=0.6, top_k=5, max_new_tokens=9),
    replace(PARAMS, greedy=True, stop_token_ids=()),
    replace(PARAMS, top_p=0.8, min_new_tokens=7),
    replace(PARAMS, stop_token_ids=(50, 51, 52), max_new_tokens=13),
]


def tiny_model(family: str, **settings):
    """In double precision: round-off of differently shaped products decides nothing then."""
    return tiny_models.tiny_model(family, **settings).double()


def prompts() -> list[list[int]]:
    ids, mask = ragged_prompts()
    return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]


def rows(settings=SETTINGS) -> list[Row]:
    """One row for each prompt, with settings of its own."""
    return [
        Row(f"row {i}", prompt, params, noise=Noise(1, i))
        for i, (prompt, params) in enumerate(zip(prompts(), settings, strict=True))
    ]


def alone(model, row: Row) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of a row by the wrapper, in a batch of its own."""
    ids = torch.tensor([row.token_ids])
    noise = uniform_noise(row.noise.seed, [row.noise.row], row.params.max_new_tokens)
    out = generate(model, ids, torch.ones_like(ids, dtype=torch.bool), row.params, noise=noise)
    return out.completion_ids[0].tolist(), out.logprobs[0].tolist()


def engine(model, **settings) -> TorchEngine:
    return TorchEngine(model, **{"version": 0, **settings})


def _capacity(engine) -> int:
    """Positions of its cache, which is one: these rows are not worth several."""
    (block,) = engine._decoder.blocks
    return block.cache.capacity


def until_empty(engine, ended=()) -> dict[str, Ended]:
    found = {each.id: each for each in ended}
    while engine.num_running:
        found |= {each.id: each for each in engine.step()}
    return found


def assert_sampled(
    ended: Ended, expected: tuple[list[int], list[float]], atol: float = 1e-5
) -> None:
    assert ended.token_ids == expected[0]
    assert ended.logprobs == pytest.approx(expected[1], abs=atol)


@crossed(
    2, family=["llama", "gpt2", "mistral (sliding window)"], looks=[1, 8], max_rows=[None, 2]
)
def test_rows_of_different_settings_are_sampled_as_if_alone(family, looks, max_rows):
    model = tiny_models.tiny_model(family)  # in float32, whose layout of weights is another
    ours = engine(model, steps_between_looks=looks, max_rows=max_rows)
    ours.add(rows())
    found = until_empty(ours)
    assert set(found) == {row.id for row in rows()}
    for row in rows():
        assert_sampled(found[row.id], alone(model, row), atol=3e-5)
        is_stop = found[row.id].token_ids[-1] in row.params.stop_token_ids
        assert found[row.id].finish == ("stop" if is_stop else "length")
        assert found[row.id].versions == [0] * found[row.id].num_tokens
    assert len({each.num_tokens for each in found.values()}) > 2, "lengths should be mixed"


def test_rows_may_come_at_any_step():
    # Longer prompts after shorter ones, and long after the cache was first made.
    model = tiny_model("llama")
    ours, found = engine(model), []
    for row in sorted(rows(), key=lambda row: len(row.token_ids)):
        ours.add([row])
        for _ in range(3):
            found += ours.step()
    found = until_empty(ours, found)
    for row in rows():
        assert_sampled(found[row.id], alone(model, row))


def test_rows_come_and_go_for_long_and_the_cache_stays_small():
    model = tiny_model("llama")
    ours = engine(model, max_rows=3)
    expected = {row.id: alone(model, row) for row in rows()}
    for turn in range(12):
        again = [replace(row, id=f"{turn} {row.id}") for row in rows()]
        ours.add(again[:3])
        found = [*ours.step(), *ours.step()]
        ours.add(again[3:])
        for name, ended in until_empty(ours, found).items():
            assert_sampled(ended, expected[name.split(" ", 1)[1]])
    assert ours._buffers.batch <= 10  # columns are used again
    assert _capacity(ours) < 9 + 4 * 24


def test_rows_come_without_end_and_the_cache_stays_small():
    """It is moved to the front now and then, and not grown for each row that comes."""
    ours = engine(tiny_model("llama"))
    long = [replace(row, params=SETTINGS[2]) for row in rows()]  # 24 tokens, no stops
    for i in range(100):
        ours.add([replace(long[i % len(long)], id=i)])
        ours.step()
        ours.step()
        if not i:
            capacity = _capacity(ours)
    assert ours.num_sampling >= 11  # they were never all gone
    assert _capacity(ours) == capacity == len(long[0].token_ids) + 2 * 24


def test_models_whose_layers_keep_a_state_decode_in_waves():
    model = seeded(
        "lfm2", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2,
        layer_types=["conv", "full_attention", "conv"],
    ).double()  # fmt: skip
    ours = engine(model)
    ours.add(rows()[:3])
    found = ours.step()
    ours.add(rows()[3:])
    found = until_empty(ours, found)
    for row in rows():
        assert_sampled(found[row.id], alone(model, row))


def test_a_group_shares_its_prompt_s_prefill():
    model = tiny_model("llama")
    prefilled = []
    model.model.register_forward_pre_hook(
        lambda module, args, inputs: prefilled.append(tuple(inputs["input_ids"].shape)),
        with_kwargs=True,
    )
    shared = [Row(i, prompts()[0], PARAMS, noise=Noise(1, i), group="g") for i in range(4)]
    others = [Row(i, prompts()[1], PARAMS, noise=Noise(1, i), group="h") for i in range(4, 7)]
    ours = engine(model)
    prefilled.clear()  # the model was tried
    ours.add(shared + others)
    found = until_empty(ours)
    # Two prompts, the longer of 9 tokens; groups of four and of three rows.
    assert prefilled[0] == (2, 9)
    for row in shared + others:
        assert_sampled(found[row.id], alone(model, row))


def test_a_step_reads_so_many_tokens_of_prompts_and_the_rows_in_the_batch_go_on():
    model = tiny_model("llama")
    prefilled = []
    model.model.register_forward_pre_hook(
        lambda module, args, inputs: prefilled.append(tuple(inputs["input_ids"].shape)),
        with_kwargs=True,
    )
    params = replace(PARAMS, stop_token_ids=(), max_new_tokens=6)
    # Two of 9 tokens are 18; one that is longer than the bound comes alone.
    lengths = [9, 9, 9, 30, 9]
    asked = [
        Row(i, [3 + i] * length, params, noise=Noise(1, i)) for i, length in enumerate(lengths)
    ]
    ours = engine(model, max_prefill=20)
    prefilled.clear()  # the model was tried
    ours.add(asked)
    sampled = []
    for _ in range(4):
        ours.step()
        sampled.append([len(each.token_ids) for each in ours.sampled(range(5), [0] * 5)])
    read = [shape for shape in prefilled if shape[1] > 1]  # the others are steps
    assert read == [(2, 9), (1, 9), (1, 30), (1, 9)]
    assert sampled == [[1, 1, 0, 0, 0], [2, 2, 1, 0, 0], [3, 3, 2, 1, 0], [4, 4, 3, 2, 1]]
    found = until_empty(ours)
    for row in asked:
        assert_sampled(found[row.id], alone(model, row))


# --- taken out and added again ----------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("num_steps", [1, 4, 11])
def test_aborted_rows_go_on_as_if_they_had_stayed(family, num_steps):
    model = tiny_model(family)
    first, second = engine(model), engine(model)
    first.add(rows())
    found = [each for _ in range(num_steps) for each in first.step()]
    parts = {each.id: each for each in first.abort([row.id for row in rows()])}
    assert first.num_running == 0
    assert all(part.finish == "aborted" for part in parts.values())
    second.add([continued(row, parts[row.id]) for row in rows() if row.id in parts])
    ends = until_empty(second, found)
    for row in rows():
        part, end = parts.get(row.id), ends[row.id]
        before = part or Ended(row.id, [], [], [], "aborted")
        whole = replace(
            end, token_ids=before.token_ids + end.token_ids, logprobs=before.logprobs + end.logprobs
        )
        assert_sampled(whole, alone(model, row))


def test_aborting_leaves_the_others_alone():
    model = tiny_model("llama")
    ours = engine(model, steps_between_looks=8, max_rows=4)
    ours.add(rows())
    found = [each for _ in range(3) for each in ours.step()]
    # One that runs, one that waits for a place, and one that is not there.
    out = ours.abort(["row 2", "row 4", "row 9"])
    assert {each.id: each.num_tokens for each in out} == {"row 2": 3, "row 4": 0}
    ends = until_empty(ours, found)
    assert set(ends) == {"row 0", "row 1", "row 3"}
    for row in rows():
        if row.id in ends:
            assert_sampled(ends[row.id], alone(model, row))


def test_tokens_so_far_are_those_of_the_end():
    model = tiny_model("llama")
    ours = engine(model)
    ours.add(rows()[:1])
    ours.step(), ours.step()
    tokens, logprobs = alone(model, rows()[0])
    (so_far,), (newest,) = ours.sampled(["row 0"], [0]), ours.sampled(["row 0"], [1])
    assert so_far.token_ids == tokens[:2] and newest.token_ids == tokens[1:2]
    assert so_far.logprobs == pytest.approx(logprobs[:2], abs=1e-5)


@pytest.mark.parametrize("looks", [1, 8])
def test_what_was_sampled_says_whether_its_row_has_ended(looks):
    """An engine that looks seldom holds rows that have ended: whoever goes on with what it tells of
    them would sample behind their end."""
    model = tiny_model("llama")
    ours = engine(model, steps_between_looks=looks)
    settings = [*SETTINGS[:4], replace(PARAMS, max_new_tokens=1)]
    ours.add(rows(settings))
    whole = {row.id: alone(model, row)[0] for row in rows(settings)}
    seen, ended = set(), {}
    while ours.num_running:
        ended |= {each.id: each for each in ours.step()}
        ids = [row.id for row in rows() if row.id not in ended]
        for start in (0, 1, 40):
            for row_id, told in zip(ids, ours.sampled(ids, [start] * len(ids)), strict=True):
                expected = whole[row_id][: ours._decoder.clock]
                assert told.token_ids == expected[start:]
                is_whole = len(expected) == len(whole[row_id])
                row = next(row for row in rows(settings) if row.id == row_id)
                last = "stop" if expected[-1] in row.params.stop_token_ids else "length"
                assert told.finish == (last if is_whole else None)
                seen.add(told.finish)
    assert seen == ({None, "stop", "length"} if looks == 8 else {None})
    assert {i: each.token_ids for i, each in ended.items()} == whole


def test_rows_that_end_while_others_are_taken_out_are_in_the_engine_still():
    """Until they are handed out: they can be read, taken out, and keep their names."""
    model = tiny_model("llama")
    running = engine(model, steps_between_looks=8)
    running.add(rows([replace(PARAMS, stop_token_ids=(), max_new_tokens=20)] * 5))
    running.add([Row("ends", prompts()[0], replace(PARAMS, stop_token_ids=(token_0(model),)))])
    running.step()
    running.step()
    (told,) = running.sampled(["ends"], [0])
    running.abort(["row 1"])
    assert running.num_running == 5
    assert running.sampled(["ends"], [0]) == [told]
    with pytest.raises(Problems) as caught:
        running.add([Row("ends", [1], PARAMS)])
    assert (caught.value.problem.name, caught.value.problem.value) == ("row.id", "ends")
    (taken,) = running.abort(["ends"])
    assert (taken.token_ids, taken.finish) == (told.token_ids, "stop")
    assert running.num_running == 4
    assert set(until_empty(running)) == {"row 0", "row 2", "row 3", "row 4"}


def token_0(model) -> int:
    """The first token of the first prompt, by the noise of a row without a name."""
    return alone(model, Row("ends", prompts()[0], PARAMS))[0][0]


# --- weights -----------------------------------------------------------------------------------


def published(model) -> dict[str, torch.Tensor]:
    return {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}


LONG = replace(PARAMS, stop_token_ids=(), max_new_tokens=10)


def halves(in_flight: str, family: str = "llama") -> tuple[Ended, Ended, tuple, tuple]:
    """A row whose weights change behind its fourth token, and one that was added then; and what
    the old and the new weights alone give."""
    old, new = tiny_model(family, seed=0), tiny_model(family, seed=1)
    early, late = (Row(i, prompts()[i], LONG, noise=Noise(1, i)) for i in (0, 1))
    ours = engine(tiny_model(family, seed=0), version=3)
    ours.add([early])
    for _ in range(4):
        ours.step()
    ours.load(published(new), 4, in_flight)
    assert ours.version == 4
    ours.add([late])
    found = until_empty(ours)
    assert_sampled(found[1], alone(new, late))
    assert found[1].versions == [4] * 10
    return found[0], found[1], alone(old, early), alone(new, early)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_may_finish_on_the_weights_that_they_began_with(family):
    early, _, by_old, _ = halves("finish", family)
    assert_sampled(early, by_old)
    assert early.versions == [3] * 10


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_may_have_their_cache_computed_anew(family):
    """Complaint: a cache of keys up to 17 updates old is read on (NeMo #4018, vLLM #9744)."""
    early, _, by_old, _ = halves("recompute", family)
    assert early.token_ids[:4] == by_old[0][:4]
    assert early.versions == [3] * 4 + [4] * 6
    # The rest is what the new weights alone say behind these tokens.
    ids = torch.tensor([early.token_ids])
    prompt = torch.tensor([prompts()[0]])
    with torch.no_grad():
        expected = score_completions(
            tiny_model(family, seed=1), prompt, torch.ones_like(prompt, dtype=torch.bool), ids,
            torch.ones_like(ids, dtype=torch.bool),
        ).logprobs[0]  # fmt: skip
    assert early.logprobs[4:] == pytest.approx(expected[4:].tolist(), abs=1e-5)


def test_rows_may_keep_the_cache_of_the_old_weights():
    early, _, by_old, _ = halves("keep")
    anew, *_ = halves("recompute")
    assert early.token_ids[:4] == by_old[0][:4]
    assert early.versions == [3] * 4 + [4] * 6
    # Keys of the old weights, read by the new ones: neither the old nor the new weights alone.
    assert early.logprobs[4] != pytest.approx(by_old[1][4], abs=1e-3)
    assert early.logprobs[4] != pytest.approx(anew.logprobs[4], abs=1e-3)


def test_weights_are_needed_first():
    ours = engine(tiny_model("llama"), version=None)
    with pytest.raises(RuntimeError, match="weights must be loaded"):
        ours.add(rows())
    ours.load(published(tiny_model("llama", seed=1)), 7)
    ours.add(rows()[:1])
    ended = until_empty(ours)["row 0"]
    assert_sampled(ended, alone(tiny_model("llama", seed=1), rows()[0]))
    assert set(ended.versions) == {7}


def test_weights_of_another_model_are_refused_and_nothing_changes():
    ours = engine(tiny_model("llama"))
    weights = published(tiny_model("llama", seed=1))
    lost = weights.pop("model.lm_head.weight")
    with pytest.raises(ValueError, match=r"\['lm_head.weight'\] are missing"):
        ours.load(weights, 1)
    with pytest.raises(Problems) as caught:
        ours.load({**weights, "model.lm_head.weight": lost[:3]}, 1)
    assert caught.value.problem.name == "weights['lm_head.weight'].shape"
    assert ours.version == 0
    ours.add(rows()[:1])
    assert_sampled(until_empty(ours)["row 0"], alone(tiny_model("llama"), rows()[0]))


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "granite (logits scaling)"])
def test_a_long_text_s_logits_are_never_all_there(family):
    model = tiny_model(family, max_position_embeddings=2048)
    text = torch.randint(3, VOCAB, (1500,), generator=torch.Generator().manual_seed(1)).tolist()
    ours = engine(model)
    sizes = []
    head = model.get_output_embeddings()
    ours.score(text, 1)  # the model was taken apart
    head.register_forward_hook(lambda module, args, logits: sizes.append(logits.numel() // VOCAB))
    scores = ours.score(text, 1)
    assert sizes == [512, 512, 475]  # 1,499 places
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None]).squeeze(1)
    assert scores.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_row_whose_logits_are_not_finite_ends_with_an_error():
    model = tiny_model("llama")
    model.lm_head.weight.data.fill_(float("nan"))
    ours = engine(model)
    ours.add(rows()[:1])
    assert until_empty(ours)["row 0"].finish == "error"


def test_what_does_not_fit_is_named():
    ours = engine(tiny_model("gpt2"))  # 64 positions
    row = rows()[0]
    ours.add([row])
    for wrong, name in [
        (row, "row.id"),
        (replace(row, id="long", params=replace(PARAMS, max_new_tokens=56)),
         "a prompt of 9 tokens with max_new_tokens=56"),
        (replace(row, id="other", version=3), "row.version"),
    ]:
        with pytest.raises(Problems) as caught:
            ours.add([wrong])
        assert caught.value.problem.name == name
    assert ours.num_running == 1


class ShortOfMemory(torch.nn.Module):
    """Counts the rows of a model's steps, and has memory for so many."""

    def __init__(self, model, rows: int) -> None:
        super().__init__()
        self.model, self.config, self.rows, self.most = model, model.config, rows, 0

    def forward(self, input_ids=None, **inputs):
        if len(input_ids) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.most = max(self.most, len(input_ids))
        return self.model(input_ids=input_ids, **inputs)


@pytest.mark.parametrize("family", ["gpt2"])
@pytest.mark.parametrize("fits", [2, 3])
def test_rows_go_on_in_smaller_batches_when_memory_runs_out(family, fits):
    """All at once do not fit, at the first step or when more come while others are decoded."""
    model = tiny_model(family)
    short = ShortOfMemory(model, fits)
    ours = engine(short)
    first, later = rows()[:2], rows()[2:]
    ours.add(first)
    ended = [each for _ in range(3) for each in ours.step()]
    ours.add(later)
    with pytest.warns(UserWarning, match="2 completions are decoded at once"):
        ended = until_empty(ours, ended)
    assert short.most <= fits
    for row in rows():
        assert_sampled(ended[row.id], alone(model, row))


def test_a_row_that_does_not_fit_alone_ends_the_run():
    ours = engine(ShortOfMemory(tiny_model("gpt2"), 8))
    ours.model.rows = 0
    ours.add(rows()[:1])
    with pytest.raises(torch.OutOfMemoryError):
        ours.step()


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"noise": Noise(-1, 0)}, "seed=-1"),
        ({"token_ids": [3, VOCAB]}, f"token_ids={VOCAB}"),
        ({"token_ids": [-1, 3]}, "token_ids=-1"),
    ],
)
def test_rows_that_are_refused_leave_nothing_behind(wrong, named):
    """Else they would be counted for ever, or end everybody's steps."""
    model = tiny_model("llama")
    decoded = engine(model)
    good, other = rows()[:2]
    with pytest.raises(Problems) as caught:
        decoded.add([good, replace(other, **wrong)])
    assert caught.value.problem.found == named
    assert decoded.num_running == 0
    decoded.add([good])
    found = until_empty(decoded)
    assert_sampled(found[good.id], alone(model, good))


def test_settings_of_rows_that_have_gone_are_forgotten():
    decoded = engine(tiny_model("llama"), max_rows=None)
    stays = Row("stays", [5], replace(PARAMS, stop_token_ids=(), max_new_tokens=90))
    decoded.add([stays])
    for i in range(80):
        other = replace(PARAMS, temperature=1 + i / 100, max_new_tokens=1)
        decoded.add([Row(i, [5, 6], other)])
        decoded.step()
    assert len(decoded._decoder.rows.settings) < 20
    assert until_empty(decoded)["stays"].num_tokens == 90
