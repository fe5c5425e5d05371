"""Calls of tools through the server: whole ones are calls, what is cut off is text."""

from __future__ import annotations

import json

import openai
import pytest

from rllib_llm.serving.chat import as_messages
from rllib_llm.serving.schemas import ChatMessage
from tests.serving.tiny_server import DEADLINE_S, NAME

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "\u00e9"}}\n</tool_call>'
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
]
ASKED = {
    "model": NAME, "messages": [{"role": "user", "content": "1 + 1?"}], "seed": 1, "tools": TOOLS,
}  # fmt: skip


def writes(text: str) -> dict:
    """What makes a random model write this text, and nothing else."""
    grammar = f"start: {json.dumps(text, ensure_ascii=False)}"
    return {"extra_body": {"response_format": {"type": "grammar", "grammar": grammar}}}


@pytest.fixture(scope="module")
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny[0]}/v1", api_key="none", timeout=DEADLINE_S) as client:
        yield client


def streamed(client, **asked):
    """(content, calls, finish_reason) of a stream, put together as a client does."""
    content, calls, finish = "", {}, None
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, {"name": "", "arguments": ""})
            known["name"] += call.function.name or ""
            known["arguments"] += call.function.arguments or ""
    return content, list(calls.values()), finish


def test_a_whole_call_is_a_call_whole_and_streamed(client):
    asked = {**ASKED, **writes(f"Well. {CALL}"), "max_tokens": 200}
    choice = client.chat.completions.create(**asked).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"a": 1, "b": "\u00e9"}
    assert choice.message.content == "Well."
    content, calls, finish = streamed(client, **asked)
    assert (content, finish) == ("Well.", "tool_calls")
    assert calls == [{"name": "add", "arguments": call.function.arguments}]


@pytest.mark.parametrize("parallel", [None, True, False])
def test_one_call_at_most_is_shown_to_who_wants_no_others(client, parallel):
    asked = {**ASKED, **writes(f"{CALL}\n{CALL}"), "max_tokens": 200}
    asked |= {} if parallel is None else {"parallel_tool_calls": parallel}
    number = 1 if parallel is False else 2
    assert len(client.chat.completions.create(**asked).choices[0].message.tool_calls) == number
    assert len(streamed(client, **asked)[1]) == number


def test_a_call_that_is_cut_off_anywhere_is_text_and_no_call(client):
    whole = len(CALL.encode())  # one token for each byte
    for length in [*range(1, whole - 16, 9), *range(whole - 16, whole)]:
        asked = {**ASKED, **writes(CALL), "max_tokens": length}
        choice = client.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls is None
        if length % 8 == 0:
            content, calls, finish = streamed(client, **asked)
            assert (content, calls, finish) == (choice.message.content, [], "length")
    # Every character is there, and only the end of sequence is missing: the mark is closed.
    asked = {**ASKED, **writes(CALL), "max_tokens": whole}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "length"
    assert [call.function.name for call in choice.message.tool_calls] == ["add"]


def test_a_stop_text_cuts_a_call_off_too(client):
    asked = {**ASKED, **writes(CALL), "max_tokens": 200, "stop": "}}"}
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == CALL.split("}}")[0]


def test_a_call_that_cannot_be_read_is_text(client):
    text = "<tool_call>{oops}</tool_call>"
    choice = client.chat.completions.create(**{**ASKED, **writes(text), "max_tokens": 200}).choices[
        0
    ]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == text


def test_without_tools_marks_are_text(client):
    asked = {**ASKED, **writes(CALL), "max_tokens": 200, "tool_choice": "none"}
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", CALL)


@pytest.mark.parametrize("arguments", [{"arguments": None}, {"arguments": ""}, {}])
def test_a_call_without_arguments_has_an_empty_object_of_them(arguments):
    call = {"type": "function", "function": {"name": "now", **arguments}}
    (message,) = as_messages([ChatMessage(role="assistant", tool_calls=[call])])
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}
