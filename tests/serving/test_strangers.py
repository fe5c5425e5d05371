"""What a stranger may send, and what must come of it: nobody else notices."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from rllib_llm.serving.completions import View
from rllib_llm.serving.guides import BusyError, Grammars, LlGuide
from rllib_llm.serving.http_server import make_app
from rllib_llm.serving.schemas import ChatRequest, CompletionRequest, ResponseRequest, TokenIds
from rllib_llm.serving.security import Clients, read_clients
from rllib_llm.serving.service import RequestContext, encoded, encoded_in_parts
from rllib_llm.shared.errors import Problems
from tests.serving.tiny_server import (
    DEADLINE_S,
    EOS,
    NAME,
    asgi_client,
    model,
    service,
    settings,
    tokenizer,
)

CHAT = [{"role": "user", "content": "Say something."}]
ASKED = {"model": NAME, "prompt": [1, 40, 41], "max_tokens": 4, "seed": 1}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def asked(test, **changes):
    """Runs `test(http, service)` against the application."""

    async def run() -> None:
        made = service(**changes)
        async with asgi_client(made) as http:
            await test(http, made)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["k,", ",k", "k,,l", " ", "", "k, "])
def test_an_empty_key_is_refused(keys):
    with pytest.raises(Problems, match="api_keys must hold keys"):
        read_clients(settings(api_keys=keys))


def test_empty_keys_of_other_places_are_refused_too(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: ann, key: ' '}\n")
    with pytest.raises(Problems, match="api_keys_file must hold"):
        read_clients(settings(api_keys_file=file))
    with pytest.raises(Problems, match="at least one character"):
        read_clients(settings(admin_key=" "))


@pytest.mark.parametrize(("text", "problem"), [
    ("- {key: s3cret, requests_per_minute: ten}", "entry 1: requests_per_minute: .* valid number"),
    ("- {key: s3cret, tokens_per_minute: 0}", "entry 1: tokens_per_minute: .* greater than 0"),
    ("- {key: ok}\n- {key: s3cret, limit: 3}", "entry 2: limit: Extra inputs"),
    ("- {name: s3cret}", "entry 1: key: Field required"),
    ("[]", "at least 1 item"),
    ("[s3cret]", "entry 1: "),
    ("s3cret: ann", "valid list"),
    ("- {key: 's3cret}", "not YAML"),
])  # fmt: skip
def test_a_file_of_keys_that_would_fail_requests_is_refused_without_its_keys(
    tmp_path, text, problem
):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(Problems, match=f"api_keys_file must hold .*{problem}") as error:
        read_clients(settings(api_keys_file=file))
    assert "s3cret" not in str(error.value) and error.value.__context__ is None


def test_an_entry_s_own_limits_go_before_the_server_s(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("- {key: 12, tokens_per_minute: null}\n- {name: bob, key: ' b '}\n")
    made = read_clients(settings(api_keys_file=file, requests_per_minute=2, tokens_per_minute=3))
    first, second = made.clients
    assert [(each.name, each.key) for each in made.clients] == [("key 0", b"12"), ("bob", b"b")]
    assert first.tokens.wait_seconds(1e9) == 0.0  # null: no limit
    for bucket in (first.requests, second.requests, second.tokens):
        bucket.use(10)
        assert bucket.wait_seconds() > 0


ADMINISTRATION = [
    ("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/abort_requests"),
    ("POST", "/inference/v1/abort_requests"), ("GET", "/weight_info"), ("POST", "/update_weights"),
    ("POST", "/drain"),
]  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "/llm", "/a/b"])
def test_no_form_of_a_path_passes_the_administration_s_key_by(prefix, tmp_path):
    """As Ray Serve does with a route_prefix: the application is mounted below it."""

    async def ask() -> None:
        made = service(update_weights_folder=tmp_path)
        await made.start()
        gate = make_app(made, Clients(read_clients(settings(api_keys="k")).clients, b"root"))
        app = Starlette(routes=[Mount(prefix or "/", gate)])
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as http:
            for method, path in ADMINISTRATION:
                for key in ("k", "", "wrong"):
                    for form in (path, f"{path}/", f"/{path}", path.replace("_", "%5f")):
                        answer = await http.request(
                            method, f"{prefix}{form}", headers=bearer(key), json={"path": "x"}
                        )
                        is_page = answer.text.startswith("<!doctype html>")  # of "//pause"
                        assert is_page or answer.status_code in (401, 404, 405, 307), form
            assert not made.host.is_paused and not made.is_draining
            answer = await http.get(f"{prefix}/is_paused", headers=bearer("root"))
            assert answer.json() == {"is_paused": False}
            for path in ("/v1/models", "/sessions/s"):
                assert (await http.get(f"{prefix}{path}")).status_code == 401
            assert (await http.post(f"{prefix}/v1/completions", json=ASKED)).status_code == 401
            for path in ("/healthz", "/health", "/readyz", "/openapi.json"):
                assert (await http.get(f"{prefix}{path}")).status_code == 200
        made.close()

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


def test_a_body_without_a_known_key_is_not_read():
    read = []

    async def body():
        for _ in range(3):
            read.append(1)
            yield b"x" * 1000

    async def ask(http, made) -> None:
        for key in ("", "wrong"):
            answer = await http.post("/v1/completions", content=body(), headers=bearer(key))
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert not made.jobs

    asked(ask, api_keys="k")


def test_weights_are_loaded_from_below_one_folder_alone(tmp_path):
    root, other = tmp_path / "weights", tmp_path / "other"
    model(1).save_pretrained(root / "good")
    model(1).save_pretrained(other)
    (root / "link").symlink_to(other)

    async def ask(http, made) -> None:
        async def status(path) -> int:
            answer = await http.post("/update_weights", json={"path": path}, headers=bearer("root"))
            return answer.status_code

        for path in (str(other), "../other", f"{root}/../other", str(root / "link"), "/", "/etc",
                     "tests.serving.tiny_server.build", "some/hub-model", "s3://bucket/model",
                     "~", ""):  # fmt: skip
            assert await status(path) == 400, path
        assert made.weights.newest.serial == 0
        assert await status(str(root / "good")) == await status("good") == 200

        both = await asyncio.gather(*(
            http.post("/update_weights", json={"path": "good"}, headers=bearer("root"))
            for _ in range(2)
        ))  # fmt: skip
        assert [answer.json()["version"] for answer in both] == [3, 4]

    asked(ask, admin_key="root", update_weights_folder=root)

    async def off(http, made) -> None:
        answer = await http.post(
            "/update_weights", json={"path": str(other)}, headers=bearer("root")
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path")

    asked(off, admin_key="root")


def test_a_session_belongs_to_the_key_that_began_it():
    async def ask(http, made) -> None:
        body = {"messages": CHAT, "max_tokens": 2}
        chat = "/sessions/s/v1/chat/completions"
        assert (await http.post(chat, json=body, headers=bearer("a"))).status_code == 200
        for method, path, given in (
            ("GET", "/sessions/s", None), ("DELETE", "/sessions/s", None),
            ("POST", "/sessions/s/reward", {"reward": 1}), ("POST", chat, body),
        ):  # fmt: skip
            answer = await http.request(method, path, json=given, headers=bearer("b"))
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                404, "session_not_found",
            ), path  # fmt: skip
        assert len((await http.get("/sessions/s", headers=bearer("a"))).json()["rows"]) == 1

    asked(ask, api_keys="a,b")


# --- what is hostile in a request ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["chat_template", "tools", "tokenize", "return_dict", "documents", "conversation",
             "tokenizer_kwargs", "add_generation_prompt", "continue_final_message", "padding"],
)  # fmt: skip
def test_a_request_brings_no_template_and_no_other_argument(name):
    async def ask(http, made) -> None:
        kwargs = {name: "{% for i in range(10**9) %}{% endfor %}"}
        for path in ("/v1/chat/completions", "/sessions/s/v1/chat/completions"):
            answer = await http.post(path, json={"messages": CHAT, "chat_template_kwargs": kwargs})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == f"chat_template_kwargs.{name}"
        thinking = {"chat_template_kwargs": {"enable_thinking": False}}
        good = {"messages": CHAT, "max_tokens": 1, **thinking}
        assert (await http.post("/v1/chat/completions", json=good)).status_code == 200

    asked(ask)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def with_call(call) -> list[dict]:
    return [*CHAT, {"role": "assistant", "tool_calls": [call]}, *CHAT]


HOSTILE = [
    {"messages": with_call({"function": None})},
    {"messages": with_call({"function": "x"})},
    {"messages": with_call({})},
    {"messages": with_call({"function": {"name": "f", "arguments": nested(900)}})},
    {"messages": with_call({"function": {"name": "f", "arguments": nested(100_000)}})},
    {"messages": with_call({"function": {"name": "f", "arguments": json.loads(nested(400))}})},
    {"messages": CHAT, "tools": [{"type": "function", "function": {
        "name": "f", "parameters": json.loads(nested(400))}}]},
    {"messages": CHAT, "chat_template_kwargs": json.loads(nested(400))},
    {"messages": CHAT, "metadata": json.loads(nested(400))},
    {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": json.loads(nested(400))}}},
    {"messages": CHAT, "n": 100, "max_tokens": 1},
]  # fmt: skip
LEVELS = [60, 190, 205, 260, 400, 800]  # pydantic writes 255, Python's own JSON about 1,000


@pytest.mark.parametrize("depth", LEVELS)
def test_what_is_kept_or_told_again_of_a_request_can_be_written(depth):
    deep = json.loads(nested(depth))
    tool = {"type": "function", "name": "f", "parameters": deep}

    async def ask(http, made) -> None:
        for body in ({"metadata": deep}, {"tools": [tool], "tool_choice": "none"}):
            for stream in (False, True):
                body = {"input": "a", "max_output_tokens": 2, "stream": stream, **body}
                answer = await http.post("/v1/responses", json=body)
                assert answer.status_code == (200 if depth < 196 else 400), answer.text
                assert "server_error" not in answer.text
        call = {"function": {"name": "f", "arguments": nested(depth)}}
        for kept in ({"messages": [{**CHAT[0], "further": deep}]}, {"messages": with_call(call)}):
            await http.post("/sessions/s/v1/chat/completions", json={**kept, "max_tokens": 2})
            assert (await http.get("/sessions/s")).status_code in (200, 404)
            assert (await http.delete("/sessions/s")).status_code in (200, 404)

    asked(ask)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_that_are_no_json_are_told_again_as_null(number):
    async def ask(http, made) -> None:
        for stream in ("false", "true"):
            body = '{"input": "a", "max_output_tokens": 2, "metadata": {"x": %s}, "stream": %s}'
            answer = await http.post(
                "/v1/responses", content=body % (number, stream),
                headers={"Content-Type": "application/json"},
            )  # fmt: skip
            assert answer.status_code == 200, answer.text
            assert '"metadata":{"x":null' in answer.text

    asked(ask)


@pytest.mark.parametrize("stream", [False, True])
def test_long_prompts_are_told_again_beside_the_event_loop(stream):
    threads = set()
    told = tokenizer()
    decode = told.decode

    def noting(*arguments, **options):
        threads.add(threading.get_ident())
        return decode(*arguments, **options)

    told.decode = noting

    async def ask() -> None:
        made = service(the_tokenizer=told)
        body = {"prompt": ["ab" * 500] * 17, "max_tokens": 0, "echo": True, "logprobs": 1}
        async with asgi_client(made) as http:
            threads.clear()
            answer = await http.post("/v1/completions", json={**body, "stream": stream})
            assert answer.status_code == 200
        assert threads and threading.get_ident() not in threads

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


@pytest.mark.parametrize("is_large", [False, True])
def test_the_json_of_a_large_answer_is_made_beside_the_event_loop(is_large):
    class Told(View):
        async def events(self):
            yield {"thread": (threading.get_ident() for _ in range(1))}  # asked when it is written

    async def ask(http, made) -> None:
        app = SimpleNamespace(state=SimpleNamespace(service=made))
        state = {"request_id": "r", "client": None, "size": 0}
        scope = {"type": "http", "app": app, "state": state, "headers": []}
        context = RequestContext(Request(scope, receive=asyncio.Event().wait))
        view = Told(context, SimpleNamespace(stream=False, model=None, seed=None))
        view.has_large_answer = is_large
        response = await view.answer()
        (thread,) = json.loads(response.body)["thread"]
        assert (thread != threading.get_ident()) == is_large

    asked(ask)


def test_a_large_answer_in_parts_is_the_same_json():
    answer = {"a": [1, 2.5, None, True, {"b": "é\n", "c": {"d": [[[[["x", {}]]]]]}}, [], {}],
              "e": math.inf, "f": [math.nan, (1, 2)], "g": {"h": -0.0, "i": 1e-7}}  # fmt: skip
    assert encoded_in_parts(answer) == encoded(answer)
    assert json.loads(encoded_in_parts(answer))["e"] is None


HALF = '{"prompt": "\\ud800", "input": "\\ud800"}'  # of a character


@pytest.mark.parametrize("body", [
    HALF.encode(), HALF.replace("d800", "D800").encode(),
    HALF.replace("\\ud800", "X").encode().replace(b"X", b"\xed\xa0\x80"),
    *map(HALF.encode, ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"]),
])  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/responses"])
def test_halves_of_characters_are_refused_in_every_encoding(path, body):
    async def ask(http, made) -> None:
        answer = await http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")

    asked(ask)


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/sessions/s/v1/chat/completions"])
def test_what_cannot_be_answered_is_a_client_s_mistake(body, path):
    async def ask(http, made) -> None:
        answer = await http.post(path, json={"max_tokens": 2, **body})
        assert answer.status_code in (200, 400), answer.text
        assert (await http.post(path, json={"messages": CHAT, "max_tokens": 2})).status_code == 200

    asked(ask, max_rows=8, max_waiting=8)


def test_a_template_that_raises_anything_is_a_client_s_mistake():
    broken = tokenizer(
        "{% if messages|length > 2 %}{{ 1 // 0 }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    )

    async def ask() -> None:
        made = service(the_tokenizer=broken)
        async with asgi_client(made) as http:
            answer = await http.post("/v1/chat/completions", json={"messages": CHAT * 3})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


def test_what_never_finds_a_place_is_refused_for_good():
    async def ask(http, made) -> None:
        body = {**ASKED, "prompt": [[1, 40]] * 4, "n": 5}
        answer = await http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            400, "too_many_completions",
        )  # fmt: skip

    asked(ask, max_rows=8, max_waiting=8)


def test_long_texts_are_refused_before_they_are_tokenised_and_hold_nobody_up():
    text = "word " * 700_000  # 3.5 MB

    async def ask(http, made) -> None:
        latest = 0.0

        async def watch() -> None:
            nonlocal latest
            while True:
                begun = time.thread_time()  # of the loop's thread, however busy the machine
                assert (await http.get("/healthz")).status_code == 200
                latest = max(latest, time.thread_time() - begun)
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        for path, body in (
            ("/v1/completions", {"prompt": text}), ("/tokenize", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):  # fmt: skip
            answer = await http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                400, "context_length_exceeded",
            ), path  # fmt: skip
        # As many as are taken are tokenised beside the loop.
        asking = {"prompt": text[:1_000_000]}
        many = await http.post("/tokenize", json=asking)
        assert many.status_code == 400
        watching.cancel()
        assert latest < 5, "tokenising 4 MB here took 8 to 11 s"

    asked(ask)


# --- limits --------------------------------------------------------------------------------------


def test_scored_prompts_count_as_tokens_and_places():
    long = [1, *[40] * 99]

    async def ask(http, made) -> None:
        scored = {"prompt": [long] * 4, "max_tokens": 0, "echo": True, "logprobs": 0}
        made.host.pause()
        held = asyncio.create_task(http.post("/v1/completions", json=scored, headers=bearer("k")))
        while not made.jobs:
            await asyncio.sleep(0.001)
        assert made.num_rows == 4
        full = await http.post("/v1/completions", json=scored, headers=bearer("k"))
        assert (full.status_code, full.json()["error"]["code"]) == (429, "server_overloaded")
        made.host.resume()
        assert (await held).status_code == 200
        late = await http.post("/v1/completions", json=scored, headers=bearer("k"))
        assert (late.status_code, late.json()["error"]["code"]) == (429, "rate_limit_exceeded")

    asked(ask, api_keys="k", tokens_per_minute=300, max_rows=2, max_waiting=4)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_scoring_can_be_aborted_while_the_server_is_paused(max_tokens):
    """As trainers do before they load weights: such requests waited until it was resumed."""

    async def ask(http, made) -> None:
        made.host.pause()
        scored = {"prompt": [1, 40], "max_tokens": max_tokens, "echo": True, "logprobs": 0}
        asking = asyncio.create_task(http.post("/v1/completions", json=scored))
        while not made.jobs:
            await asyncio.sleep(0.001)
        aborted = await http.post("/abort_requests", headers=bearer("root"))
        assert len(aborted.json()["aborted"]) == 1
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
        assert not made.num_rows
        # What is left of it in the engine is of a version that goes, which ends nothing else.
        weights = model(1).state_dict()
        await asyncio.to_thread(made.load, weights, epoch=0, version=1, source="test")
        made.host.resume()
        assert (await http.post("/v1/completions", json=scored)).status_code == 200

    asked(ask, admin_key="root", in_flight="recompute")


def test_two_weights_cannot_have_one_version(tmp_path):
    for seed in (1, 2):
        model(seed).save_pretrained(tmp_path / str(seed))

    async def ask(http, made) -> None:
        async def update(path, **numbers):
            json = {"path": path, **numbers}
            return await http.post("/update_weights", json=json, headers=bearer("root"))

        assert (await update("1", version=5)).json()["version"] == 5
        for taken in ({"version": 5}, {"version": 0, "epoch": 0}):
            refused = await update("2", **taken)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (409, "weight_version_in_use")
            assert f"version={taken['version']} must be one that is not in use" in error["message"]
        assert (await update("2", version=5, epoch=1)).json()["epoch"] == 1
        assert (await update("1")).json()["version"] == 6

    asked(ask, admin_key="root", update_weights_folder=tmp_path)


@pytest.mark.parametrize("scores", [False, True])
def test_weights_that_a_pause_would_hold_up_are_refused(scores, tmp_path):
    """With in_flight="finish" the third version waited for completions that nobody resumed."""
    model(1).save_pretrained(tmp_path / "good")
    body = {"prompt": [[1, 40]] * 2, "max_tokens": 900, "ignore_eos": True}
    if scores:
        body = {"prompt": [[1, 40]] * 2, "max_tokens": 0, "echo": True, "logprobs": 0}

    async def ask(http, made) -> None:
        async def post(route, **json):
            return await http.post(route, json=json or None, headers=bearer("root"))

        made.host.pause()
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        while sum((await made.counts()).by_version.values()) < 2:
            await asyncio.sleep(0.001)
        assert (await post("/update_weights", path="good")).status_code == 200
        refused = await post("/update_weights", path="good")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (409, "paused")
        assert "Weights 0.1 must be the last" in error["message"]
        assert "2 completions of 0.0 have to end first" in error["message"]
        await post("/abort_requests")
        await asking
        loaded = await post("/update_weights", path="good")
        assert (loaded.status_code, loaded.json()["version"]) == (200, 2)

    asked(ask, admin_key="root", update_weights_folder=tmp_path)


def test_scoring_ends_at_the_deadline():
    async def ask(http, made) -> None:
        made.host.pause()
        scored = {"prompt": [1, 40], "max_tokens": 0, "echo": True, "logprobs": 0}
        answer = await http.post("/v1/completions", json=scored)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")

    asked(ask, deadline_s=0.2)


def test_echo_and_completion_are_of_one_version_under_swaps():
    """Scores are compared with one forward pass of the version that the answer names."""
    import torch

    models = [model(seed) for seed in range(3)]
    prompt = [1, *range(40, 90)]

    def expected(version: int, ids: list[int]) -> list[float]:
        with torch.no_grad():
            logits = models[version % 3](torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logits.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()

    async def ask(http, made) -> None:
        stop = False

        async def swap() -> None:
            version = 0
            while not stop:
                version += 1
                weights = models[version % 3].state_dict()
                await asyncio.to_thread(made.load, weights, epoch=0, version=version, source="test")

        async def score(i: int) -> None:
            for max_tokens in (0, 3):
                body = {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 0,
                        "seed": i, "return_token_ids": True, "ignore_eos": True}  # fmt: skip
                answer = await http.post("/v1/completions", json=body)
                told = answer.json()
                assert answer.status_code == 200, told
                versions = told["metadata"]["weight_versions"].split(",")
                assert len(versions) == 1
                found = told["choices"][0]["logprobs"]["token_logprobs"][1:]
                ids = [*prompt, *told["choices"][0]["token_ids"]]
                version = int(versions[0].partition(".")[2])
                assert found == pytest.approx(expected(version, ids), abs=1e-4)

        swapping = asyncio.create_task(swap())
        for i in range(6):
            await asyncio.gather(*(score(i * 4 + k) for k in range(4)))
        stop = True
        await swapping
        assert made.weights.newest.version > 2

    asked(ask)


# --- grammars ------------------------------------------------------------------------------------


def guide_by(host, grammars: Grammars) -> None:
    host._grammars, host.compile, host.release = grammars, grammars.compile, grammars.release


def test_a_grammar_is_compiled_once_however_many_rows_keep_to_it():
    class Counted(Grammars):
        count = 0

        def _compile(self, grammar):
            self.count += 1
            return super()._compile(grammar)

    grammars = Counted(tokenizer(), EOS)

    async def ask(http, made) -> None:
        guide_by(made.host, grammars)
        body = {**ASKED, "n": 8, "max_tokens": 9,
                "response_format": {"type": "regex", "regex": "[0-9]{3}"}}  # fmt: skip
        for _ in range(2):
            choices = (await http.post("/v1/completions", json=body)).json()["choices"]
            assert len(choices) == 8 and all(each["text"].isdecimal() for each in choices)

    asked(ask)
    assert grammars.count == 1


def lark(number: int) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f'start: "{number}"'}]})


def test_many_grammars_cost_nobody_his_own_and_the_queue_has_an_end():
    """Those that wait were forgotten first, and compiled anew where requests are taken in."""
    gate, seen = threading.Event(), []

    class Held(Grammars):
        def _compile(self, grammar):
            seen.append(grammar)
            assert gate.wait(DEADLINE_S)
            return super()._compile(grammar)

    grammars = Held(tokenizer(), EOS)
    mine = grammars.compile(lark(0), 0)
    with pytest.raises(AssertionError, match="is compiled before"):
        grammars.guide(lark(0))
    gone = [grammars.compile(lark(i), i) for i in range(1, 64)]
    with pytest.raises(BusyError):
        grammars.compile(lark(99), 99)
    shared = grammars.compile(lark(1), 101)
    for i, future in enumerate(gone, start=1):  # nobody waits for them any more, but for one
        future.cancel()
        grammars.release(i)
    gate.set()
    mine.result(DEADLINE_S)
    shared.result(DEADLINE_S)
    for i in range(200, 300):
        grammars.compile(lark(i), i).result(DEADLINE_S)
        grammars.release(i)
    assert grammars.guide(lark(0)) and grammars.guide(lark(1))  # pinned
    assert seen[:2] == [lark(0), lark(1)] and len(seen) == 102
    assert len(grammars._entries) == 64
    for pin in (0, 101):
        grammars.release(pin)
    for i in range(300, 370):
        grammars.compile(lark(i), i).result(DEADLINE_S)
        grammars.release(i)
    assert len(grammars._entries) == 64 and lark(0) not in grammars._entries
    assert all(not entry.pins for entry in grammars._entries.values())


def test_a_grammar_that_has_to_wait_is_no_mistake_of_the_client(monkeypatch):
    monkeypatch.setattr("rllib_llm.serving.service._GRAMMAR_SECONDS", 0.1)
    gate = threading.Event()

    class Held(Grammars):
        def _compile(self, grammar):
            gate.wait(DEADLINE_S)
            return super()._compile(grammar)

    async def ask(http, made) -> None:
        grammars = Held(tokenizer(), EOS)
        guide_by(made.host, grammars)
        body = {**ASKED, "response_format": {"type": "regex", "regex": "[0-9]{3}"}}
        answers = [await http.post("/v1/completions", json=body) for _ in range(2)]
        assert [each.status_code for each in answers] == [503, 503]
        assert answers[0].json()["error"]["code"] == "grammar_timeout"
        monkeypatch.setattr("rllib_llm.serving.guides._MAX_WAITING", 1)
        other = {**body, "response_format": {"type": "regex", "regex": "[0-9]{4}"}}
        assert (await http.post("/v1/completions", json=other)).status_code == 429
        gate.set()
        monkeypatch.setattr("rllib_llm.serving.service._GRAMMAR_SECONDS", 20.0)
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert not grammars._pins

    asked(ask)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("chat/completions", {"messages": [1] * 400_000}, "messages"),
        ("chat/completions", {"messages": CHAT, "tools": [1] * 400_000}, "tools"),
        ("chat/completions", {"messages": CHAT * 20_000}, "messages"),
        ("chat/completions", {"messages": CHAT, "logit_bias": {f"x{i}": 1 for i in range(200_000)}},
         "logit_bias"),
        ("chat/completions", {"messages": CHAT, **{f"x{i}": 1 for i in range(200_000)}}, "fields"),
        ("completions", {"prompt": [1.5] * 400_000}, "prompt"),
        ("completions", {"prompt": [1], "stop_token_ids": [1.5] * 400_000}, "stop_token_ids"),
        ("responses", {"input": [1] * 400_000}, "input"),
    ],
)  # fmt: skip
def test_many_mistakes_cost_as_much_as_one(path, body, named):
    """Each had an error of its own, made in the event loop."""
    told = {"chat/completions": ChatRequest, "completions": CompletionRequest,
            "responses": ResponseRequest}[path]  # fmt: skip
    with pytest.raises(ValidationError) as found:
        told.model_validate({"model": NAME, **body})
    assert found.value.error_count() <= 5

    async def ask(http, made) -> None:
        answer = await http.post(f"/v1/{path}", json={"model": NAME, **body})
        assert answer.status_code == 400 and named in answer.json()["error"]["message"]

    asked(ask, max_body_bytes=2**25)


TOOL = {"type": "function", "function": {"name": "f"}}
PART, FUNCTION = {"type": "text", "text": ""}, {"function": {"name": "f"}}
KEYS = {f"k{i}": 1 for i in range(257)}


@pytest.mark.parametrize(("path", "body", "named"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * 17_000}] * 2},
     None),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [FUNCTION] * 9000}
                                           ] * 2}, None),
    ("/tokenize", {"messages": [{"role": "user", "content": [PART] * 33_000}]}, None),
    ("/v1/responses", {"input": [{"role": "user", "content": [PART] * 33_000}]}, None),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "c",
                                  "output": [PART] * 33_000}]}, None),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [
        {**TOOL, "function": {"name": "f", "parameters": {"a": [[]] * 33_000}}}]}, None),
    ("/v1/responses", {"input": "a", "metadata": {"a": [{}] * 33_000}}, None),
    ("/detokenize", {"tokens": [5] * (2**18 + 1)}, "tokens"),
    ("/v1/completions", {"prompt": [1], "stop_token_ids": [7] * 1025}, "stop_token_ids"),
    ("/v1/completions", {"prompt": [1], "metadata": KEYS}, "metadata"),
    ("/v1/chat/completions", {"messages": [{**CHAT[0], **KEYS}]}, "messages"),
    ("/v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": KEYS},
     "chat_template_kwargs"),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [
        {"type": "function", "function": {"name": "f", "parameters": KEYS}}]},
     "tools.0.function.parameters"),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [
        {"type": "function", "function": {"name": "f", **KEYS}}]}, "tools.0.function"),
])  # fmt: skip
def test_what_takes_long_to_validate_is_refused_before(path, body, named):
    """4 MB of parts or calls took the event loop 1.8 to 2.3 s; 128,000 stop tokens of 64 prompts
    1.4 s, and 33 MB on their way to the engine; 4 MB of keys 0.4 s, lists in a tool 0.9 s, of ids
    to decode 0.5 s."""

    async def ask(http, made) -> None:
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, named), answer.text

    asked(ask)


@pytest.mark.parametrize("text", ["[{" * 17_000, '["[' * 17_000, '\\"[{' * 17_000])
def test_brackets_in_texts_are_no_parts_of_a_request(text):
    async def ask(http, made) -> None:
        answer = await http.post("/tokenize", json={"prompt": text})
        assert answer.status_code == 200 and len(answer.json()["tokens"]) > 17_000, answer.text

    asked(ask, max_prompt_chars=2**20)


LONG = "\x7f" * 400_000


@pytest.mark.parametrize(("body", "named"), [
    ({LONG: 1}, "is no field"),
    ({"model": LONG}, "must be one of"),
    ({"logit_bias": {LONG: 1}}, "logit_bias"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": LONG}}},
     "must name one of the tools"),
])  # fmt: skip
def test_a_long_name_is_told_by_its_beginning(body, named):
    """4 MB of it had an answer of 20 MB, and took the event loop 0.8 s where names like it were
    looked for."""

    async def ask(http, made) -> None:
        answer = await http.post("/v1/chat/completions", json={"messages": CHAT, **body})
        assert answer.status_code in (400, 404) and named in answer.json()["error"]["message"]
        assert len(answer.content) < 2**15

    asked(ask)


@pytest.mark.parametrize(("path", "field", "body"), [
    ("/v1/completions", "prompt", {"prompt": [1, -1]}),
    ("/v1/completions", "prompt", {"prompt": [[1], [1, 10**30]]}),
    ("/v1/completions", "stop_token_ids", {"prompt": [1], "stop_token_ids": [-1]}),
    ("/inference/v1/generate", "token_ids", {"token_ids": [-1], "sampling_params": {}}),
    ("/detokenize", "tokens", {"tokens": [-1]}),
])  # fmt: skip
def test_ids_that_are_no_tokens_are_refused_though_the_schema_checks_their_type_alone(
    path, field, body
):
    """Bounds of each took the event loop 0.1 s of a request of 4 MB."""
    item = TypeAdapter(TokenIds).core_schema["items_schema"]
    assert item["type"] == "int" and not {"ge", "lt"} & item.keys()
    described = TypeAdapter(TokenIds).json_schema()["items"]
    assert (described["minimum"], described["exclusiveMaximum"]) == (0, 2**31)

    async def ask(http, made) -> None:
        answer = await http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), answer.text
        assert "must be at least 0 and below" in error["message"]

    asked(ask)


def test_a_schema_beyond_the_limit_is_refused_and_holds_nobody_up():
    properties = {f"property_{i}": {"type": "string"} for i in range(4000)}

    async def ask(http, made) -> None:
        schema = {"name": "x", "schema": {"type": "object", "properties": properties}}
        wanted = {"type": "json_schema", "json_schema": schema}
        body = {"messages": CHAT, "n": 8, "response_format": wanted}
        answer = await http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (
            400, "response_format.json_schema.schema",
        )  # fmt: skip

    asked(ask)


def test_an_answer_whose_matcher_broke_is_an_error_and_no_answer():
    grammars = Grammars(tokenizer(), EOS)
    grammar = json.dumps({"grammars": [{"lark_grammar": "start: /[0-9]{3}/"}]})
    grammars.compile(grammar, 0).result(DEADLINE_S)
    guide = grammars.guide(grammar)
    assert guide.problem == ""
    guide.take(ord("x") + 3)
    assert guide.problem

    class Breaking(LlGuide):
        """Breaks at its first token, as a matcher that runs into a limit does."""

        def take(self, token_id: int) -> None:
            super().take(ord("x") + 3)

    class BreakingGrammars(Grammars):
        def guide(self, grammar):
            return Breaking(super().guide(grammar)._matcher)

    async def ask(http, made) -> None:
        guide_by(made.host, BreakingGrammars(tokenizer(), EOS))
        body = {**ASKED, "max_tokens": 9, "response_format": {"type": "regex", "regex": "[0-9]{3}"}}
        answer = await http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "grammar_failed")
        streamed = await http.post("/v1/completions", json={**body, "stream": True})
        assert "grammar_failed" in streamed.text and "[DONE]" in streamed.text

    asked(ask)


def test_readiness_asks_the_engine(monkeypatch):
    from concurrent.futures import Future

    monkeypatch.setattr("rllib_llm.serving.service._ALIVE_SECONDS", 0.05)

    async def ask(http, made) -> None:
        assert (await http.get("/readyz")).status_code == 200
        made.host.count = Future  # an engine that never answers
        answer = await http.get("/readyz")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_silent")
        assert (await http.get("/metrics")).status_code == 200, "it waited for ever"

    asked(ask)
