"""Supervised fine-tuning on conversations learns the tokens that a rollout would sample."""

from __future__ import annotations

import copy
import json

import pytest

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.conversations.proof import ENDS, MORE, SAYS, THINKS, USER
from rllib_llm.data.encoding import encode_chat
from rllib_llm.data.preferences import PairSource, PromptedPairSource
from rllib_llm.data.texts import TextSource
from rllib_llm.envs.prompts import PromptEncoder, PromptSource
from rllib_llm.examples import calculator
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
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
    rows = [
        (row.prompt_ids + row.completion_ids, [False] * len(row.prompt_ids) + row.loss_mask)
        for row in conversation.rows()
    ]
    return rows if len(rows) > 1 else rows[0]


@pytest.mark.parametrize("family", APPENDING)
@pytest.mark.parametrize("messages", [[USER, SAYS, MORE, ENDS], [USER, CALL, RESULT, SAYS]])
def test_sft_learns_what_a_rollout_samples(family, messages):
    tokenizer = family_tokenizer(family)
    ids, targets = encode_chat(tokenizer, list(messages), tools=[ADD])
    row, learnt = sampled(tokenizer, messages, [ADD])
    assert ids[: len(row)] == row and targets[: len(row)] == learnt
    assert not any(targets[len(row) :])  # a line break behind the last end
    assert sum(targets) == sum(learnt) > 0


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])])
def test_prompts_with_answers_and_pairs_announce_the_tools_of_their_row(tools):
    tokenizer = family_tokenizer("chatml")
    row = {"prompt": [USER], "tools": tools}
    prompt_ids = ChatFormat(tokenizer, tools=[ADD]).prompt_ids([USER])
    texts = TextSource([{**row, "completion": [SAYS]}], tokenizer=tokenizer, max_length=999)
    whole = TextSource([{"messages": [USER, SAYS], "tools": [ADD]}], tokenizer=tokenizer,
                       max_length=999)  # fmt: skip
    ids = texts.batch(0, 1)[columns.INPUT_IDS]
    assert ids.tolist() == whole.batch(0, 1)[columns.INPUT_IDS].tolist()
    assert ids[0, : len(prompt_ids)].tolist() == prompt_ids
    pair = {**row, "chosen": [SAYS], "rejected": [ENDS]}
    pairs = PromptedPairSource([pair], tokenizer=tokenizer, max_length=999).batch(0, 1)
    assert pairs[columns.PROMPT_IDS][0].tolist()[: len(prompt_ids)] == prompt_ids


@pytest.mark.parametrize("given", [{"mood": "calm"}, '{"mood": "calm"}'])
def test_a_row_says_what_its_template_is_given(given):
    """As TRL's column `chat_template_kwargs`, in SFT, DPO, reward models and prompts."""
    tokenizer = copy.deepcopy(family_tokenizer("chatml"))
    tokenizer.chat_template = "{{ mood or 'x' }}" + tokenizer.chat_template
    row = {"prompt": [USER], "chat_template_kwargs": given}
    say, pair = {**row, "completion": [SAYS]}, {**row, "chosen": [SAYS], "rejected": [ENDS]}
    settings = {"tokenizer": tokenizer, "max_length": 999}
    ids = [
        TextSource([say], **settings).batch(0, 1)[columns.INPUT_IDS],
        TextSource([{**row, "messages": [USER, SAYS]}], **settings).batch(0, 1)[columns.INPUT_IDS],
        PromptedPairSource([pair], **settings).batch(0, 1)[columns.PROMPT_IDS],
        PairSource([pair], **settings).batch(0, 1)[columns.CHOSEN_IDS],
        PromptEncoder(tokenizer, 999).encode(PromptSource([row]).rows(0, 1))[0],
    ]
    assert all(tokenizer.decode(each[0]).startswith("calm<|im_start|>") for each in ids)
    taken = TextSource([{**say, "chat_template_kwargs": {"tokenize": True}}], **settings)
    with pytest.raises(Problems) as caught:
        taken.batch(0, 1)
    assert "chat_template_kwargs" in caught.value.problem.name


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


THINKS_AGAIN = {**ENDS, "reasoning_content": "Two and two."}
THINKS_AND_CALLS = {**CALL, "reasoning_content": "One and one."}


@pytest.mark.parametrize(
    ("messages", "num_rows"),
    [
        ([USER, THINKS, MORE, THINKS_AGAIN], 2),
        # Within one question no thought is dropped; the next question drops all.
        ([USER, THINKS_AND_CALLS, RESULT, THINKS_AGAIN, MORE, THINKS], 2),
        ([USER, THINKS], 1),
    ],
)
def test_of_a_template_that_drops_old_thoughts_sft_learns_the_rows_of_a_rollout(messages, num_rows):
    tokenizer = family_tokenizer("qwen3")
    source = TextSource(
        [{"messages": messages, "tools": [ADD]}, {"messages": [USER, THINKS], "tools": [ADD]}],
        tokenizer=tokenizer, max_length=4000, shuffle=False,
    )  # fmt: skip
    assert len(source) == num_rows + 1
    batch = source.batch(0, num_rows)
    expected = sampled(tokenizer, messages, [ADD])
    for place, (row, learnt) in enumerate(expected if num_rows > 1 else [expected]):
        assert batch["input_ids"][place, : len(row)].tolist() == row
        assert batch["loss_mask"][place, : len(row)].tolist() == learnt
        assert not bool(batch["loss_mask"][place, len(row) :].any())
    said = tokenizer.decode(batch["input_ids"][batch["loss_mask"]])
    num_thoughts = sum("reasoning_content" in message for message in messages)
    assert said.count("<think>") == num_thoughts  # each is learnt once


def test_data_without_thoughts_is_as_many_rows_as_it_has():
    rows = [{"messages": [USER, SAYS, MORE, ENDS]}]
    for family in FAMILIES:
        source = TextSource(rows, tokenizer=family_tokenizer(family), max_length=400)
        assert len(source) == 1


def test_texts_may_stand_among_conversations_with_thoughts():
    """A row without messages was a TypeError where the template drops thoughts."""
    rows = [{"messages": [USER, THINKS, MORE, ENDS]}, {"prompt": "1+1=", "completion": "2"}]
    tokenizer = family_tokenizer("qwen3")
    source = TextSource(rows, tokenizer=tokenizer, max_length=400, shuffle=False)
    batch = source.batch(0, len(source))
    said = tokenizer.decode(batch["input_ids"][-1][batch["loss_mask"][-1]])
    assert len(source) == 3 and said == "2<|im_end|>"


def test_a_message_without_a_role_is_told_with_its_row():
    rows = [{"messages": [USER, SAYS]}, {"messages": [USER, {"content": "yes"}]}]
    with pytest.raises(Problems, match="row 1 of .*'content': 'yes'.* must have 'role'"):
        TextSource(rows, tokenizer=family_tokenizer("qwen3"), max_length=400)


def test_thoughts_cost_about_one_rendering_of_each_message(monkeypatch):
    """Before the first batch; it was 28 ms a row."""
    tokenizer, calls, spent = family_tokenizer("qwen3"), [], []
    render = type(tokenizer).apply_chat_template

    def counted(self, messages, **settings):
        calls.append(len(messages))
        return render(self, messages, **settings)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", counted)
    row, num_prefixes = {"messages": [USER, THINKS, MORE, THINKS_AGAIN] * 2}, 9
    for count in (1, 11):
        calls.clear()
        assert len(TextSource([row] * count, tokenizer=tokenizer, max_length=99)) == 4 * count
        spent.append(len(calls))
    assert spent[1] - spent[0] <= 10 * num_prefixes
