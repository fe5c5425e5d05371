"""An engine in a process of its own samples what one in a thread does, and its end is noticed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading

import pytest
import torch
from transformers import PreTrainedModel

from rllib_llm.engines.engine_loop import settle
from rllib_llm.engines.hot_swap import VersionGoneError
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Noise, Row
from rllib_llm.modules.precision import LIBRARIES, multiplies_by_onednn
from rllib_llm.serving.engine_host import Counts, ThreadHost
from rllib_llm.serving.engine_process import EngineProcess, _without_keys
from rllib_llm.serving.guides import GrammarError, grammar_of
from rllib_llm.serving.schemas import ResponseFormat
from rllib_llm.serving.service import Service
from rllib_llm.shared.errors import Problems
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
    asyncio.run_coroutine_threadsafe(host.listen(), events).result(DEADLINE_S)
    yield host
    closing = threading.Event()
    events.call_soon_threadsafe(lambda: (host.close(), closing.set()))
    assert closing.wait(DEADLINE_S)


@pytest.fixture
def thread():
    host = ThreadHost.open(settings(), SOURCE)
    yield host
    host.close()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_server_multiplies_by_the_faster_library(library, monkeypatch):
    monkeypatch.setattr("rllib_llm.serving.engine_host.faster_library", lambda: library)
    host = ThreadHost.open(settings(in_flight="finish"), SOURCE)
    try:
        models = [each.model for each in host.engine._engines]
        assert [*map(multiplies_by_onednn, models)] == [library == "onednn"] * 2
    finally:
        host.close()


def test_an_attention_kernel_samples_the_same_tokens(thread):
    host = ThreadHost.open(settings(attn_implementation="eager"), SOURCE)
    try:
        assert {e.model.config._attn_implementation for e in host.engine._engines} == {"eager"}
        for one, other in zip(sampled(host, several()), sampled(thread, several()), strict=True):
            assert one[0] == other[0] and one[1] == pytest.approx(other[1], abs=1e-5)
    finally:
        host.close()


def test_a_kernel_that_is_not_there_is_refused_by_name(monkeypatch):
    def refuse(model, kernel):
        raise ImportError(f"the package for {kernel} is not installed")

    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", refuse)
    with pytest.raises(Problems) as refused:
        ThreadHost.open(settings(attn_implementation="flash_attention_2"), SOURCE)
    assert refused.value.found[0].name == "attn_implementation"


def several() -> list[Row]:
    """A group of two, and one by itself."""
    group, prompt = object(), [1, 40, 41]
    return [
        Row(None, prompt, PARAMS, 0, Noise(5, 0), group),
        Row(None, prompt, PARAMS, 0, Noise(5, 1), group),
        Row(None, [1, 90], PARAMS, noise=Noise(6), version=0),
    ]


def sampled(host, wanted: list[Row], grammar: str | None = None) -> list[tuple]:
    """What came of each, which is also what was streamed of it."""
    streamed: list[list[int]] = [[] for _ in wanted]
    futures = host.submit_all(
        [
            dataclasses.replace(each, on_tokens=lambda new, to=to: to.extend(new.token_ids))
            for each, to in zip(wanted, streamed, strict=True)
        ],
        grammar,
    )
    ended = [future.result(DEADLINE_S) for future in futures]
    assert streamed == [each.token_ids for each in ended]
    return [(e.token_ids, e.logprobs, e.versions, e.finish, e.likeliest) for e in ended]


def test_it_knows_no_key_of_the_server_s(monkeypatch):
    monkeypatch.setenv("RLLIB_SERVE_ADMIN_KEY", "hush")
    monkeypatch.setenv("OTHERS", "told")
    kept = _without_keys()
    assert kept["OTHERS"] == "told" and not [name for name in kept if "RLLIB_SERVE" in name]


def test_it_samples_what_a_thread_does(process, thread):
    assert (process.limits, process.fingerprint) == (thread.limits, thread.fingerprint)
    assert sampled(process, several()) == sampled(thread, several())
    found = grammar_of(ResponseFormat(type="regex", regex="[0-9]{3}"))
    assert found is not None
    guided = []
    for host in (process, thread):
        assert host.compile(found[1], 0).result(DEADLINE_S) is None
        row = Row(None, [1, 40, 41], PARAMS, noise=Noise(5, 2))
        guided.append(sampled(host, [row] * 2, found[1]))
        host.release(0)
    assert guided[0] == guided[1]
    assert [len(each[0]) for each in guided[0]] == [4, 4]  # three digits and the end
    texts = [[1, 40, 41, 42], [1, 90]]
    scores = [host.score(texts, 2, None).result(DEADLINE_S) for host in (process, thread)]
    told = [[(one.logprobs, one.ranks, one.likeliest) for one in each] for each in scores]
    assert told[0] == told[1] and [len(one[0]) for one in told[0]] == [3, 1]


def test_a_scoring_that_ends_on_the_server_s_side_leaves_the_engine(process):
    """As one that is aborted while the server is paused: it held up the weights that came next."""
    process.pause()
    scoring = process.score([[1, 40], [1, 41]], 0, None)
    assert process.count().result(DEADLINE_S).by_version == {0: 2}
    settle(scoring, ValueError("aborted"))
    until(lambda: process.count().result(DEADLINE_S).by_version == {0: 0})
    process.resume()


def test_a_row_that_nobody_waits_for_leaves_and_an_aborted_one_says_what_there_is(process):
    told: list[int] = []
    gone, aborted = process.submit_all(
        [Row(None, [1, 50], LONG, noise=Noise(1), on_tokens=lambda new: told.extend(new.token_ids)),
         Row(None, [1, 51], LONG, noise=Noise(2))]
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
        process.swap(other, 1)
    (refused,) = process.submit_all([Row(None, [1, 2], PARAMS, version=99)])
    with pytest.raises(VersionGoneError, match="row.version=99 must be one of"):
        refused.result(DEADLINE_S)
    with pytest.raises(GrammarError):
        process.compile("no grammar", 1).result(DEADLINE_S)
    process.release(1)
    with pytest.raises(VersionGoneError):
        process.score([[1, 2]], 0, 99).result(DEADLINE_S)
    (long,) = process.submit_all([Row(None, [1] * 1020, PARAMS)])
    with pytest.raises(ValueError, match="1024"):
        long.result(DEADLINE_S)


def test_weights_are_handed_over_and_its_end_is_noticed(process, thread, events, caplog):
    made = Service(process, tokenizer(), settings(admin_key="root"), source="here")
    asked = {"model": NAME, "prompt": [1, 40, 41], "max_tokens": 8, "seed": 1}

    async def ask() -> None:
        async with asgi_client(made) as http:
            weights = model(1).state_dict()
            loading = asyncio.to_thread(made.load, weights, epoch=0, version=1, source="test")
            assert (await loading).label == "0.1"
            thread.swap(weights, 1)
            expected = sampled(thread, [Row(None, [1, 40, 41], PARAMS, noise=Noise(1), version=1)])
            same = [Row(None, [1, 40, 41], PARAMS, noise=Noise(1))]
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
            root = {"Authorization": "Bearer root"}
            for path in ("/pause", "/resume"):
                ended = await http.post(path, headers=root)
                assert (ended.status_code, ended.json()["error"]["code"]) == (503, "engine_ended")
            with pytest.raises(RuntimeError, match="process must be alive"):
                made.host.check_open()

    asyncio.run_coroutine_threadsafe(ask(), events).result(DEADLINE_S)
    assert "has ended (exit code -9)" in caplog.text  # of SIGKILL, as for want of memory


def test_large_requests_while_the_engine_is_held_up_harm_no_later_one():
    """uvloop's sockets do not block: half a message must not be all that is sent of one."""
    uvloop = pytest.importorskip("uvloop")

    async def ask() -> None:
        made = Service(await asyncio.to_thread(EngineProcess, settings(), SOURCE), tokenizer(),
                       settings(max_prompt_chars=10**7), source="here")  # fmt: skip
        async with asgi_client(made) as http:
            os.kill(made.host._process.pid, signal.SIGSTOP)
            # Ids that take megabytes on their way, and are too many for the model.
            long = {"prompt": [[40] * 1000] * 64, "max_tokens": 1}
            asking = [asyncio.create_task(http.post("/v1/completions", json=long))
                      for _ in range(4)]  # fmt: skip
            await asyncio.sleep(0.5)
            assert (await http.get("/healthz")).status_code == 200
            os.kill(made.host._process.pid, signal.SIGCONT)
            assert [(await each).status_code for each in asking] == [200] * 4
            asked = {"model": NAME, "prompt": [1, 40, 41], "max_tokens": 8, "seed": 1}
            assert (await http.post("/v1/completions", json=asked)).status_code == 200
            assert (await http.get("/readyz")).status_code == 200

    uvloop.run(asyncio.wait_for(ask(), DEADLINE_S))


def test_a_model_that_cannot_be_loaded_is_said():
    with pytest.raises(ValueError, match="no_such_function"):
        EngineProcess(settings(), "tests.serving.tiny_server.no_such_function")
