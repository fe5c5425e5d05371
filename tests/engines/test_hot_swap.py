"""Two versions at once: rows finish on the weights that they began with, and nobody waits."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from rllib_llm.engines.engine_loop import EngineLoop
from rllib_llm.engines.hot_swap import HotSwapEngine, HotSwapLoader, VersionGoneError
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Noise, Row
from rllib_llm.engines.torch_engine import TorchEngine
from tests.engines.test_torch_engine import alone, prompts, published, tiny_model, until_empty
from tests.engines.tiny_generations import PAD, STOPS

PARAMS = SamplingParams(PAD, max_new_tokens=20)
DEADLINE_S = 60


def models(count: int):
    return [tiny_model("llama", seed=seed) for seed in range(count)]


def two_versions(**settings) -> HotSwapEngine:
    first, second = tiny_model("llama"), tiny_model("llama")
    return HotSwapEngine(
        TorchEngine(first, version=0, **settings), TorchEngine(second, version=None, **settings)
    )


def row(i: int, **changes) -> Row:
    return Row(f"row {i}", prompts()[i % 5], PARAMS, noise=Noise(1, i), **changes)


def put(engine: HotSwapEngine, model, version: int) -> None:
    """As `HotSwapLoader`, in one thread."""
    older = engine.drained().result(0)
    older.load(published(model), version)
    older.open()
    engine.switch()


def assert_of(ended, model, wanted: Row, version: int) -> None:
    tokens, logprobs = alone(model, wanted)
    assert ended.token_ids == tokens
    assert ended.logprobs == pytest.approx(logprobs, abs=1e-5)
    assert set(ended.versions) == {version}


def test_rows_finish_on_the_weights_that_they_began_with():
    old, new = models(2)
    engine = two_versions()
    engine.add([row(0), row(1)])
    found = [*engine.step(), *engine.step()]
    put(engine, new, 7)
    assert engine.versions == [7, 0] and engine.rows_by_version == {0: 2, 7: 0}
    engine.add([row(2), row(3, version=0), row(4, version=7)])
    found = until_empty(engine, found)
    for i, (model, version) in enumerate([(old, 0), (old, 0), (new, 7), (old, 0), (new, 7)]):
        assert_of(found[f"row {i}"], model, row(i), version)


def test_a_third_version_waits_until_the_oldest_is_empty_which_takes_no_more_rows():
    _, second, third = models(3)
    engine = two_versions()
    engine.add([row(0)])
    engine.step()
    put(engine, second, 1)
    waiting = engine.drained()
    engine.step()
    assert not waiting.done()
    with pytest.raises(VersionGoneError, match=r"row.version=0 must be one of \[1\]"):
        engine.add([row(1, version=0)])
    found = until_empty(engine)
    assert set(found["row 0"].versions) == {0}
    older = waiting.result(0)
    older.load(published(third), 2)
    engine.switch()
    assert engine.versions == [2, 1]
    engine.add([row(1)])
    assert_of(until_empty(engine)["row 1"], third, row(1), 2)


def test_loaded_between_two_steps_the_newest_weights_wait_for_the_older_engine():
    _, second, third, fourth = models(4)
    engine = two_versions()
    engine.add([row(0)])
    engine.step()
    engine.load(published(second), 1)  # the older engine is empty
    engine.add([row(1)])
    engine.step()
    engine.load(published(third), 2)
    engine.load(published(fourth), 3)
    assert engine.version == 1
    found = until_empty(engine)
    assert [set(found[f"row {i}"].versions) for i in range(2)] == [{0}, {1}]
    assert engine.versions == [3, 1]
    engine.add([row(2)])
    assert_of(until_empty(engine)["row 2"], fourth, row(2), 3)


def test_an_aborted_row_drains_the_engine():
    engine = two_versions()
    engine.add([row(0)])
    engine.step()
    put(engine, models(2)[1], 1)
    waiting = engine.drained()
    engine.abort(["row 0"])
    assert waiting.done()


def test_a_waiting_load_fails_where_the_engine_is_closed():
    engine = two_versions()
    loop = EngineLoop(engine)
    loader = HotSwapLoader(loop, engine)
    loader.load(published(models(2)[1]), 1)
    loop.pause()  # so that the row of version 0 stays
    loop.submit_all([replace(row(0), version=0)])
    told: list[Exception] = []

    def load() -> None:
        try:
            loader.load(published(models(2)[1]), 2)
        except RuntimeError as error:
            told.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    while not engine._waiting:
        time.sleep(0.001)
    loop.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and "closed" in str(told[0])


def test_weights_of_another_model_change_nothing():
    engine = two_versions()
    loop = EngineLoop(engine)
    loader = HotSwapLoader(loop, engine)
    loader.load(published(models(2)[1]), 1)
    with pytest.raises(ValueError, match="must name the model's parameters"):
        loader.load({"other": torch.zeros(1)}, 2)
    assert loop.do(lambda: engine.versions).result(DEADLINE_S) == [1, 0]
    assert set(loop.complete(prompts()[0], PARAMS).versions) == {1}
    loop.close()


def test_versions_swap_under_load_and_no_answer_is_mixed():
    all_models, asked = models(3), prompts()  # whose seed is everybody's
    engine = two_versions()
    loop = EngineLoop(engine)
    loader = HotSwapLoader(loop, engine)
    ended, is_done = [], threading.Event()

    def ask(number: int) -> None:
        while not is_done.is_set():
            noise = Noise(1, number)
            wanted = Row(None, asked[number % 5], PARAMS, noise=noise)
            ended.append((number, loop.submit_all([wanted])[0].result(DEADLINE_S)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for version in range(1, 13):
        loader.load(published(all_models[version % 3]), version)
    is_done.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    loop.close()
    seen = set()
    for number, each in ended:
        (version,) = set(each.versions)
        assert_of(each, all_models[version % 3], row(number), version)
        seen.add(version)
    assert len(seen) > 2


def test_the_likeliest_tokens_and_a_text_scored_are_those_of_a_plain_forward_pass():
    model = tiny_model("llama")
    engine = two_versions()
    params = replace(PARAMS, top_logprobs=3, temperature=0.7)
    wanted = [replace(row(0), params=params), row(1), replace(row(2), params=params)]
    engine.add(wanted)
    found = until_empty(engine)
    assert found["row 1"].likeliest == []
    for each in (wanted[0], wanted[2]):
        ended, start = found[each.id], len(each.token_ids)
        ids = torch.tensor([[*each.token_ids, *ended.token_ids]])
        logits = model(ids).logits[0, start - 1 : -1] / 0.7
        values, tokens = logits.log_softmax(-1).topk(3)
        assert len(ended.likeliest) == ended.num_tokens
        assert [[i for i, _ in place] for place in ended.likeliest] == tokens.tolist()
        told = torch.tensor([[value for _, value in place] for place in ended.likeliest])
        torch.testing.assert_close(told.double(), values, atol=1e-5, rtol=0)
    text = [*wanted[0].token_ids, *found["row 0"].token_ids]
    done: Future = Future()
    engine.score([text, text[:-1]], 2, None, done)
    assert until_empty(engine) == {}
    scores, shorter = done.result(0)
    assert shorter.logprobs == pytest.approx(scores.logprobs[:-1], abs=1e-5)
    plain = model(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    expected = plain.gather(1, torch.tensor(text[1:])[:, None]).squeeze(1)
    assert scores.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert [[i for i, _ in place] for place in scores.likeliest] == plain.topk(2).indices.tolist()


class EvenThenStop:
    """Even tokens alone, and after the third the stop token 2."""

    problem = ""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def allowed(self) -> torch.Tensor:
        allowed = torch.zeros(40, dtype=torch.bool)
        allowed[10::2] = True
        if len(self.taken) == 3:
            allowed[:] = False
            allowed[2] = True
        return allowed

    def take(self, token_id: int) -> None:
        self.taken.append(token_id)


@pytest.mark.parametrize("greedy", [False, True])
def test_a_guide_says_what_its_row_may_sample_and_others_are_as_before(greedy):
    model = tiny_model("llama")
    params = replace(PARAMS, stop_token_ids=STOPS, greedy=greedy)
    engine, guides = two_versions(), [EvenThenStop(), EvenThenStop()]
    plain = [replace(row(i), params=params) for i in range(4)]
    engine.add([replace(plain[0], guide=guides[0]), plain[1]])
    engine.step()
    engine.add([plain[2], replace(plain[3], guide=guides[1])])
    found = until_empty(engine)
    for i in (1, 2):
        tokens, _ = alone(model, plain[i])
        assert found[f"row {i}"].token_ids == tokens
    for i, guide in zip((0, 3), guides, strict=True):
        tokens = found[f"row {i}"].token_ids
        assert guide.taken == tokens and tokens[3:] == [2] and found[f"row {i}"].finish == "stop"
        assert all(10 <= token < 40 and token % 2 == 0 for token in tokens[:3])
