"""The application itself: what it refuses, what it swaps, and what it frees."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from rllib_llm.engines.params import SamplingParams
from rllib_llm.serving.http_server import open_service
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.shared.errors import SettingWarning
from tests.serving.tiny_server import (
    DEADLINE_S,
    EOS,
    NAME,
    asgi_client,
    model,
    plain_logprobs,
    running,
    service,
    tokenizer,
    until,
)

ASKED = {"model": NAME, "prompt": [1, 40, 41], "max_tokens": 8, "seed": 1}
LONG = {**ASKED, "max_tokens": 1000, "ignore_eos": True}


def lines_of(answer: httpx.Response) -> list[dict]:
    """The events of a stream that ended as it should."""
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.slow  # many completions
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32),
    stop=st.lists(st.text(alphabet="ae é€", min_size=1, max_size=2), max_size=3),
    temperature=st.sampled_from([0, 0.7, 1, 1.5]),
    max_tokens=st.integers(1, 40),
    logprobs=st.sampled_from([None, 0, 2]),
    keeps=st.booleans(),
)
def test_streamed_equals_not_streamed(tiny, seed, stop, temperature, max_tokens, logprobs, keeps):
    asked = {
        **ASKED, "seed": seed, "stop": stop, "temperature": temperature, "max_tokens": max_tokens,
        "logprobs": logprobs, "include_stop_str_in_output": keeps, "return_token_ids": True,
        "n": 2, "top_p": 0.9,
    }  # fmt: skip
    whole = httpx.post(f"{tiny[0]}/v1/completions", json=asked, timeout=DEADLINE_S).json()
    told = {"stream": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(f"{tiny[0]}/v1/completions", json=asked | told, timeout=DEADLINE_S)
    *chunks, last = lines_of(answer)
    assert last["usage"] == whole["usage"]
    for i, choice in enumerate(whole["choices"]):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == i]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [t for c in own for t in c["token_ids"]] == choice["token_ids"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["stop_reason"] == choice["stop_reason"]
        if logprobs is not None:
            for name in ("tokens", "token_logprobs", "text_offset"):
                values = choice["logprobs"][name]
                assert [v for c in own for v in c["logprobs"][name]] == values
                assert len(values) == len(choice["token_ids"])
        if isinstance(choice["stop_reason"], str):
            assert choice["text"].endswith(choice["stop_reason"]) or not keeps


def test_tokens_in_tokens_out_in_both_of_vllm_s_shapes(tiny):
    asked = {
        "token_ids": [1, 40, 41], "request_id": "r1", "return_token_ids": True,
        "sampling_params": {"max_tokens": 9, "seed": 5, "logprobs": 1, "temperature": 1.0},
    }  # fmt: skip
    answer = httpx.post(f"{tiny[0]}/inference/v1/generate", json=asked).json()
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    expected = plain_logprobs(model(), [1, 40, 41], choice["token_ids"])
    assert [entry["logprob"] for entry in content] == pytest.approx(expected, abs=1e-4)
    assert answer["request_id"] == "r1" and answer["prompt_token_ids"] == [1, 40, 41]
    assert answer["metadata"] == {"weight_version": "0.0", "weight_versions": "0.0"}
    events = lines_of(
        httpx.post(f"{tiny[0]}/inference/v1/generate", json={**asked, "stream": True})
    )
    assert [t for e in events for t in e["choices"][0]["token_ids"]] == choice["token_ids"]
    spans = [{"version": "0.0", "start": 0, "end": len(choice["token_ids"])}]
    assert choice["weight_versions"] == events[-1]["choices"][0]["weight_versions"] == spans


def test_noise_is_named_as_a_run_names_it(tiny):
    def tokens(**changes) -> list[list[int]]:
        params = {"max_tokens": 9, "seed": 5, **changes}
        asked = {"token_ids": [1, 40, 41], "sampling_params": params}
        answer = httpx.post(f"{tiny[0]}/inference/v1/generate", json=asked).json()
        return [choice["token_ids"] for choice in answer["choices"]]

    # Of several completions each has a row of its own.
    assert tokens(n=3)[2] == tokens(noise_row=2)[0] != tokens()[0]
    assert tokens(noise_turn=1) != tokens()
    ended = tiny[1].host.complete(
        [1, 40, 41], SamplingParams(3, (EOS,), max_new_tokens=9), seed=5, row=2, turn=1
    )
    assert [ended.token_ids] == tokens(noise_row=2, noise_turn=1)


def test_prompts_are_encoded_as_in_training():
    """The tokenizer puts BOS (1) and EOS (2) around every text; a prompt has one BOS and no EOS."""
    of_both = tokenizer()
    of_both._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", EOS)]
    )
    expected = [1, *of_both("Hi", add_special_tokens=False)["input_ids"]]

    async def answers() -> list[list[int]]:
        async with asgi_client(service(the_tokenizer=of_both)) as http:
            found = []
            for prompt in ("Hi", "<s>Hi"):
                told = await http.post("/tokenize", json={"prompt": prompt})
                asked = {**ASKED, "prompt": prompt, "max_tokens": 1, "return_token_ids": True}
                made = await http.post("/v1/completions", json=asked)
                found += [told.json()["tokens"], made.json()["choices"][0]["prompt_token_ids"]]
            return found

    assert asyncio.run(answers()) == [expected] * 4


def test_texts_become_tokens_and_back(tiny):
    made = httpx.post(
        f"{tiny[0]}/tokenize", json={"prompt": "Hé", "return_token_strs": True}
    ).json()
    assert made["count"] == len(made["tokens"]) == 4 and made["token_strs"][1] == "H"
    empty = {"messages": [], "add_generation_prompt": False}
    refused = httpx.post(f"{tiny[0]}/tokenize", json=empty)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    back = httpx.post(f"{tiny[0]}/detokenize", json={"tokens": made["tokens"][1:]}).json()
    assert back == {"prompt": "Hé"}
    chat = {"messages": [{"role": "user", "content": "x"}], "return_token_strs": True}
    texts = httpx.post(f"{tiny[0]}/tokenize", json=chat).json()["token_strs"]
    assert "".join(texts) == "[user]x</s>[assistant]"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"model": "\xff\xfe"}', None),
        (b"null", None),
        (b"[]", None),
        (b"", None),
        (b'{"prompt": "a", "max_tokens": 1e999}', None),
        (b'{"prompt": "a", "temperature": NaN}', None),
        (b'{"prompt": {"a": 1}}', "invalid_value"),
        (b'{"prompt": [[]]}', "invalid_value"),
        (b'{"prompt": [99999999999]}', "invalid_value"),
        (b'{"prompt": [100000]}', "invalid_value"),
        (b'{"prompt": ""}', None),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"prompt": "a", "n": true}', "invalid_value"),
        (b'{"prompt": "a", "seed": "1"}', "invalid_value"),
        (b'{"prompt": "a", "stop": ["", 3]}', "invalid_value"),
        (b'{"prompt": "a", "max_tokens": 0}', "invalid_value"),
        (b'{"prompt": "a", "model": "tiny@9.9"}', "model_not_found"),
    ],
)
def test_nonsense_is_refused_in_openai_s_shape(tiny, body, code):
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{tiny[0]}/v1/completions", content=body, headers=headers)
    assert answer.status_code in (400, 404) or (answer.status_code == 200 and b'""' in body)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert code is None or error["code"] == code


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_json_that_is_not_called_so_is_refused_by_the_header_s_name(tiny, kind):
    body = {"content": b'{"prompt": "a"}', "headers": {"Content-Type": kind}}
    answer = httpx.post(f"{tiny[0]}/v1/completions", **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "Content-Type")
    assert kind in error["message"]


def test_a_path_that_is_not_there_and_a_method_that_is_none(tiny):
    assert httpx.get(f"{tiny[0]}/nothing").json()["error"]["type"] == "not_found_error"
    missed = httpx.post(f"{tiny[0]}/v1/completion").json()["error"]["message"]
    assert missed == "POST /v1/completion: Not Found. Did you mean /v1/completions?"
    refused = httpx.get(f"{tiny[0]}/v1/completions")
    assert (refused.status_code, refused.headers["Allow"]) == (405, "POST")
    refused = httpx.put(f"{tiny[0]}/sessions/one")
    assert (refused.status_code, refused.headers["Allow"]) == (405, "DELETE, GET, HEAD")


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/metrics", "/v1/models",
                                  "/openapi.json", "/nothing"])  # fmt: skip
def test_head_is_answered_as_get_without_the_body(tiny, path):
    head, got = httpx.head(f"{tiny[0]}{path}"), httpx.get(f"{tiny[0]}{path}")
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["Content-Type"] == got.headers["Content-Type"]


def test_unknown_fields_are_corrected_from_where_they_stand(tiny):
    for params, told in (
        ({"temprature": 1}, "sampling_params.temprature is no field of this request. Did you mean "
                            "'temperature'?"),
        ({"priority": 1}, "sampling_params.priority is no field of this request. Leave it out."),
    ):  # fmt: skip
        body = {"token_ids": [1], "sampling_params": params}
        refused = httpx.post(f"{tiny[0]}/inference/v1/generate", json=body)
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, told)


@pytest.mark.parametrize("value", [0, 0.0, 1, True, "false"])
def test_background_is_false_alone(tiny, value):
    body = {"model": NAME, "input": "Hi", "background": value}
    refused = httpx.post(f"{tiny[0]}/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")


def test_metrics_count_what_was_asked(tiny):
    def value(name: str) -> float:
        text = httpx.get(f"{tiny[0]}/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    before = value("rllib_llm_generation_tokens_total"), value("rllib_llm_prompt_tokens_total")
    made = httpx.post(f"{tiny[0]}/v1/completions", json=ASKED).json()["usage"]
    until(lambda: value("rllib_llm_num_requests_running") == 0)
    assert value("rllib_llm_generation_tokens_total") - before[0] == made["completion_tokens"]
    assert value("rllib_llm_prompt_tokens_total") - before[1] == made["prompt_tokens"]
    assert value("rllib_llm_time_to_first_token_seconds_count") > 0
    assert value("rllib_llm_weights_version") == 0


# --- weights -----------------------------------------------------------------------------------


@pytest.mark.slow  # a hundred swaps
def test_a_hundred_swaps_under_32_connections_fail_nobody_and_mix_nothing():
    made = service()
    models = [model(seed) for seed in range(3)]
    answers: list[tuple[dict, dict]] = []
    stopped = False

    async def ask(http: httpx.AsyncClient, number: int) -> None:
        draw = random.Random(number)
        while not stopped:
            asked = {
                "token_ids": [1, *(draw.randrange(10, 250) for _ in range(draw.randrange(2, 9)))],
                "sampling_params": {"max_tokens": draw.randrange(2, 12), "logprobs": 0},
            }
            answer = await http.post("/inference/v1/generate", json=asked)
            assert answer.status_code == 200, answer.text
            answers.append((asked, answer.json()))

    async def swap() -> None:
        nonlocal stopped
        async with asgi_client(made) as http:
            asking = [asyncio.create_task(ask(http, i)) for i in range(32)]
            for version in range(1, 101):
                weights = models[version % 3].state_dict()
                loaded = await asyncio.to_thread(
                    made.load, weights, epoch=0, version=version, source="test"
                )
                assert loaded.version == version
            stopped = True
            await asyncio.gather(*asking)

    asyncio.run(asyncio.wait_for(swap(), DEADLINE_S))
    seen = set()
    for asked, answer in answers[:: max(1, len(answers) // 200)]:
        version = int(answer["metadata"]["weight_versions"].split(".")[1])  # one, or this fails
        content = answer["choices"][0]["logprobs"]["content"]
        expected = plain_logprobs(
            models[version % 3], asked["token_ids"], answer["choices"][0]["token_ids"]
        )
        assert [entry["logprob"] for entry in content] == pytest.approx(expected, abs=1e-4)
        seen.add(version)
    assert len(seen) > 30


def test_versions_by_name_and_those_that_are_gone():
    async def ask() -> None:
        made = service(weights_wait_s=0.1)
        async with asgi_client(made) as http:

            async def load(epoch: int, version: int, seed: int) -> None:
                weights = model(seed).state_dict()
                await asyncio.to_thread(
                    made.load, weights, epoch=epoch, version=version, source="test"
                )

            async def answer(**changes) -> httpx.Response:
                headers = changes.pop("headers", None)
                return await http.post("/v1/completions", json=ASKED | changes, headers=headers)

            first = (await answer()).json()
            await load(0, 5, 1)
            second = (await answer()).json()
            assert (first["model"], second["model"]) == ("tiny@0.0", "tiny@0.5")
            assert first["system_fingerprint"] != second["system_fingerprint"]
            again = (await answer(model="tiny@0.0")).json()
            assert again["choices"] == first["choices"]
            await load(7, 3, 0)  # a lower version of a later epoch
            third = (await answer()).json()
            assert third["model"] == "tiny@7.3" and third["choices"] == first["choices"]
            assert third["system_fingerprint"] == first["system_fingerprint"]
            gone = await answer(model="tiny@0.0")
            assert gone.status_code == 404
            assert "['tiny', 'tiny@7.3', 'tiny@0.5']" in gone.json()["error"]["message"]
            late = await answer(headers={"X-Min-Weight-Version": "4"})
            assert (late.status_code, late.json()["error"]["type"]) == (
                409, "invalid_request_error",
            )  # fmt: skip
            wrong = await answer(headers={"X-Min-Weight-Version": "new"})
            assert wrong.status_code == 400
            made.settings.weights_wait_s = DEADLINE_S
            waiting = asyncio.create_task(answer(headers={"X-Min-Weight-Version": "7.4"}))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await load(7, 4, 2)
            assert (await waiting).json()["model"] == "tiny@7.4"

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_without_a_second_copy_an_answer_says_which_weights_sampled_it(in_flight):
    async def ask() -> None:
        made = service(in_flight=in_flight)
        async with asgi_client(made) as http:
            long = {**LONG, "max_tokens": 300, "return_token_ids": True}
            asking = asyncio.create_task(http.post("/v1/completions", json=long))
            while not any(job.num_completion_tokens for job in made.jobs.values()):
                await asyncio.sleep(0.001)
            weights = model(1).state_dict()
            await asyncio.to_thread(made.load, weights, epoch=0, version=1, source="test")
            answer = (await asking).json()
            assert answer["metadata"] == {"weight_version": "0.1", "weight_versions": "0.0,0.1"}
            assert len(answer["choices"][0]["token_ids"]) == 300
            tokens = {
                "token_ids": [1, 40], "sampling_params": {"max_tokens": 300, "ignore_eos": True}
            }  # fmt: skip
            asking = asyncio.create_task(http.post("/inference/v1/generate", json=tokens))
            while not any(job.num_completion_tokens for job in made.jobs.values()):
                await asyncio.sleep(0.001)
            weights = model(2).state_dict()
            await asyncio.to_thread(made.load, weights, epoch=0, version=2, source="test")
            first, second = (await asking).json()["choices"][0]["weight_versions"]
            assert (first["version"], first["start"]) == ("0.1", 0)
            assert (second["version"], second["end"]) == ("0.2", 300)
            assert 0 < first["end"] == second["start"] < 300

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


# --- who is gone, who waits ---------------------------------------------------------------------


def test_a_client_that_goes_away_frees_its_row_within_a_step():
    made = service()
    with running(made) as address:
        for stream in (True, False):
            with httpx.Client(base_url=address, timeout=DEADLINE_S) as http:
                if stream:
                    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as a:
                        next(a.iter_lines())
                else:
                    with pytest.raises(httpx.ReadTimeout):
                        http.post("/v1/completions", json=LONG, timeout=0.2)
            until(lambda: not made.jobs)
            steps = made.host.do(lambda: made.host.engine.num_running).result()
            assert steps == 0  # once the job is closed, before the next step


def test_a_full_server_says_when_to_come_again():
    async def ask() -> None:
        made = service(max_rows=1, max_waiting=1)
        async with asgi_client(made) as http:
            made.host.pause()
            first = [asyncio.create_task(http.post("/v1/completions", json=ASKED)) for _ in "ab"]
            while len(made.jobs) < 2:
                await asyncio.sleep(0.001)
            full = await http.post("/v1/completions", json=ASKED)
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
            made.host.resume()
            assert [(await each).status_code for each in first] == [200, 200]

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


@pytest.mark.parametrize(
    ("sizes", "seconds", "wait"),
    [
        # Two completions in 6 s, so four of the eight places in 12 s.
        ([1, 1], 3.0, "12"),
        # The same of one request: both end at the same time.
        ([2], 6.0, "12"),
        ([1, 1], 100.0, "30"),
        ([1, 1], 0.01, "1"),
        ([], 100.0, "1"),
    ],
)
def test_the_refused_are_told_to_wait_until_half_of_the_queue_has_begun(sizes, seconds, wait):
    now = 0.0
    made = service(max_rows=1, max_waiting=8, clock=lambda: now)

    async def ask() -> None:
        nonlocal now
        async with asgi_client(made) as http:

            def begin(n: int) -> asyncio.Task:
                return asyncio.create_task(http.post("/v1/completions", json={**ASKED, "n": n}))

            made.host.pause()
            # As long as there was room, ends tell how fast completions were asked for.
            alone = begin(1)
            while len(made.jobs) < 1:
                await asyncio.sleep(0.001)
            now += 1000
            made.host.resume()
            assert (await alone).status_code == 200
            made.host.pause()
            asked = [begin(n) for n in sizes]
            while len(made.jobs) < len(sizes):
                await asyncio.sleep(0.001)
            asked += [begin(1) for _ in range(9 - made.num_rows)]
            while made.num_rows < 9:
                await asyncio.sleep(0.001)
            for task in asked[: len(sizes)]:
                now += seconds
                task.cancel()
                await asyncio.wait([task])
            asked += [begin(1) for _ in range(9 - made.num_rows)]
            while made.num_rows < 9:
                await asyncio.sleep(0.001)
            full = await http.post("/v1/completions", json=ASKED)
            assert (full.status_code, full.headers["retry-after"]) == (429, wait)
            made.host.resume()
            left = asked[len(sizes) :]
            assert [(await each).status_code for each in left] == [200] * len(left)

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


def test_a_stream_that_outlasts_the_drain_is_ended_and_not_cut_off():
    made = service(drain_s=0.1)
    with ThreadPoolExecutor() as pool, httpx.Client(timeout=DEADLINE_S) as http:
        with running(made) as address:
            made.host.pause()
            asked = {**ASKED, "stream": True}
            stream = pool.submit(http.post, f"{address}/v1/completions", json=asked)
            until(lambda: made.jobs)
        *_, last = lines_of(stream.result(DEADLINE_S))
    assert last["choices"][0]["finish_reason"] == "abort"


def test_a_request_has_a_deadline_and_a_drained_server_takes_no_more():
    async def ask() -> None:
        made = service(deadline_s=0.2)
        async with asgi_client(made) as http:
            made.host.pause()
            late = await http.post("/v1/completions", json=ASKED)
            assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
            cut = await http.post("/v1/completions", json={**ASKED, "stream": True})
            assert cut.status_code == 504
            assert not made.jobs
            made.host.resume()
            assert (await http.get("/readyz")).status_code == 200
            assert await made.drain(1)
            closed = await http.post("/v1/completions", json=ASKED)
            assert (closed.status_code, closed.headers["retry-after"]) == (503, "1")
            assert (await http.get("/readyz")).status_code == 503
            assert (await http.get("/healthz")).status_code == 200

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


def test_a_server_that_starts_asks_to_come_again():
    chat = {"messages": [{"role": "user", "content": "a"}]}
    tokens = {"token_ids": [1, 40]}

    async def ask() -> None:
        made = service()
        async with asgi_client(made) as http:
            made.is_ready = False  # as one that waits for a run's first weights
            for path, body in (
                ("/v1/completions", ASKED), ("/v1/completions", {**ASKED, "stream": True}),
                ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True}),
                ("/v1/chat/completions", chat), ("/inference/v1/generate", tokens),
                ("/sessions/1/v1/chat/completions", chat),
            ):  # fmt: skip
                answer = await http.post(path, json=body)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path
                assert answer.json()["error"]["code"] == "unavailable"
            assert (await http.get("/readyz")).status_code == 503
            assert (await http.get("/healthz")).status_code == 200
            assert (await http.get("/metrics")).status_code == 200
            made.is_ready = True
            assert (await http.post("/v1/completions", json=ASKED)).status_code == 200

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


def test_stopping_lets_answers_under_way_end():
    made = service()
    with httpx.Client(timeout=DEADLINE_S) as http:
        with running(made) as address:
            asked = {**LONG, "max_tokens": 200, "stream": True}
            with http.stream("POST", f"{address}/v1/completions", json=asked) as answer:
                events = answer.iter_lines()
                next(events)
                made.is_draining = True  # as SIGTERM does, first of all
                rest = [line for line in events if line]
        assert rest[-1] == "data: [DONE]"
        finished = [json.loads(line[6:]) for line in rest[:-1]][-1]["choices"][0]
        assert finished["finish_reason"] == "length"


def test_a_model_that_gives_no_numbers_is_said():
    async def ask() -> None:
        broken = model()
        broken.lm_head.weight.data[:] = float("nan")
        async with asgi_client(service(the_model=broken)) as http:
            answer = await http.post("/v1/completions", json=ASKED)
            assert answer.status_code == 500
            assert "not finite" in answer.json()["error"]["message"]

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


def build_padded_with_eos():
    made = tokenizer()
    made.pad_token = made.eos_token
    return model(), made


def test_a_server_is_silent_about_padding_which_it_does_not_do(recwarn):
    source = f"{__name__}.build_padded_with_eos"
    open_service(ServeSettings(model=source, engine_process=False)).close()
    assert not [each for each in recwarn if issubclass(each.category, SettingWarning)]
