"""Reward services in three shapes, asked and served."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import math
import os
import threading
import time

import numpy as np
import pytest
from fastapi.testclient import TestClient

from rllib_llm.envs.judges.remote_rewards import TOKEN_ENV, RemoteReward
from rllib_llm.envs.judges.reward_functions import Invalid
from rllib_llm.envs.judges.rewards import RewardError, RewardSum
from tests.scripted_server import serving

QUICK = {"first_delay_s": 0.01, "max_attempts": 2, "judge_outage_s": 0}
TOKEN = "a-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def call(judge, completions, **columns):
    return asyncio.run(judge(["p"] * len(completions), completions, **columns))


def right(completions, answer):
    """1 where it is the answer; "?" cannot be judged."""
    return [Invalid("nobody knows") if c == "?" else float(c == a)
            for c, a in zip(completions, answer, strict=True)]  # fmt: skip


# --- asked ---------------------------------------------------------------------------------


def test_openrlhfs_shape():
    def answer(path, body):
        assert path == "/v1/get_reward" and set(body) == {"query", "prompts", "labels"}
        return 200, {"rewards": [len(q) for q in body["query"]], "scores": [0] * 9}, {}

    with serving(answer) as server:
        url = f"{server.base_url}/get_reward"
        judge = RemoteReward(url, shape="openrlhf", batch_size=2, **QUICK)
        # "p" stands before each.
        assert call(judge, ["a", "bb", "ccc"], answer=["x", "y", "z"]) == [2.0, 3.0, 4.0]
    bodies = sorted((body for _, body, _ in server.requests), key=lambda b: b["labels"])
    assert [body["labels"] for body in bodies] == [["x", "y"], ["z"]]


def test_columns_that_json_has_not_are_sent_as_text_or_null():
    """A date of a Parquet file, or one NaN, failed all rows of a batch."""
    day = datetime.date(2026, 1, 31)
    sent = {"day": [day], "x": [[math.nan, 0.5]], "n": [np.int64(3)], "half": ["a\ud800"]}
    with serving(lambda path, body: (200, {"scores": [1.0]}, {})) as server:
        assert call(RemoteReward(f"{server.base_url}/v1/rewards", **QUICK), ["a"], **sent) == [1.0]
    assert server.requests[0][1]["columns"] == {
        "day": ["2026-01-31"], "x": [[None, 0.5]], "n": [3], "half": ["a?"],
    }  # fmt: skip


def test_slimes_shape():
    def answer(path, body):
        score = float(body["response"] == body["label"])
        return 200, {"score": score} if body["response"] == "a" else score, {}

    with serving(answer) as server:
        judge = RemoteReward(f"{server.base_url}/rm", shape="slime", **QUICK)
        assert call(judge, ["a", "b"], answer=["a", "x"]) == [1.0, 0.0]
        assert call(judge, ["b"]) == [0.0]
    assert server.requests[-1][1] == {"prompt": "p", "response": "b", "label": None}


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ((503, {}, {"Retry-After": "0"}), "status 503"),
        ((200, {"rewards": [1.0]}, {}), "1 scores for 2 completions"),
        ((200, {"scores": [1.0, 2.0]}, {}), "KeyError"),
        ((200, {"rewards": {"0": 1.0, "1": 2.0}}, {}), "scores must be a list, not dict"),
        ((200, b"{", {}), "malformed"),
    ],
)
def test_a_service_that_fails_makes_rows_invalid(trouble, reason):
    with serving(lambda path, body: trouble) as server:
        judge = RemoteReward(f"{server.base_url}/get_reward", shape="openrlhf", **QUICK)
        found = call(judge, ["a", "b"])
    assert all(isinstance(one, Invalid) and reason in one.reason for one in found)


def test_null_and_infinity_are_no_scores():
    said = {"scores": [None, float("inf"), 1], "reasons": ["too long", "", ""]}
    with serving(lambda path, body: (200, said, {})) as server:
        found = call(RemoteReward(f"{server.base_url}/rewards", **QUICK), ["a", "b", "c"])
    assert "too long" in found[0].reason and "inf" in found[1].reason and found[2] == 1.0


def test_a_service_is_not_run_over():
    """slime #1582: all samplers at once."""

    def slow(path, body):
        time.sleep(0.02)
        return 200, 1.0, {}

    with serving(slow) as server:
        judge = RemoteReward(f"{server.base_url}/rm", shape="slime", max_concurrency=3, **QUICK)
        call(judge, [str(i) for i in range(12)])
    assert len(server.requests) == 12 and server.most_at_once <= 3


def test_a_service_that_hangs_is_given_up():
    """OpenRLHF #1123, #1140: a run that waits for ever, or takes another row's reward."""

    def answer(path, body):
        if body["response"] == "slow":
            time.sleep(1.0)
        return 200, float(len(body["response"])), {}

    with serving(answer) as server:
        judge = RemoteReward(
            f"{server.base_url}/rm", shape="slime", timeout_s=0.2, max_attempts=1
        )  # fmt: skip
        first, hung, last = call(judge, ["a", "slow", "ccc"])
    assert (first, last) == (1.0, 3.0)
    assert isinstance(hung, Invalid) and "Timeout" in hung.reason


