"""An agent that only knows OpenAI's interface: its tokens are kept as they were sampled."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest

from rllib_llm.serving.schemas import ApiError
from rllib_llm.serving.sessions import Session, SessionRules, Sessions
from tests.serving.tiny_server import DEADLINE_S, NAME, asgi_client, model, plain_logprobs, service

CHAT = [{"role": "user", "content": "Hi"}]
KNOBS = {"model": NAME, "max_tokens": 10, "seed": 1}


def session_of(test) -> None:
    async def run() -> None:
        async with asgi_client(service()) as http:
            await test(http)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


async def say(http, messages, session="s", **changes) -> dict:
    asked = {**KNOBS, "messages": messages, "return_token_ids": True, **changes}
    answer = await http.post(f"/sessions/{session}/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_conversation_is_one_row_of_the_tokens_that_were_sampled():
    async def talk(http) -> None:
        first = (await say(http, CHAT))["choices"][0]
        said = {"role": "assistant", "content": first["message"]["content"]}
        more = [*CHAT, said, {"role": "user", "content": "And?"}]
        second = (await say(http, more, seed=2))["choices"][0]
        reward = await http.post("/sessions/s/reward", json={"reward": 0.5})
        assert reward.json() == {"session_id": "s", "reward": 0.5}
        (row,) = (await http.get("/sessions/s")).json()["rows"]
        sampled = [
            token for token, own in zip(row["completion_ids"], row["loss_mask"], strict=True) if own
        ]
        assert sampled == first["token_ids"] + second["token_ids"]
        everything = row["prompt_ids"] + row["completion_ids"]
        # What the second turn read is the first row's own tokens, not its text encoded again.
        assert everything == second["prompt_token_ids"] + second["token_ids"]
        assert second["prompt_token_ids"][: len(first["prompt_token_ids"])] == row["prompt_ids"]
        expected = plain_logprobs(model(), row["prompt_ids"], row["completion_ids"])
        for own, told, plain in zip(row["loss_mask"], row["logprobs"], expected, strict=True):
            assert not own or told == pytest.approx(plain, abs=1e-4)
        assert row["rewards"][-1] == 0.5 and set(row["versions"]) <= {0, -1}

    session_of(talk)


def test_rewards_whose_sum_is_no_number_are_refused_and_change_nothing():
    async def talk(http) -> None:
        await say(http, CHAT)
        for reward, told in ((1.5e308, 200), (1.5e308, 400), (-1e308, 200)):
            answer = await http.post("/sessions/s/reward", json={"reward": reward})
            assert answer.status_code == told, answer.text
        assert answer.json()["reward"] == 1.5e308 - 1e308

    session_of(talk)


def test_another_history_is_another_row_and_an_earlier_turn_can_be_gone_back_to():
    async def talk(http) -> None:
        turns = [(await say(http, CHAT))["choices"][0]]
        said = {"role": "assistant", "content": turns[0]["message"]["content"]}
        for text in ("a", "b"):
            answer = await say(http, [*CHAT, said, {"role": "user", "content": text}])
            turns.append(answer["choices"][0])
        other = await say(http, [{"role": "user", "content": "Something else"}])
        turns.append(other["choices"][0])
        rows = (await http.get("/sessions/s")).json()["rows"]
        assert len(rows) == 3
        # Each sampled token is learnt from once, though two rows begin with the first turn.
        learnt = sum(sum(row["loss_mask"]) for row in rows)
        assert learnt == sum(len(turn["token_ids"]) for turn in turns)

    session_of(talk)


def test_a_turn_that_fails_or_nobody_waits_for_leaves_nothing_behind():
    async def talk(http) -> None:
        bad = await http.post(
            "/sessions/s/v1/chat/completions", json={**KNOBS, "messages": CHAT, "max_tokens": 5000}
        )  # noqa: E501
        assert bad.status_code == 400
        # A call without a function, on which the template fails.
        odd = [*CHAT, {"role": "assistant", "tool_calls": [{"id": "no function"}]}]
        asked = {**KNOBS, "messages": odd}
        refused = await http.post("/sessions/s/v1/chat/completions", json=asked)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages.1.tool_calls.0.function"
        assert (await http.get("/sessions/s")).json()["rows"] == []
        assert (await http.post("/sessions/s/reward", json={"reward": 1})).status_code == 400
        await say(http, CHAT)
        assert len((await http.get("/sessions/s")).json()["rows"]) == 1
        ended = await http.delete("/sessions/s")
        assert len(ended.json()["rows"]) == 1
        assert (await http.get("/sessions/s")).status_code == 404
        many = await http.post(
            "/sessions/s/v1/chat/completions", json={**KNOBS, "messages": CHAT, "n": 2}
        )  # noqa: E501
        assert many.json()["error"]["param"] == "n"

    session_of(talk)


def test_a_streamed_turn_is_kept_too_through_openai_s_client(tiny):
    with openai.OpenAI(base_url=f"{tiny[0]}/sessions/mine/v1", api_key="none") as client:
        parts = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**KNOBS, messages=CHAT, stream=True)
        ]
    import httpx

    kept = httpx.get(f"{tiny[0]}/sessions/mine").json()
    assert kept["messages"][0][-1]["content"].startswith("".join(parts).strip()[:3])
    assert len(kept["rows"]) == 1 and all(kept["rows"][0]["loss_mask"])


async def turns_of(http, messages, **asked) -> list[dict]:
    """Three turns of one chat, as a client plays it back; the session's rows."""
    messages = list(messages)
    for text in ("and", "or", "but"):
        said = (await say(http, messages, **asked))["choices"][0]["message"]
        messages += [said, {"role": "user", "content": text}]
    return (await http.get("/sessions/s")).json()["rows"]


