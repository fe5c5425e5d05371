"""Who may ask, how much, how slowly: each refusal with its number."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import time
import traceback

import httpx
import pytest

from rllib_llm.serving.security import Clients, TokenBucket, read_clients
from rllib_llm.serving.settings import ServeSettings, read_settings
from rllib_llm.shared.errors import Problems
from tests.serving.tiny_server import (
    DEADLINE_S,
    NAME,
    asgi_client,
    model,
    running,
    service,
    settings,
    until,
)

ASKED = {"model": NAME, "prompt": [1, 40, 41], "max_tokens": 4, "seed": 1}
KEYS = "- {name: ann, key: secret-a, requests_per_minute: 2}\n- {name: bob, key: secret-b}\n"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def asked(test, **changes):
    """Runs `test(http, service)` against the application."""

    async def run() -> None:
        made = service(**changes)
        async with asgi_client(made) as http:
            await test(http, made)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_keys_come_from_a_file_with_limits_each(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)

    async def ask(http, made) -> None:
        async def status(headers) -> int:
            return (await http.post("/v1/completions", json=ASKED, headers=headers)).status_code

        assert await status({}) == await status(bearer("wrong")) == await status(bearer("")) == 401
        assert await status({"Authorization": "Basic secret-a"}) == 401
        assert [await status(bearer("secret-a")) for _ in range(3)] == [200, 200, 429]
        full = await http.post("/v1/completions", json=ASKED, headers=bearer("secret-a"))
        assert 1 <= int(full.headers["retry-after"]) <= 31
        assert full.json()["error"]["type"] == "rate_limit_error"
        assert "'ann' has used its requests of this minute" in full.json()["error"]["message"]
        assert [await status(bearer("secret-b")) for _ in range(4)] == [200] * 4
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401

    asked(ask, api_keys_file=file)


def test_keys_come_from_the_environment_and_are_not_shown():
    environment = {"RLLIB_SERVE_API_KEYS": "s3cret-1,s3cret-2", "RLLIB_SERVE_PORT": "0"}
    made = read_settings({"model": "m"}, environment=environment)
    clients = read_clients(made).clients
    assert [client.key for client in clients] == [b"s3cret-1", b"s3cret-2"] and made.port == 0
    assert "s3cret" not in repr(made) + made.model_dump_json()


def test_tokens_of_a_minute_are_counted():
    async def ask(http, made) -> None:
        first = await http.post("/v1/completions", json=ASKED, headers=bearer("k"))
        assert first.json()["usage"]["total_tokens"] == 7
        second = await http.post("/v1/completions", json=ASKED, headers=bearer("k"))
        third = await http.post("/v1/completions", json=ASKED, headers=bearer("k"))
        assert (second.status_code, third.status_code) == (200, 429)  # 6 are used by the second

    asked(ask, api_keys="k", tokens_per_minute=10)


def test_tokens_are_booked_when_a_request_is_admitted():
    """Sixty requests at once passed a limit of ten tokens; the rest is given back at the end."""

    async def ask(http, made) -> None:
        body = {"prompt": [1, 40], "max_tokens": 8}
        asks = [http.post("/v1/completions", json=body, headers=bearer("k")) for _ in range(20)]
        codes = [answer.status_code for answer in await asyncio.gather(*asks)]
        assert sorted(codes) == [200] + [429] * 19
        assert not made.jobs

    asked(ask, api_keys="k", tokens_per_minute=10)


def test_tokens_that_were_booked_and_not_sampled_are_given_back():
    async def ask(http, made) -> None:
        stops = {"prompt": [1, 40], "max_tokens": 900, "stop_token_ids": list(range(260))}
        for _ in range(3):  # of three tokens each; 902 are booked
            answer = await http.post("/v1/completions", json=stops, headers=bearer("k"))
            assert answer.json()["usage"]["total_tokens"] == 3

    asked(ask, api_keys="k", tokens_per_minute=10)


# 2**19 entries, of which each place of a prompt has one and those of the likeliest.
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [[1] * 1000] * 128, "prompt_logprobs": 20,
                             "max_tokens": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [[1] * 1000] * 128, "echo": True, "logprobs": 20,
                             "max_tokens": 0}, "logprobs"),
        ("/v1/completions", {"prompt": [1], "n": 128, "logprobs": 20, "max_tokens": 200},
         "logprobs"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 128,
         "logprobs": True, "top_logprobs": 20, "max_tokens": 200}, "top_logprobs"),
    ],
)  # fmt: skip
def test_log_probs_that_would_fill_the_memory_are_refused(path, body, param):
    async def ask(http, made) -> None:
        answer = await http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert error["code"] == "too_many_logprobs" and not made.jobs
        fits = {"prompt": [1] * 1000, "prompt_logprobs": 20, "max_tokens": 1}
        assert (await http.post("/v1/completions", json=fits)).status_code == 200

    asked(ask, max_rows=128, max_waiting=300)


def test_a_bucket_fills_with_time():
    now = [0.0]
    bucket = TokenBucket(60, lambda: now[0])
    bucket.use(60)
    assert bucket.wait_seconds() == pytest.approx(1.0)
    now[0] = 0.5
    assert bucket.wait_seconds() == pytest.approx(0.5)
    bucket.use(10)  # more than there is: it has to be waited for
    assert bucket.wait_seconds() == pytest.approx(10.5)
    now[0] = 1000
    assert bucket.wait_seconds(60) == 0 and bucket.wait_seconds(100) == 0
    assert TokenBucket(None).wait_seconds(10**9) == 0


def test_the_administration_has_a_key_of_its_own_and_is_off_without(tmp_path):
    async def off(http, made) -> None:
        answer = await http.post("/pause", headers=bearer("k"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_off")
        answer = await http.post("/pause")
        assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
        assert "administration is off" in answer.json()["error"]["message"]

    asked(off, api_keys="k")

    async def on(http, made) -> None:
        for key in ("k", "", "wrong"):
            assert (await http.post("/pause", headers=bearer(key))).status_code == 401
        assert (
            await http.post("/v1/completions", json=ASKED, headers=bearer("root"))
        ).status_code == 401
        root = {"headers": bearer("root")}
        await http.post("/pause", **root)
        assert (await http.get("/is_paused", **root)).json() == {"is_paused": True}
        waiting = asyncio.create_task(
            http.post("/v1/completions", json=ASKED, headers=bearer("k") | {"X-Request-Id": "r1"})
        )
        while not made.jobs:
            await asyncio.sleep(0.001)
        aborted = await http.post("/abort_requests", json={"request_ids": ["r1"]}, **root)
        assert aborted.json() == {"aborted": ["r1"]}
        assert (await waiting).json()["choices"][0]["finish_reason"] == "abort"
        await http.post("/resume", **root)
        folder = tmp_path / "model"
        model(1).save_pretrained(folder)
        loaded = await http.post("/update_weights", json={"path": str(folder)}, **root)
        assert loaded.status_code == 200 and loaded.json()["version"] == 1
        info = (await http.get("/weight_info", **root)).json()
        assert [each["version"] for each in info["live"]] == [1, 0]
        (tmp_path / "empty").mkdir()
        nothing = {"path": str(tmp_path / "empty")}
        wrong = await http.post("/update_weights", json=nothing, **root)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "path")
        model(1, hidden_size=32).save_pretrained(tmp_path / "other")
        other = await http.post("/update_weights", json={"path": str(tmp_path / "other")}, **root)
        assert other.status_code == 400
        assert (await http.post("/drain", **root)).json() == {"drained": True, "under_way": 0}
        assert (await http.get("/readyz")).status_code == 503

    asked(on, api_keys="k", admin_key="root", update_weights_folder=tmp_path)


def test_the_administration_says_that_the_engine_has_ended(tmp_path):
    async def ended(http, made) -> None:
        root = {"headers": bearer("root")}
        model(1).save_pretrained(tmp_path / "model")
        made.host.close()
        for path, body in (("pause", {}), ("resume", {}), ("update_weights", {"path": "model"})):
            answer = await http.post(f"/{path}", json=body, **root)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_ended")
        assert (await http.get("/is_paused", **root)).json() == {"is_paused": False}
        assert (await http.post("/abort_requests", json={}, **root)).json() == {"aborted": []}

    asked(ended, api_keys="k", admin_key="root", update_weights_folder=tmp_path)


def test_other_addresses_than_this_machine_s_need_keys():
    with pytest.raises(Problems, match="host='0.0.0.0' must be one of"):
        settings(host="0.0.0.0").check_exposure(has_keys=False)
    settings(host="0.0.0.0").check_exposure(has_keys=True)
    settings().check_exposure(has_keys=False)


def test_settings_are_refused_by_name(tmp_path):
    with pytest.raises(Problems, match="prot must be a known key. Did you mean 'port'?"):
        read_settings({"model": "m", "prot": 8000}, environment={})
    with pytest.raises(Problems, match="port='x'"):
        read_settings({"model": "m"}, environment={"RLLIB_SERVE_PORT": "x"})
    file = tmp_path / "serve.yaml"
    file.write_text("model: a\nport: 1\nmax_rows: 3\ncors_origins: [http://b]\n")
    made = read_settings({"port": 3}, file, {"RLLIB_SERVE_PORT": "2", "RLLIB_SERVE_MAX_ROWS": "4"})
    assert (made.model, made.port, made.max_rows) == ("a", 3, 4)
    assert made.cors_origins == ["http://b"]
    file.write_text("- 1")
    with pytest.raises(Problems, match="must be a YAML file of settings by name: it is not"):
        read_settings({}, file, {})
    with pytest.raises(Problems, match="of settings by name: No such file or directory"):
        read_settings({}, tmp_path / "absent.yaml", {})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("model: a\napi_keys: 'sk-secret\n", "line \d is not YAML"),
        ("api_keys: [sk-secret\nmodel: a\n", "line \d is not YAML"),
        ("api_keys:sk-secret\nmodel: a\n", "line \d is not YAML"),
        ("api_keys: *sk-secret\n", "line \d is not YAML"),
        ("model: a\napi_keys: !!int sk-secret\n", "line \d is not YAML"),
        ("model: a\nlora: &a {r: *a}\n", "line \d is not YAML"),
        ("port: 1\nport: 2\n", "line \d is not YAML"),
        ("sk-secret", "it is not"),
    ],
)
def test_an_error_in_the_file_of_settings_shows_no_key(text, place, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(Problems, match=place) as caught:
        read_settings({}, file, {})
    assert "sk-secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": "m", "max_replicas": 2}, "admin_key must come with one replica"),
        ({"model": "m", "lora": {}}, "lora must come with weights_name"),
        ({"model": "m", "autoscaling": {"upscale_delay_s": 1}}, "autoscaling must come with"),
        (
            {"model": "m", "max_replicas": 1, "autoscaling": {"max_replicas": 3}},
            "autoscaling.max_replicas must be left out. Set max_replicas",
        ),
        ({}, "model must be given: Checkpoint, trial, run, Hugging Face folder or hub id"),
        ({"model": "m", "port": "x"}, "port='x' must be a whole number of at least 0 and"),
        ({"model": "m", "max_rows": 0},
         "max_rows=0 must be a whole number of at least 1: .* Write 64, its default."),
        ({"model": "m", "dtype": "int8"}, "dtype='int8' must be one of \\('float32', 'bfloat16'"),
        ({"model": "m", "engine_process": 7}, "engine_process=7 must be True or False: "),
        ({"model": "m", "ports": 1}, "ports must be a known key"),
        ({"model": "m", "api_key": "sk-secret"}, "api_key must be a known key"),
    ],
)
def test_an_error_of_settings_shows_no_key(given, told):
    keys = {"RLLIB_SERVE_API_KEYS": "sk-secret", "RLLIB_SERVE_ADMIN_KEY": "sk-secret-2"}
    with pytest.raises(Problems, match=f"^{told}") as caught:
        read_settings(given, environment=keys)
    assert "sk-secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "keys",
    [
        {"api_keys": "sk-a,sk-a"},
        {"api_keys": "sk-a", "api_keys_file": "- {key: sk-a, requests_per_minute: 1}"},
        {"api_keys": "sk-a", "admin_key": "sk-a"},
    ],
)
def test_a_key_of_two_owners_is_refused(keys, tmp_path):
    if "api_keys_file" in keys:
        file = tmp_path / "keys.yaml"
        file.write_text(keys["api_keys_file"])
        keys = {**keys, "api_keys_file": file}
    with pytest.raises(Problems, match="must have one owner") as caught:
        read_clients(settings(**keys))
    assert "sk-a" not in str(caught.value)


def test_pages_of_other_origins_are_let_in_only_where_listed():
    async def ask(http, made) -> None:
        preflight = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
        asking = await http.options("/v1/completions", headers=preflight)
        assert asking.status_code == 200
        assert asking.headers["access-control-allow-origin"] == "http://a"
        other = await http.options("/v1/completions", headers=preflight | {"Origin": "http://b"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        refused = await http.post("/v1/completions", headers={"Origin": "http://a"}, content=b"{")
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (
            400, "http://a")  # fmt: skip

    async def ask_others(http, made) -> None:
        plain = await http.get("/v1/models", headers={"Origin": "http://a"})
        assert "access-control-allow-origin" not in plain.headers

    asked(ask, cors_origins=["http://a"])
    asked(ask_others)


def test_a_browser_s_openai_client_may_send_its_own_headers():
    async def ask(http, made) -> None:
        named = "authorization,content-type,x-stainless-arch,x-stainless-retry-count"
        asking = await http.options("/v1/chat/completions", headers={
            "Origin": "http://a", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": named,
        })  # fmt: skip
        assert asking.status_code == 200
        assert "x-stainless-arch" in asking.headers["access-control-allow-headers"]

    asked(ask, cors_origins=["http://a"])


def test_a_key_of_other_letters_is_wrong_and_no_fault():
    async def ask(http, made) -> None:
        headers = {"Authorization": "Bearer schlüssel".encode()}
        answer = await http.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")

    asked(ask, api_keys="k")


def test_large_bodies_are_refused_before_they_are_read():
    made = service(max_body_bytes=10_000)
    with running(made) as address, httpx.Client(base_url=address, timeout=DEADLINE_S) as http:
        told = http.post("/v1/completions", content=b"x" * 10_001)
        assert (told.status_code, told.json()["error"]["code"]) == (413, "request_too_large")

        def chunks():
            for _ in range(100):
                yield b" " * 1024**2  # 100 MB, whose length nobody told

        assert http.post("/v1/completions", content=chunks()).status_code == 413
        assert http.post("/v1/completions", json=ASKED).status_code == 200


def test_why_a_large_body_is_refused_is_read_behind_all_of_it():
    """By clients that send all first: cut off, openai's asynchronous one tells no cause."""
    with running(service(max_body_bytes=10_000)) as address:
        host, port = address.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
        for path, body, status in (
            ("/v1/completions", b"x" * 30_000_000, 413),
            ("/v1/models", b"", 200),  # on the same connection
        ):
            connection.putrequest("POST" if body else "GET", path)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            for start in range(0, len(body), 2**20):
                connection.send(body[start : start + 2**20])
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (status, True)
        connection.close()


