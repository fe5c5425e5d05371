"""Supervised fine-tuning on conversations learns the tokens that a rollout would sample."""

from __future__ import annotations

import pytest

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.conversations.proof import ENDS, MORE, SAYS, USER
from rllib_llm.data.chats import encode_chat
from rllib_llm.envs.toys import calculator
from tests.conversations.templates import ADD, FAMILIES, family_tokenizer

CALL = {
    "role": "assistant", "content": "",
    "tool_calls": [{"type": "function", "id": "call00000",
                    "function": {"name": "add", "arguments": {"text": "1"}}}],
}  # fmt: skip
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "2"}
APPENDING = [family for family in FAMILIES if family not in ("mistral", "qwen3")]


def sampled(tokenizer, messages, tools):
    """The row of a rollout in which the assistant says the same."""
    chat_format = ChatFormat(tokenizer, tools=tools)
    conversation, waiting = Conversation(chat_format), []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            waiting.append(message)
            continue
        conversation.append_messages(waiting)
        waiting = []
        asked = chat_format.render(messages[:place], generation_prompt=True)
        said = chat_format.render(messages[: place + 1])[len(asked) :]
        end = said.rfind(chat_format.turn_end) + len(chat_format.turn_end)
        ids = chat_format.encode(said[:end])
        conversation.append_sampled(ids, [0.0] * len(ids))
    (row,) = conversation.rows()
    return row.prompt_ids + row.completion_ids, [False] * len(row.prompt_ids) + row.loss_mask


@pytest.mark.parametrize("family", APPENDING)
@pytest.mark.parametrize("messages", [[USER, SAYS, MORE, ENDS], [USER, CALL, RESULT, SAYS]])
def test_sft_learns_what_a_rollout_samples(family, messages):
    tokenizer = family_tokenizer(family)
    ids, targets = encode_chat(tokenizer, list(messages), tools=[ADD])
    row, learnt = sampled(tokenizer, messages, [ADD])
    assert ids[: len(row)] == row and targets[: len(row)] == learnt
    assert not any(targets[len(row) :])  # a line break behind the last end
    assert sum(targets) == sum(learnt) > 0


def test_sft_of_the_calculator_learns_what_it_samples():
    _, tokenizer = calculator.build_model(hidden_size=8, num_layers=1, num_heads=1)
    row = next(row for row in calculator.sft_rows(50) if len(row["messages"]) > 2)
    messages = row["messages"]
    ids, targets = encode_chat(tokenizer, messages, tools=row["tools"])
    whole, learnt = sampled(tokenizer, messages, row["tools"])
    assert (ids, targets) == (whole, learnt)
    said = tokenizer.decode([i for i, mine in zip(ids, targets, strict=True) if mine])
    expression = messages[0]["content"].removesuffix("=")
    assert said == (
        f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}'
        f"</tool_call><|end|>{messages[-1]['content']}<|end|>"
    )
