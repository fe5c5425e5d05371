"""An engine in a process of its own samples what one in a thread does, and its end is noticed."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
import torch

from rllib_llm.engines.engine_loop import Wanted
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Noise
from rllib_llm.serving.engine_host import Counts, ThreadHost
from rllib_llm.serving.engine_process import EngineProcess
from rllib_llm.serving.guides import Guides
from rllib_llm.serving.schemas import ResponseFormat
from rllib_llm.serving.service import Service
from tests.serving.tiny_server import (
    DEADLINE_S,
    EOS,
    NAME,
    asgi_client,
    model,
    settings,
    tokenizer,
    until,
)

pytestmark = pytest.mark.slow  # importing what an engine needs takes a process some six seconds

SOURCE = "tests.serving.tiny_server.build"
PARAMS = SamplingParams(3, (EOS,), max_new_tokens=12, top_logprobs=2)
LONG = dataclasses.replace(PARAMS, stop_token_ids=(), max_new_tokens=900, top_logprobs=0)


@pytest.fixture(scope="module")
def events():
    """An event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def process(events):
    host = EngineProcess(settings(), SOURCE)
    listening = threading.Event()
    events.call_soon_threadsafe(lambda: (host.listen(), listening.set()))
    assert listening.wait(DEADLINE_S)
    yield host
    closing = threading.Event()
    events.call_soon_threadsafe(lambda: (host.close(), closing.set()))
    assert closing.wait(DEADLINE_S)


@pytest.fixture
def thread():
    host = ThreadHost(model(), settings(), (EOS,))
    yield host
    host.close()


def several() -> list[Wanted]:
    """A group of two, a guided one, and one by itself."""
    group, prompt = object(), [1, 40, 41]
    wanted = ResponseFormat(type="regex", regex="[0-9]{3}")
    make_guide = Guides(tokenizer(), EOS).maker(wanted, PARAMS)
    assert make_guide is not None
    return [
        Wanted(prompt, PARAMS, Noise(5, 0), 0, group),
        Wanted(prompt, PARAMS, Noise(5, 1), 0, group),
        Wanted(prompt, PARAMS, Noise(5, 2), guide=make_guide()),
        Wanted([1, 90], PARAMS, Noise(6), version=0),
    ]


def sampled(host, wanted: list[Wanted]) -> list[tuple]:
    """What came of each, which is also what was streamed of it."""
    streamed: list[list[int]] = [[] for _ in wanted]
    futures = host.submit_all(
        [
            dataclasses.replace(each, on_tokens=lambda new, to=to: to.extend(new.token_ids))
            for each, to in zip(wanted, streamed, strict=True)
        ]
    )
    ended = [future.result(DEADLINE_S) for future in futures]
    assert streamed == [each.token_ids for each in ended]
    return [(e.token_ids, e.logprobs, e.versions, e.finish, e.likeliest) for e in ended]


def test_it_samples_what_a_thread_does(process, thread):
    assert process.facts == thread.facts
    found = sampled(process, several())
    assert found == sampled(thread, several())
    assert len(found[2][0]) == 4  # three digits and the end
    text = [1, 40, 41, 42]
    assert process.score(text, 2, None).result(DEADLINE_S) == thread.score(text, 2, 0).result()


def test_a_row_that_nobody_waits_for_leaves_and_an_aborted_one_says_what_there_is(process):
    told: list[int] = []
    gone, aborted = process.submit_all(
        [Wanted([1, 50], LONG, Noise(1), on_tokens=lambda new: told.extend(new.token_ids)),
         Wanted([1, 51], LONG, Noise(2))]
    )  # fmt: skip
    until(lambda: len(told) > 2)
    assert process.count().result(DEADLINE_S) == Counts(2, 0, {0: 2})
    gone.cancel()
    until(lambda: process.count().result(DEADLINE_S).sampling == 1)
    process.pause()
    assert process.is_paused
    process.abort(aborted)
    ended = aborted.result(DEADLINE_S)
    assert ended.finish == "aborted" and 0 < ended.num_tokens < 900
    process.resume()
    until(lambda: process.count().result(DEADLINE_S).sampling == 0)


def test_what_it_refuses_is_raised_here(process):
    other = torch.nn.Linear(2, 2).state_dict()
    with pytest.raises(ValueError, match="must name the model's parameters"):
        process.load(other, 1)
    (refused,) = process.submit_all([Wanted([1, 2], PARAMS, version=99)])
    with pytest.raises(ValueError, match="row.version=99 must be one of"):
        refused.result(DEADLINE_S)
    (long,) = process.submit_all([Wanted([1] * 1020, PARAMS)])
    with pytest.raises(ValueError, match="1024"):
        long.result(DEADLINE_S)


def test_weights_are_handed_over_and_its_end_is_noticed(process, thread, events):
    made = Service(process, tokenizer(), settings(), source="here")
    asked = {"model": NAME, "prompt": [1, 40, 41], "max_tokens": 8, "seed": 1}

    async def ask() -> None:
        async with asgi_client(made) as http:
            weights = model(1).state_dict()
            loading = asyncio.to_thread(made.load, weights, epoch=0, version=1, source="test")
            assert (await loading).label == "0.1"
            thread.load(weights, 1)
            expected = sampled(thread, [Wanted([1, 40, 41], PARAMS, Noise(1), version=1)])
            same = [Wanted([1, 40, 41], PARAMS, Noise(1))]
            assert await asyncio.to_thread(sampled, made.host, same) == expected
            answer = await http.post("/v1/completions", json=asked)
            assert answer.json()["model"] == "tiny@0.1"
            assert "lane_rows" in (await http.get("/metrics")).text
            long = {**asked, "max_tokens": 1000, "ignore_eos": True}
            waiting = asyncio.create_task(http.post("/v1/completions", json=long))
            while not any(job.num_completion_tokens for job in made.jobs.values()):
                await asyncio.sleep(0.001)
            made.host._process.kill()
            assert (await waiting).json()["error"]["code"] == "engine_ended"
            assert (await http.post("/v1/completions", json=asked)).status_code == 503
            assert (await http.get("/readyz")).status_code == 503
            assert (await http.get("/metrics")).status_code == 200
            with pytest.raises(RuntimeError, match="process must be alive"):
                made.host.check_open()

    asyncio.run_coroutine_threadsafe(ask(), events).result(DEADLINE_S)


def test_a_model_that_cannot_be_loaded_is_said():
    with pytest.raises(ValueError, match="no_such_function"):
        EngineProcess(settings(), "tests.serving.tiny_server.no_such_function")
