"""Renderers of known families append what the template writes, or are left out."""

from __future__ import annotations

import importlib.util

import pytest
from transformers import PreTrainedTokenizerFast

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.conversations.proof import MORE, USER, prove
from tests.conversations.templates import ADD, CHATML, QWEN3, family_tokenizer

SPECIALS = ["<|im_start|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>",
            "</tool_response>", "<think>", "</think>"]  # fmt: skip
HAS_RENDERERS = importlib.util.find_spec("renderers") is not None
installed = pytest.mark.skipif(
    not HAS_RENDERERS, reason="renderers comes with verifiers, which pins openai below 3"
)


def qwen_tokenizer(template=QWEN3, name=""):
    made = PreTrainedTokenizerFast(
        tokenizer_object=family_tokenizer("qwen3").backend_tokenizer, eos_token="<|im_end|>",
        pad_token="<pad>", unk_token="<unk>", additional_special_tokens=SPECIALS,
        chat_template=template, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.name_or_path = name
    return made


def found(chat_format):
    return {finding.dialogue: finding.outcome for finding in prove(chat_format)}


@installed
def test_a_family_is_known_by_its_hub_id():
    chat_format = ChatFormat(qwen_tokenizer(name="Qwen/Qwen3-0.6B"), tools=[ADD])
    assert chat_format.renderer is not None and chat_format.renderer_note == "qwen3"


@installed
def test_the_renderer_appends_what_the_suffix_difference_would():
    tokens = []
    for renderer in ("qwen3", None):
        conversation = Conversation(ChatFormat(qwen_tokenizer(), tools=[ADD], renderer=renderer))
        conversation.append_messages([USER])
        ids = conversation.chat_format.encode("It is 2.<|im_end|>")
        conversation.append_sampled(ids, [0.0] * len(ids))
        conversation.append_messages([MORE])
        cut = conversation.chat_format.encode("It is")
        conversation.append_sampled(cut, [0.0] * len(cut), finish="length")
        conversation.append_messages([MORE])  # the turn's end comes from the environment
        tokens.append(conversation.token_ids)
    assert tokens[0] == tokens[1]


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
    assert (
        ChatFormat(llama).renderer is None and "knows no family" in ChatFormat(llama).renderer_note
    )


@pytest.mark.skipif(HAS_RENDERERS, reason="renderers is installed")
def test_without_the_package_the_template_decides_and_a_named_family_is_told_of():
    chat_format = ChatFormat(family_tokenizer("chatml"))
    assert chat_format.renderer is None and "not installed" in chat_format.renderer_note
    with pytest.raises(ImportError, match="renderer='qwen3' must find the package renderers"):
        ChatFormat(family_tokenizer("chatml"), renderer="qwen3")
    assert not any(name.startswith("renderer") for name in found(chat_format))
