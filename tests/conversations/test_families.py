"""Renderers of known families append what the template writes, or are left out."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.conversations.proof import MORE, USER, prove
from tests.conversations.templates import ADD, CHATML, LLAMA3, QWEN3, family_tokenizer

SPECIALS = {
    "qwen3": ["<|im_start|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>",
              "</tool_response>", "<think>", "</think>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|start_header_id|>",
               "<|end_header_id|>"],
}  # fmt: skip
# As the original has it: what a tool says is written as JSON, a string with its quotes.
LLAMA3_JSON = LLAMA3.replace(
    "{{ m.content | trim }}",
    "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}",
)
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"text": "1 + 1"}}\n</tool_call><|im_end|>'
LLAMA_CALL = '{"name": "add", "parameters": {"text": "1 + 1"}}<|eot_id|>'
HAS_RENDERERS = importlib.util.find_spec("renderers") is not None
installed = pytest.mark.skipif(not HAS_RENDERERS, reason="the package renderers is not installed")


def tokenizer_of(family, template, name=""):
    end = {"qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}[family]
    made = PreTrainedTokenizerFast(
        tokenizer_object=family_tokenizer(family).backend_tokenizer, eos_token=end,
        pad_token="<pad>", unk_token="<unk>", additional_special_tokens=SPECIALS[family],
        chat_template=template, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.name_or_path = name
    return made


def qwen_tokenizer(template=QWEN3, name=""):
    return tokenizer_of("qwen3", template, name)


def llama_tokenizer(template=LLAMA3_JSON):
    return tokenizer_of("llama3", template)


def result(content):
    return {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": content}


def walked(chat_format, *turns):
    """A conversation of sampled texts and what answers each."""
    conversation = Conversation(chat_format)
    conversation.append_messages([USER])
    for said, new, finish in turns:
        ids = chat_format.encode(said)
        conversation.append_sampled(ids, [0.0] * len(ids), finish=finish)
        conversation.append_messages(new)
    return conversation


def found(chat_format):
    return {finding.dialogue: finding.outcome for finding in prove(chat_format)}


@installed
def test_a_folder_is_no_hub_id_and_nothing_is_imported_to_look_it_up(monkeypatch):
    monkeypatch.setitem(sys.modules, "renderers", None)  # an import would raise
    for name in ("", "/models/mine", "results/run/model"):
        chat_format = ChatFormat(qwen_tokenizer(name=name), tools=[ADD])
        assert chat_format.renderer is None
        assert chat_format.renderer_note == f"{name!r} is no hub id"


@installed
def test_a_family_is_known_by_its_hub_id():
    chat_format = ChatFormat(qwen_tokenizer(name="Qwen/Qwen3-0.6B"), tools=[ADD])
    assert chat_format.renderer is not None and chat_format.renderer_note == "qwen3"


@installed
@pytest.mark.parametrize(
    ("make", "renderer", "call"),
    [(qwen_tokenizer, "qwen3", QWEN_CALL), (llama_tokenizer, "llama-3", LLAMA_CALL)],
)
def test_the_renderer_appends_what_the_suffix_difference_would(make, renderer, call):
    end = call[call.rindex("<|") :]
    turns = [
        ("It is 2." + end, [MORE], "stop"),
        (call, [result("two: 2")], "stop"),
        (call[: -len(end)], [result('"2"'), result("{}")], "length"),  # who ends it did not say it
        ("It is", [MORE], "length"),
    ]
    conversations = [
        walked(ChatFormat(make(), tools=[ADD], renderer=name), *turns) for name in (renderer, None)
    ]
    assert conversations[0].token_ids == conversations[1].token_ids
    # Qwen's template drops thoughts where a user speaks: such turns are left to it.
    expected = 2 if renderer == "qwen3" else 4
    assert conversations[0].suffixes["bridged"] == expected
    assert conversations[1].suffixes["bridged"] == 0


@installed
@pytest.mark.parametrize(
    ("make", "renderer"), [(qwen_tokenizer, "qwen3"), (llama_tokenizer, "llama-3")]
)
def test_the_families_of_qwen_and_llama_are_proven_with_tools(make, renderer):
    chat_format = ChatFormat(make(), tools=[ADD], renderer=renderer)
    findings = {finding.dialogue: finding for finding in prove(chat_format)}
    proof = findings[f"renderer {renderer}"]
    assert proof.outcome == "proven" and chat_format.renderer is not None
    assert "tool calls" in proof.detail.split(", ")
    assert ("turns" in proof.detail.split(", ")) == (renderer == "llama-3")


@installed
def test_a_renderer_keeps_thoughts_that_the_template_drops_behind_a_call():
    """Qwen3 writes an empty thought into the last turn, and no longer when a tool has answered."""
    said = "<think>\n\n</think>\n\n" + QWEN_CALL
    rows = []
    for renderer, outcome in (("qwen3", "keeps"), (None, "forks")):
        chat_format = ChatFormat(qwen_tokenizer(), tools=[ADD], renderer=renderer)
        assert found(chat_format)["tool calls"] == outcome
        conversation = walked(chat_format, (said, [result("2")], "stop"))
        ids = chat_format.encode("2<|im_end|>")
        conversation.append_sampled(ids, [0.0] * len(ids))
        rows.append(conversation.rows())
    kept, forked = rows
    assert len(kept) == 1 and len(forked) == 2


@installed
def test_a_renderer_that_writes_other_tokens_than_the_template_is_left_out():
    chat_format = ChatFormat(qwen_tokenizer(CHATML, "Qwen/Qwen3-0.6B"), tools=[ADD])
    outcomes = found(chat_format)
    assert outcomes["renderer qwen3"] == "ignored" and chat_format.renderer is None
    assert outcomes["tool calls"] == "appends"  # as the template has it
    assert "must write a dialogue with" in chat_format.renderer_note


@installed
def test_a_family_that_does_not_suit_the_tokenizer_is_refused_where_it_is_named():
    with pytest.raises(ValueError, match="renderer='qwen3' must suit the tokenizer"):
        ChatFormat(family_tokenizer("gemma"), renderer="qwen3")
    llama = family_tokenizer("llama3")
    llama.name_or_path = "my-org/my-llama"
    assert (
        ChatFormat(llama).renderer is None and "knows no family" in ChatFormat(llama).renderer_note
    )


@pytest.mark.skipif(HAS_RENDERERS, reason="renderers is installed")
def test_without_the_package_the_template_decides_and_a_named_family_is_told_of():
    tokenizer = family_tokenizer("chatml")
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    chat_format = ChatFormat(tokenizer)
    assert chat_format.renderer is None and "not installed" in chat_format.renderer_note
    with pytest.raises(ImportError, match="renderer='qwen3' needs: pip install"):
        ChatFormat(family_tokenizer("chatml"), renderer="qwen3")
    assert not any(name.startswith("renderer") for name in found(chat_format))
