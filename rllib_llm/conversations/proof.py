"""Proofs of what a chat format supports, on built-in dialogues, before sampling begins.

Each dialogue is walked through as a rollout would: prompt, the assistant's turn as the template
writes it, suffix, and so on. At its end the tokens must be those of the whole dialogue rendered and
encoded at once, bit for bit; or the template begins a path of its own, which is said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rllib_llm.conversations.chat_format import ChatFormat, ChatFormatError, Messages, thoughts_end
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.data.encoding import common_prefix_len
from rllib_llm.data.turn_ends import example_calls
from rllib_llm.shared.errors import require

Outcome = Literal[
    "appends", "forks", "keeps", "unsupported", "ignored", "unreadable", "proven"
]  # fmt: skip


@dataclass(frozen=True)
class Proof:
    """The result for one kind of dialogue.

    appends: each turn is a suffix of the one before; forks: a further turn changes earlier ones, so
    that it begins a row of its own; keeps: the same, but the tokens stay as they were sampled
    (`history="keep"`, or a renderer); unsupported: the template refuses such dialogues; ignored: it
    writes nothing of them; unreadable: it writes calls that `tool_syntax` does not read; proven: of
    a renderer, that it appends what the template writes after a turn.
    """

    dialogue: str
    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.dialogue}: {self.outcome}{f' ({self.detail})' if self.detail else ''}"


SYSTEM: dict[str, Any] = {"role": "system", "content": "Say little."}
USER: dict[str, Any] = {"role": "user", "content": "Good day. 1 + 1?"}
MORE: dict[str, Any] = {"role": "user", "content": " And 2 + 2? "}
SAYS: dict[str, Any] = {"role": "assistant", "content": "It is 2."}
ENDS: dict[str, Any] = {"role": "assistant", "content": "It is\n4, then."}
THINKS: dict[str, Any] = {**SAYS, "reasoning_content": "One and one."}


def prove(chat_format: ChatFormat) -> list[Proof]:
    """Proves the format on each kind of dialogue.

    A renderer that would append other tokens than the template writes is dropped, which is said.

    Raises:
        ChatFormatError: it would append tokens that are not the template's own.
    """
    calls, (result,) = example_calls(chat_format.example_tool or "add", "1 + 1", "two: 2")
    thoughtful = {**calls, "reasoning_content": "One and one."}
    dialogues = {
        "turns": [USER, SAYS, MORE, ENDS],
        "system message": [SYSTEM, USER, SAYS, MORE, ENDS],
        "thoughts": [USER, THINKS],
        "turns after thoughts": [USER, THINKS, MORE, ENDS],
    }
    if chat_format.tools:  # else none will be called
        dialogues |= {
            "tool calls": [USER, calls, result, ENDS],
            "tool calls after thoughts": [USER, thoughtful, result, ENDS],
            "turns after tool calls": [USER, calls, result, ENDS, MORE, SAYS],
        }
    renderers: list[Proof] = []
    if chat_format.renderer is not None:
        renderers.append(_prove_renderer(chat_format, dialogues))
    found = [_walk(chat_format, name, turns) for name, turns in dialogues.items()]
    return [*found, *renderers]


def _prove_renderer(chat_format: ChatFormat, dialogues: Mapping[str, Messages]) -> Proof:
    """Whether the renderer appends what the template does, however a turn ended. Turns may
    differ: that it keeps them where the template drops their thoughts is what it is for."""
    kind = f"renderer {chat_format.renderer_note}"
    proven = []
    for name, turns in dialogues.items():
        with contextlib.suppress(ChatFormatError):  # reported when the dialogue is walked through
            chat_format.render(turns)
            answered = [i for i, t in enumerate(turns[:-1]) if t["role"] == "assistant"]
            for place in answered:
                outcome = _bridge(chat_format, turns, place)
                if outcome == "differs":
                    why = f"it must write a dialogue with {name} as the chat template does"
                    chat_format.drop_renderer(f"{chat_format.renderer_note}: {why}")
                    return Proof(kind, "ignored", f"{name}: other tokens than the chat template")
                proven += [name] if outcome == "same" else []
    if not proven:
        chat_format.drop_renderer(f"{chat_format.renderer_note} leaves every turn to the template")
        return Proof(kind, "ignored", "it leaves every turn to the chat template")
    return Proof(kind, "proven", ", ".join(dict.fromkeys(proven)))


def _bridge(
    chat_format: ChatFormat, turns: Messages, place: int
) -> Literal["same", "differs", "left"]:
    """The renderer's text after a turn compared with the template's; "left" if it defers to the
    template."""
    before, turn = turns[:place], turns[place]
    following = [i for i in range(place + 1, len(turns)) if turns[i]["role"] == "assistant"]
    new = turns[place + 1 : min(following, default=len(turns))]
    said = chat_format.said(before, turn)
    if said is None:
        return "left"
    asked, sampled = chat_format.prompt_ids(before), _sampled_ids(chat_format, before, said)
    found: Literal["same", "left"] = "left"
    for finished in (True, False):
        ids = sampled if finished else sampled[:-1]
        suffix = chat_format.bridge(asked, ids, new)
        if suffix is None:
            continue
        written = chat_format.written_behind(before, turn, new, last_id=ids[-1] if ids else None)
        if suffix.token_ids != written:
            return "differs"
        found = "same"
    return found


_NO_TOOLS = ("unsupported", "ignored", "unreadable")


def require_tools(chat_format: ChatFormat, findings: list[Proof]) -> None:
    """Raises ChatFormatError where a template does not write tools, or what they answer."""
    walked = [finding for finding in findings if finding.dialogue.startswith("tool calls")]
    # A generation prompt that opens thoughts fits turns with thoughts alone.
    calls = next((finding for finding in walked if finding.outcome not in _NO_TOOLS), walked[0])
    calls = next((finding for finding in walked if finding.outcome == "unreadable"), calls)
    written = chat_format.render([USER], generation_prompt=True)
    unknown = [name for name in sorted(chat_format.tool_names) if name not in written]
    require(
        not (unknown or calls.outcome in _NO_TOOLS or chat_format.syntax == "none"),
        "chat_template", ..., "write tools, their calls and results",
        f"it does not name {unknown}, dialogues with {calls}, and calls are of the syntax "
        f"{chat_format.syntax!r}", "Give a template that writes them, or remove the tools",
        kind=ChatFormatError,
    )  # fmt: skip


def _texts(turns: Messages) -> Iterator[str]:
    """The texts that a template must render of a dialogue: all but the thoughts of earlier
    turns."""
    for turn in turns:
        yield turn["content"].strip()
        for call in turn.get("tool_calls", ()):
            yield from (str(value) for value in call["function"]["arguments"].values())
    if "reasoning_content" in turns[-1]:
        yield turns[-1]["reasoning_content"]


def _walk(chat_format: ChatFormat, name: str, turns: Messages) -> Proof:
    """Plays the dialogue as a rollout would, and checks the result."""
    try:
        whole = chat_format.render(turns)
    except ChatFormatError as error:
        return Proof(name, "unsupported", str(error.__cause__))
    lost = next((text for text in _texts(turns) if text not in whole), None)
    if lost is not None:
        return Proof(name, "ignored", f"{lost!r} is not written")
    conversation = Conversation(chat_format)
    waiting: Messages = []
    for place, turn in enumerate(turns):
        if turn["role"] != "assistant":
            waiting.append(turn)
            continue
        conversation.append_messages(waiting)
        waiting = []
        said = chat_format.said(turns[:place], turn)
        if not said:
            return Proof(name, "ignored", "the template does not show where a turn begins")
        ids = _sampled_ids(chat_format, turns[:place], said)
        conversation.append_sampled(ids, [0.0] * len(ids))
        # The text and not the ids: a small vocabulary may not spell what is said here.
        asked = chat_format.render(turns[:place], generation_prompt=True)
        reply = chat_format.read(
            said.removesuffix(chat_format.ends.of(turn)), thoughts_end=thoughts_end(asked)
        )
        written = [call["function"] for call in turn.get("tool_calls", ())]
        if written != [{"name": c.name, "arguments": c.arguments} for c in reply.tool_calls]:
            names, found = [w["name"] for w in written], [c.status for c in reply.tool_calls]
            why = f"its own call of {names} is read as {found or 'words'}"
            return Proof(name, "unreadable", why)
        if not reply.reasoning and (turn.get("reasoning_content") or said) in reply.content:
            return Proof(name, "ignored", "its thoughts are read as words")
    if conversation.suffixes["fork"]:
        return Proof(name, "forks", "a further turn changes earlier ones")
    return _compared(chat_format, name, turns, conversation)


def _sampled_ids(chat_format: ChatFormat, before: Messages, said: str) -> list[int]:
    """Ids as sampled after a prompt: some tokenizers add a space at the start of every text."""
    asked = chat_format.render(before, generation_prompt=True)
    prompt, whole = chat_format.encode(asked), chat_format.encode(asked + said)
    return whole[len(prompt) :] if whole[: len(prompt)] == prompt else chat_format.encode(said)


def _compared(
    chat_format: ChatFormat, name: str, turns: Messages, conversation: Conversation
) -> Proof:
    """Whether the walked tokens are those of the whole, up to the end of the last turn."""
    walked = conversation.token_ids
    said = chat_format.said(turns[:-1], turns[-1])
    asked = chat_format.render(turns[:-1], generation_prompt=True)
    expected = chat_format.encode(asked + str(said))
    if walked == expected:
        return Proof(name, "appends")
    if chat_format.as_closed(walked) == chat_format.as_closed(expected):
        return Proof(name, "keeps", "old turns keep the token that ended them when they were new")
    if conversation.suffixes["kept"] or conversation.suffixes["bridged"]:
        return Proof(name, "keeps", "earlier turns stay as they were sampled")
    same = common_prefix_len(walked, expected)
    decode = chat_format.tokenizer.decode
    remedy = "Let the generation prompt end in a newline, not in a space"
    raise ChatFormatError(
        "chat_template", f"write a dialogue with {name} as its turns were read",
        f"from token {same} on it is {decode(walked[same : same + 8])!r}, where the whole has "
        f"{decode(expected[same : same + 8])!r}", remedy if asked.endswith(" ") else "",
    )  # fmt: skip
