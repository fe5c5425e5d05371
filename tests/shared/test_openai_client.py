"""What may pass is tried again, what will not is said at once, and never too many at a time."""

from __future__ import annotations

import time

import pytest

from rllib_llm.shared.openai_client import OpenAIClient, RequestRefusedError, ServerError
from tests.scripted_server import serving

QUICK = {"first_delay_s": 0.01, "timeout_s": 10.0}


def echo(path, body):
    return 200, {"said": body["say"], "path": path}, {}


def said(answer):
    return answer["said"]


@pytest.mark.parametrize(
    "troubles",
    [(), (500,), (429, 503), (b"not json",), (b"{}",), (b'{"said"', 502, 408, b"[]")],
    ids=str,
)
def test_an_answer_comes_after_troubles_that_pass(troubles):
    with serving(echo, *troubles) as server:
        client = OpenAIClient(server.base_url, **QUICK)
        assert client.post("echo", {"say": "hi"}, said) == "hi"
        client.close()
    assert len(server.requests) == len(troubles) + 1
    assert client.num_retries == len(troubles)
    assert {path for path, _, _ in server.requests} == {"/v1/echo"}


def test_a_silent_server_is_asked_again():
    with serving(echo, 1.0) as server:
        client = OpenAIClient(server.base_url, **{**QUICK, "timeout_s": 0.2})
        assert client.post("echo", {"say": "hi"}, said) == "hi"
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("troubles", "reason"),
    [((500,) * 3, "status 500"), ((b"x",) * 3, "malformed"), ((429,) * 3, "status 429")],
    ids=str,
)
def test_troubles_that_stay_are_named_with_the_last_reason(troubles, reason):
    with serving(echo, *troubles) as server:
        client = OpenAIClient(server.base_url, max_attempts=3, **QUICK)
        with pytest.raises(ServerError, match=f"within max_attempts=3.*{reason}"):
            client.post("echo", {"say": "hi"}, said)
    assert len(server.requests) == 3


def test_a_server_that_is_not_there_is_named():
    with serving(echo) as server:
        url = server.base_url
    client = OpenAIClient(url, max_attempts=2, **QUICK)
    with pytest.raises(ServerError, match=f"{url}/echo must answer.*ConnectError"):
        client.post("echo", {"say": "hi"}, said)


def test_the_first_retry_is_said_and_the_others_counted(caplog):
    with serving(echo, 429, 503, 500) as server:
        client = OpenAIClient(server.base_url, **QUICK)
        for _ in range(2):
            client.post("echo", {"say": "hi"}, said)
    (line,) = caplog.messages
    assert f"{server.base_url}/echo gave no answer (status 429" in line
    assert "asked again in 0.0 s, 4 times at most" in line
    assert client.num_retries == 3


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_is_not_tried_again(status):
    with serving(echo, status) as server:
        client = OpenAIClient(server.base_url, **QUICK)
        with pytest.raises(RequestRefusedError, match=f"{status} .*as scripted"):
            client.post("echo", {"say": "hi"}, said)
    assert len(server.requests) == 1


def test_no_more_than_so_many_requests_are_under_way():
    def slowly(path, body):
        time.sleep(0.05)
        return echo(path, body)

    with serving(slowly) as server:
        client = OpenAIClient(server.base_url, max_concurrency=3, **QUICK)
        answers = [client.submit("echo", {"say": i}, said) for i in range(12)]
        assert [answer.result() for answer in answers] == list(range(12))
        client.close()
    assert server.most_at_once == 3


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    with serving(echo) as server:
        OpenAIClient(server.base_url, api_key_env="MY_KEY").post("echo", {"say": 1}, said)
        OpenAIClient(server.base_url, api_key_env="NO_KEY").post("echo", {"say": 1}, said)
    keys = [headers.get("Authorization") for _, _, headers in server.requests]
    assert keys == ["Bearer secret", None]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"base_url": "localhost:8000"}, "base_url='localhost:8000' must start with http"),
        ({"max_attempts": 0}, "max_attempts=0 must be a whole number of at least 1"),
        ({"max_concurrency": 0}, "max_concurrency=0 must be a whole number of at least 1"),
        ({"timeout_s": 0}, "timeout_s=0 must be a number above 0"),
    ],
)
def test_wrong_settings_are_said(settings, said):
    with pytest.raises(ValueError, match=said):
        OpenAIClient(**{"base_url": "http://localhost/v1", **settings})