def test_slow_requests_are_cut_off():
    made = service(slow_request_s=0.3)
    with running(made) as address:
        host, port = address.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
        for parts, expected in (
            ([b"POST /v1/comp"], b""),  # the head does not come
            ([head, b"\r\n", b'{"prompt"'], b"HTTP/1.1 408"),  # the body does not come
        ):
            with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
                for part in parts:
                    connection.sendall(part)
                start = time.monotonic()
                assert connection.recv(12) == expected
                assert time.monotonic() - start > 0.2


def test_a_head_without_end_is_cut_off(tiny):
    address, _ = tiny
    host, port = address.removeprefix("http://").split(":")
    begun = b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: "
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(begun + b"a" * 30_000 + b"\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
    sent = 0
    connection = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    with connection, pytest.raises(ConnectionError):
        connection.sendall(begun)
        while True:
            connection.sendall(b"a" * 2**14)
            sent += 2**14
            assert sent < 2**26, "64 MB of one header were read"
            time.sleep(0.001)


def test_trailers_without_end_are_cut_off(tiny):
    address, _ = tiny
    host, port = address.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent = 0
    connection = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    with connection, pytest.raises(ConnectionError):
        connection.sendall(head + b"1\r\n{\r\n0\r\n")
        while True:
            connection.sendall(b"x: " + b"a" * 2**12 + b"\r\n")
            sent += 2**12
            assert sent < 2**24, "16 MB of trailers were read"
            time.sleep(0.001)


def test_a_client_that_reads_nothing_is_cut_off():
    made = service(slow_reader_s=0.3)
    with running(made) as address:
        host, port = address.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((host, int(port)))
        body = json.dumps(
            {**ASKED, "max_tokens": 1000, "ignore_eos": True, "n": 24, "logprobs": 20,
             "stream": True}
        ).encode()  # fmt: skip
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        until(lambda: made.jobs)
        until(lambda: not made.jobs)
        assert sum(job.num_completion_tokens for job in made.jobs.values()) == 0
        connection.close()


def test_prompts_are_not_in_the_log(caplog):
    async def ask(http, made) -> None:
        await http.post("/v1/completions", json={"prompt": "my secret", "max_tokens": 1})
        await http.post("/v1/completions", json={"prompt": "my secret", "max_tokens": "x"})

    with caplog.at_level(logging.DEBUG, logger="rllib_llm"):
        asked(ask)
    lines = [json.loads(record.message) for record in caplog.records if "{" in record.message]
    assert [line["status"] for line in lines] == [200, 400]
    assert all(line["request_id"].startswith("req-") for line in lines)
    assert {line["client"] for line in lines} == {"127.0.0.1"}  # as httpx names itself
    assert "my secret" not in caplog.text
    with caplog.at_level(logging.INFO, logger="rllib_llm"):
        asked(ask, log_prompts=True)
    assert "my secret" in caplog.text


def test_the_log_names_who_asked(caplog, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)

    async def ask(http, made) -> None:
        for key in ("secret-a", "secret-b", "wrong", "secret-a", "secret-a"):
            await http.post("/v1/completions", json=ASKED, headers=bearer(key))

    with caplog.at_level(logging.INFO, logger="rllib_llm.serving.security"):
        asked(ask, api_keys_file=file)
    told = [(line["client"], line["status"]) for line in map(json.loads, caplog.messages)]
    of_ann = [("ann", 200), ("ann", 429)]
    assert told == [("ann", 200), ("bob", 200), ("127.0.0.1", 401), *of_ann]


def test_nobody_is_let_in_by_a_key_of_no_length():
    assert Clients([]).of(b"").name == ""
    assert ServeSettings(model="m").admin_key is None
