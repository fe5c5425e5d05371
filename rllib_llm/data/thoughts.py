"""Conversations with thoughts, cut into the rows that a rollout would make of them.

Many templates write the thoughts of the newest turn alone:

    said in turn 1:   [ask 1] <think> a </think> answer 1
    said in turn 2:   [ask 1] answer 1 [ask 2] <think> b </think> answer 2

What turn 1 says is learnt from where it stands as it was said: in a row of its own. In the second
row it is only read; a target there would teach the model not to think.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rllib_llm.data.chats import Messages, render, sampled_end
from rllib_llm.data.rows import DataSourceError, Rows

_REASONING = "reasoning_content"
_ASK: dict[str, Any] = {"role": "user", "content": "x"}
_SAY: dict[str, Any] = {"role": "assistant", "content": "y", _REASONING: "qqq"}


class Part(NamedTuple):
    """A training row of a conversation: its first `end` messages, of which the assistant's turns
    from message `start` on are learnt from."""

    row: int
    start: int
    end: int


def parts_of_rows(rows: Rows, tokenizer: Any) -> list[Part] | None:
    """The training rows of a data set; None where they are its own."""
    if "messages" not in rows.columns or not _drops_thoughts(tokenizer):
        return None
    return [
        Part(place, *borders)
        for place, row in enumerate(rows)
        for borders in borders_of_parts(tokenizer, list(row["messages"]), row.get("tools"))
    ]


def borders_of_parts(
    tokenizer: Any, messages: Messages, tools: Sequence[Any] | None
) -> list[tuple[int, int]]:
    """(start, end) of each training row of a conversation, see `Part`."""
    ends: dict[int, int] = {}  # by the assistant's turn: the longest conversation that shows it
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            ends[turn] = _shown_until(tokenizer, messages, turn, tools)
    parts: list[tuple[int, int]] = []
    for turn, end in ends.items():
        if not parts or end != parts[-1][1]:
            parts.append((turn, end))
    return parts or [(0, len(messages))]


def _shown_until(tokenizer: Any, messages: Messages, turn: int, tools: Sequence[Any] | None) -> int:
    """The most messages whose rendering has a turn with thoughts as it was said; all of them for
    one without."""
    thoughts = str(messages[turn].get(_REASONING) or "").strip()
    if not thoughts:
        return len(messages)
    before = render(tokenizer, messages[:turn], generation_prompt=True, tools=tools)
    newest = render(tokenizer, messages[: turn + 1], tools=tools)
    if thoughts in newest[len(before) :]:
        said = newest[: sampled_end(tokenizer, newest, len(before))]
        ends = range(len(messages), turn, -1)
        return next(
            end for end in ends if render(tokenizer, messages[:end], tools=tools).startswith(said)
        )
    raise DataSourceError(
        name=f"messages[{turn}]",
        rule="have its thoughts written by the chat template where it is the newest turn",
        reason=f"{thoughts[:40]!r} is not in it, and would never be learnt",
        remedy=f"Give a template that writes {_REASONING}, or put the thoughts into the content",
    )


def _drops_thoughts(tokenizer: Any) -> bool:
    """Whether the template writes the thoughts of the newest turn, and not those of old ones."""
    if not tokenizer.chat_template or _REASONING not in str(tokenizer.chat_template):
        return False
    newest = render(tokenizer, [_ASK, _SAY])
    older: Sequence[Mapping[str, Any]] = [_ASK, _SAY, _ASK, {**_SAY, _REASONING: ""}]
    thoughts = str(_SAY[_REASONING])
    return thoughts in newest and thoughts not in render(tokenizer, older)