def test_a_turn_that_a_stop_text_ended_is_gone_on_with_as_it_was_sampled():
    """The client is shown less than was sampled: what it plays back is that turn all the same."""

    async def talk(http) -> None:
        free = (await say(http, CHAT))["choices"][0]["message"]["content"]
        await http.delete("/sessions/s")
        stop = free[2:4]
        rows = await turns_of(http, CHAT, stop=[stop])
        assert len(rows) == 1, "one row, whose turns are all rewarded"

    session_of(talk)


def test_a_chat_goes_on_after_many_others_with_other_tools(tiny):
    async def talk(http) -> None:
        said = (await say(http, CHAT))["choices"][0]["message"]
        for i in range(70):
            tools = [{"type": "function", "function": {"name": f"tool_{i}"}}]
            asked = {"messages": CHAT, "tools": tools, "max_tokens": 1}
            assert (await http.post("/v1/chat/completions", json=asked)).status_code == 200
        await say(http, [*CHAT, said, {"role": "user", "content": "and"}])
        assert len((await http.get("/sessions/s")).json()["rows"]) == 1

    session_of(talk)


def test_a_key_s_many_sessions_cost_nobody_else_his_own(monkeypatch):
    monkeypatch.setattr("rllib_llm.serving.sessions.MAX_OF_AN_OWNER", 3)
    monkeypatch.setattr("rllib_llm.serving.sessions.MAX_SESSIONS", 5)
    sessions = Sessions()
    sessions.begin("mine", b"ann")
    rules = SessionRules({}, max_new_tokens=1, max_turns=1, max_tokens=1, template_settings={})
    for i in range(9):
        sessions.begin(f"ruled {i}", b"", rules)
    for i in range(9):
        sessions.begin(f"bob {i}", b"bob")
    assert sessions.get("mine", b"ann") and sessions.get("ruled 0", b"")
    assert sum(name.startswith("bob") for name in sessions._held) <= 3
    with pytest.raises(ApiError, match="is not here"):
        sessions.get("bob 0", b"bob")
    sessions.end("mine", b"ann")
    assert b"ann" not in sessions._of