def test_settings_that_ask_nothing_are_refused():
    with pytest.raises(ValueError, match="shape='verl' must be one of"):
        RemoteReward("http://localhost/rm", shape="verl")


# --- served --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def app():
    from rllib_llm.envs.judges.reward_server import RewardService, make_app

    return make_app(RewardService(RewardSum(right)), TOKEN)


@pytest.fixture(scope="module")
def client(app):
    with TestClient(app, headers=HEADERS) as client:
        yield client


def test_our_shape_is_served(client):
    asked = {"prompts": ["p"] * 3, "completions": ["a", "b", "?"], "columns": {"answer": ["a"] * 3}}
    with contextlib.suppress(UserWarning):
        said = client.post("/v1/rewards", json=asked).json()
    assert said["scores"] == [1.0, 0.0, None]
    assert said["reasons"] == ["", "", "right: nobody knows"]
    assert said["components"]["right"][:2] == [1.0, 0.0]


def test_the_others_shapes_are_served(client):
    asked = {"query": ["pa", "p?"], "prompts": ["p", "p"], "labels": ["a", "a"]}
    said = client.post("/get_reward", json=asked).json()
    assert said["rewards"] == [1.0, None] and said["scores"] == [1.0, None]
    one = {"prompt": "p", "response": "a", "label": "a"}
    assert client.post("/reward", json=one).json() == {"score": 1.0}
    failed = client.post("/reward", json={**one, "response": "?"})
    assert failed.status_code == 502 and "nobody knows" in failed.json()["detail"]


@pytest.mark.parametrize("start", ["<s>", "<|im_start|> ", "<pad><pad><s>", ""])
def test_special_tokens_before_the_prompt_are_not_judged(client, start):
    """OpenRLHF decodes prompt and completion together, special tokens and all."""
    asked = {"query": [f"{start}[x] pa"], "prompts": ["[x] p"], "labels": ["a"]}
    assert client.post("/get_reward", json=asked).json()["rewards"] == [1.0]


def test_json_that_is_too_deep_is_refused(client):
    deep = "[" * 100_000 + "]" * 100_000
    body = f'{{"prompt": "p", "response": "a", "label": {deep}}}'
    assert client.post("/reward", content=body).status_code == 422


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/rewards", {"prompts": ["p"], "completions": []}, 422, "have lengths"),
        ("/v1/rewards", {"prompts": ["p"], "completions": ["a"]}, 422, "answer"),  # its column
        ("/v1/rewards", {"prompts": "p"}, 422, "completions"),
        ("/get_reward", {"query": ["a"], "prompts": []}, 422, "1 queries, 0 prompts"),
        ("/get_reward", {"query": ["xa"], "prompts": ["p"]}, 422, "must begin with its prompt"),
        ("/reward", [], 422, "dictionary"),
    ],
)
def test_requests_that_make_no_sense_are_refused(client, path, body, status, said):
    answer = client.post(path, json=body)
    assert answer.status_code == status and said in answer.text


def test_without_the_token_nothing_is_judged(app):
    asked = {"prompts": ["p"], "completions": ["a"], "columns": {"answer": ["a"]}}
    with TestClient(app) as client:
        assert client.get("/health").json() == {"status": "ok"}
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": TOKEN}):
            assert client.post("/v1/rewards", json=asked, headers=headers).status_code == 401
        big = {"Content-Length": str(2**40), **HEADERS}
        assert client.post("/v1/rewards", content=b"{}", headers=big).status_code == 413


def test_what_cannot_be_served_is_refused(app):
    from rllib_llm.envs.judges.reward_server import RewardService, make_app

    def of_tokens(prompt_ids, prompt_mask, completion_ids, completion_mask):
        return completion_ids.sum(1)

    of_tokens.wants_tokens = True
    with pytest.raises(RewardError, match="'of_tokens'.* must read texts"):
        RewardService(RewardSum(of_tokens))
    with pytest.raises(ValueError, match="token='' must not be empty"):
        make_app(RewardService(RewardSum(right)), "")


def test_client_and_server_understand_each_other(app, monkeypatch):
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        monkeypatch.setitem(os.environ, TOKEN_ENV, TOKEN)
        for path, shape in (("v1/rewards", "rllib"), ("get_reward", "openrlhf"),
                            ("reward", "slime")):  # fmt: skip
            judge = RemoteReward(f"http://127.0.0.1:{port}/{path}", shape=shape, **QUICK)
            found = call(judge, ["a", "?", "b"], answer=["a"] * 3)
            assert found[0] == 1.0 and found[2] == 0.0 and "nobody knows" in found[1].reason
        monkeypatch.setitem(os.environ, TOKEN_ENV, "wrong")
        refused = RemoteReward(f"http://127.0.0.1:{port}/v1/rewards")
        assert "401" in call(refused, ["a"], answer=["a"])[0].reason
    finally:
        server.should_exit = True
        thread.join()
