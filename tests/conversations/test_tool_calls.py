"""Replies taken apart: what counts as a call, and what does not."""

from __future__ import annotations

import json

import pytest

from rllib_llm.conversations.tool_calls import SYNTAXES, parse_reply, syntax_of
from tests.conversations.templates import TEMPLATES

CALL = '{"name": "add", "arguments": {"a": 1}}'
WRITTEN = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "mistral": f"[TOOL_CALLS] [{CALL}]",
    "llama3": CALL.replace("arguments", "parameters"),
}


def parsed(text, syntax="hermes", **options):
    return parse_reply(text, syntax=syntax, **options)


@pytest.mark.parametrize("syntax", WRITTEN)
def test_a_call_is_read_in_every_syntax(syntax):
    (call,) = parsed(WRITTEN[syntax], syntax).tool_calls
    assert (call.name, call.arguments, call.status) == ("add", {"a": 1}, "ok")
    assert call.id == "call00000" and len(call.id) == 9  # as Mistral's template wants them


@pytest.mark.parametrize("syntax", WRITTEN)
def test_a_truncated_tool_call_is_never_complete(syntax):
    whole = WRITTEN[syntax]
    for end in range(len(whole) + 1):
        for finish in ("length", "aborted", "stop"):
            calls = parsed(whole[:end], syntax, finish=finish).tool_calls
            # Cut anywhere before its last character no call is complete, however sampling ended;
            # whole but not ended by the policy, only a closing mark says that nothing is missing.
            is_whole = end == len(whole) and (finish == "stop" or syntax in ("hermes", "xml"))
            assert [call.status for call in calls if call.status == "ok"] == ["ok"] * is_whole


def test_several_calls_and_the_words_between_them():
    text = f"First. {WRITTEN['hermes']} Then. <tool_call>{{oops</tool_call>"
    reply = parsed(text, first_call=3)
    assert reply.content == "First.  Then."
    assert [(c.status, c.id) for c in reply.tool_calls] == [
        ("ok", "call00003"), ("invalid_json", "call00004"),
    ]  # fmt: skip
    message = reply.as_message()
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]
    assert "<tool_call>{oops</tool_call>" in message["content"]  # not lost, and not a call
    two = parsed(f"{WRITTEN['llama3']}; {WRITTEN['llama3']}", "llama3").tool_calls
    assert [call.status for call in two] == ["ok", "ok"]


def test_calls_inside_thoughts_are_thoughts():
    reply = parsed(f"<think>maybe {WRITTEN['hermes']}</think>No.")
    assert (reply.content, reply.tool_calls) == ("No.", ())
    assert reply.reasoning.startswith("maybe")
    unended = parsed("still thinking", opens_thoughts=True)
    assert (unended.content, unended.reasoning) == ("", "still thinking")


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ('{"arguments": {}}', "missing_name"),
        ("[1, 2]", "missing_name"),
        ('{"name": "add", "arguments": [1]}', "invalid_arguments"),
        ('{"name": "add", "arguments": "{"}', "invalid_json"),
        ('{"name": "sub", "arguments": {}}', "unknown_tool"),
        (json.dumps({"name": "add", "arguments": '{"a": 1}'}), "ok"),  # as OpenAI writes them
    ],
)
def test_what_is_wrong_with_a_call_is_told(call, status):
    (found,) = parsed(f"<tool_call>{call}</tool_call>", tools={"add"}).tool_calls
    assert found.status == status


def test_the_syntax_is_what_the_template_writes():
    assert {name: syntax_of(text) for name, text in TEMPLATES.items()} == {
        "chatml": "hermes", "qwen3": "hermes", "gemma": "hermes", "llama3": "llama3",
        "mistral": "mistral",
    }  # fmt: skip
    assert syntax_of("{{ messages }}") == "none"
    with pytest.raises(ValueError, match=r"syntax='yaml' must be one of \('hermes'"):
        parsed("", "yaml")
    assert set(WRITTEN) | {"none"} == set(SYNTAXES)