def test_a_key_s_sessions_have_an_end_of_turns_and_of_tokens(monkeypatch):
    monkeypatch.setattr("rllib_llm.serving.sessions.MAX_TURNS", 2)
    monkeypatch.setattr("rllib_llm.serving.sessions.MAX_TOKENS", 2000)

    async def talk() -> None:
        made = service()
        async with asgi_client(made) as http:

            async def refused(session: str, messages: list[dict]) -> tuple[int, str]:
                path = f"/sessions/{session}/v1/chat/completions"
                answer = await http.post(path, json={**KNOBS, "messages": messages})
                return answer.status_code, answer.json()["error"]["code"]

            await say(http, CHAT, "turns")
            await say(http, CHAT, "turns")
            assert await refused("turns", CHAT) == (400, "session_limit")
            assert len((await http.get("/sessions/turns")).json()["rows"]) == 2
            # 4,000 characters which no template shows are 1,000 tokens: two such sessions hold
            # more than 2,000, and the oldest go. Of one session two such turns are too many.
            unseen = [{**CHAT[0], "name": "x" * 4000}]
            await say(http, unseen, "a")
            await say(http, unseen, "b")
            assert list(made.sessions._held) == ["b"]
            assert await refused("b", unseen) == (400, "session_limit")
            held = made.sessions.get("b", b"")
            num_nodes = sum(len(each.nodes) for each in held.conversations)
            assert await refused("b", unseen) == (400, "session_limit")
            assert sum(len(each.nodes) for each in held.conversations) == num_nodes
            assert await refused("c" * 300, CHAT) == (400, "invalid_value")
            assert list(made.sessions._held) == ["b"]

    asyncio.run(asyncio.wait_for(talk(), DEADLINE_S))


def test_a_key_s_many_tokens_cost_its_own_oldest_session_and_no_other_key_s(monkeypatch):
    monkeypatch.setattr("rllib_llm.serving.sessions.MAX_TOKENS_OF_AN_OWNER", 10)
    monkeypatch.setattr("rllib_llm.serving.sessions.MAX_TOKENS", 15)
    sessions = Sessions()
    for name, owner, size in (("ann", b"ann", 6), ("b0", b"bob", 6), ("b1", b"bob", 4)):
        made = sessions.begin(name, owner)
        made.size = size
        sessions.hold(made)
    assert list(sessions._held) == ["ann", "b1"]  # 6 + 10 passed 15: bob had the most
    made.size = 11
    with pytest.raises(ApiError, match="max_tokens=10"):
        sessions.hold(made)
    assert sessions._tokens == {b"ann": 6, b"bob": 4}


def test_a_session_that_ends_during_its_turn_is_not_counted():
    sessions = Sessions()
    made = sessions.begin("s", b"ann")
    sessions.end("s", b"ann")
    made.size = 7
    sessions.hold(made)
    assert not sessions._tokens.total() and not sessions._of


def test_the_rows_of_a_large_session_are_made_beside_the_event_loop(monkeypatch):
    monkeypatch.setattr("rllib_llm.serving.routes._SMALL_SESSION", 100)
    threads: list[int] = []

    class Noting(Session):
        def as_dict(self):
            threads.append(threading.get_ident())
            return super().as_dict()

    monkeypatch.setattr("rllib_llm.serving.sessions.Session", Noting)

    async def talk(http) -> None:
        for text in ("short", "long" * 20):
            await say(http, [{"role": "user", "content": text}], text[:5])
            assert len((await http.get(f"/sessions/{text[:5]}")).json()["rows"]) == 1
        assert threads[0] == threading.get_ident() != threads[1]

    session_of(talk)


def test_a_busy_session_is_said_to_be_busy():
    async def talk() -> None:
        made = service()
        async with asgi_client(made) as http:
            await say(http, CHAT)
            async with made.sessions.get("s", b"").lock:
                asked = {**KNOBS, "messages": CHAT}
                answer = await http.post("/sessions/s/v1/chat/completions", json=asked)
                assert answer.status_code == 409, answer.text
                assert answer.json()["error"]["code"] == "session_busy"
            await say(http, CHAT)

    asyncio.run(asyncio.wait_for(talk(), DEADLINE_S))


def test_nobody_begins_a_session_where_a_run_does():
    async def talk() -> None:
        made = service()
        made.sessions.begin_by_themselves = False  # as of an agent's server
        async with asgi_client(made) as http:
            assert (await http.post("/sessions")).status_code == 404
            asked = {**KNOBS, "messages": CHAT}
            answer = await http.post("/sessions/s/v1/chat/completions", json=asked)
            assert answer.status_code == 404 and not made.sessions._held

    asyncio.run(asyncio.wait_for(talk(), DEADLINE_S))
