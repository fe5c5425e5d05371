"""What an assistant said, taken apart: its thoughts, its words, the tools that it calls.

A call counts as complete only where its text is closed and its JSON whole. What was cut off by the
length limit is `truncated`, and never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

CallStatus = Literal[
    "ok", "truncated", "invalid_json", "missing_name", "invalid_arguments", "unknown_tool"
]
"""Whole; cut off; no JSON; JSON without a name; arguments that are no object; no such tool."""
SYNTAXES = ("hermes", "xml", "mistral", "llama3", "none")
"""<tool_call>{JSON}</tool_call> (Hermes, Qwen); <tool_call><function=...> (Qwen3-Coder);
[TOOL_CALLS][{JSON}] (Mistral); {JSON} alone (Llama 3); no calls."""

_HERMES = ("<tool_call>", "</tool_call>")
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_THINK = ("<think>", "</think>")
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments` is None unless they could be read; `raw` is the text of the call."""

    name: str
    arguments: Mapping[str, Any] | None
    raw: str
    status: CallStatus
    id: str = ""

    def as_message(self) -> dict[str, Any]:
        """The call as chat templates take it."""
        function = {"name": self.name, "arguments": dict(self.arguments or {})}
        return {"type": "function", "id": self.id, "function": function}


@dataclass(frozen=True)
class ParsedReply:
    """An assistant's turn: what it thought, what it said beside its calls, and the calls."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    text: str = ""
    """All of it as it was said, without the token that ends the turn."""

    @property
    def is_truncated(self) -> bool:
        """Whether a call was cut off."""
        return any(call.status == "truncated" for call in self.tool_calls)

    def as_message(self) -> dict[str, Any]:
        """The turn as chat templates take it; calls that could not be read stay in its content."""
        readable = [call for call in self.tool_calls if call.arguments is not None]
        broken = [call.raw for call in self.tool_calls if call.arguments is None]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "\n".join(filter(None, [self.content, *broken])),
        }
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if readable:
            message["tool_calls"] = [call.as_message() for call in readable]
        return message


def syntax_of(template: str) -> str:
    """The syntax of tool calls that a chat template writes, one of `SYNTAXES`."""
    if "<function=" in template:
        return "xml"
    if _HERMES[0] in template:
        return "hermes"
    if _MISTRAL in template:
        return "mistral"
    if _PYTHON_TAG in template or '"parameters": ' in template:
        return "llama3"
    return "none"


def parse_reply(
    text: str,
    *,
    syntax: str,
    finish: str = "stop",
    tools: Collection[str] | None = None,
    opens_thoughts: bool = False,
    first_call: int = 0,
) -> ParsedReply:
    """Takes an assistant's turn apart.

    Args:
        text: without the token that ends the turn.
        syntax: one of `SYNTAXES`.
        finish: of the sampling; a call at the very end of a turn that did not end by "stop" may
            lack something, and is `truncated` even where it could be read.
        tools: names that there are; None: any.
        opens_thoughts: whether the generation prompt ended with <think>.
        first_call: number of the conversation's first call in this turn, for the ids.

    Raises:
        ValueError: the syntax is unknown.
    """
    if syntax not in SYNTAXES:
        raise ValueError(
            f"syntax={syntax!r} must be one of {SYNTAXES}: it says how a tool call is written. "
            "Take the one that the chat template writes."
        )
    reasoning, said = _split_thoughts(text, opens_thoughts)
    content, found = _FINDERS[syntax](said, finish == "stop")
    calls = tuple(
        _checked(call, tools, f"call{first_call + i:05d}") for i, call in enumerate(found)
    )
    return ParsedReply(content.strip(), reasoning.strip(), calls, text)


def _split_thoughts(text: str, opens_thoughts: bool) -> tuple[str, str]:
    """Thoughts, and what comes behind them. Thoughts that do not end are all there is."""
    start, end = _THINK
    begins = text.lstrip().startswith(start)
    if not begins and not opens_thoughts:
        return "", text
    body = text.lstrip()[len(start) :] if begins else text
    thoughts, _, rest = body.partition(end)
    return thoughts, rest


def _checked(call: ToolCall, tools: Collection[str] | None, call_id: str) -> ToolCall:
    status = call.status
    if status == "ok" and tools is not None and call.name not in tools:
        status = "unknown_tool"
    return ToolCall(call.name, call.arguments, call.raw, status, call_id)


def _find_hermes(text: str, is_whole: bool) -> tuple[str, list[ToolCall]]:
    content, blocks = _blocks(text)
    return content, [_from_json(body, raw, closed) for body, raw, closed in blocks]


def _find_xml(text: str, is_whole: bool) -> tuple[str, list[ToolCall]]:
    content, blocks = _blocks(text)
    return content, [_from_xml(body, raw, closed) for body, raw, closed in blocks]


def _blocks(text: str) -> tuple[str, list[tuple[str, str, bool]]]:
    """Text outside <tool_call> blocks; and of each block what is in it, all of it, and whether it
    is closed."""
    start, end = _HERMES
    content, _, rest = text.partition(start)
    blocks = []
    more = len(content) < len(text)
    while more:
        body, closing, tail = rest.partition(end)
        blocks.append((body, start + body + closing, bool(closing)))
        between, opening, rest = tail.partition(start)
        content, more = content + between, bool(opening)
    return content, blocks


def _find_mistral(text: str, is_whole: bool) -> tuple[str, list[ToolCall]]:
    content, mark, body = text.partition(_MISTRAL)
    if not mark:
        return text, []
    return content, _from_array(body, mark + body, is_whole)


def _find_llama3(text: str, is_whole: bool) -> tuple[str, list[ToolCall]]:
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{") or '"name"' not in body:
        return text, []
    return "", list(_each_object(body, is_whole))


def _find_none(text: str, is_whole: bool) -> tuple[str, list[ToolCall]]:
    return text, []


_FINDERS = {
    "hermes": _find_hermes, "xml": _find_xml, "mistral": _find_mistral, "llama3": _find_llama3,
    "none": _find_none,
}  # fmt: skip


def _from_array(body: str, raw: str, is_whole: bool) -> list[ToolCall]:
    try:
        listed = json.loads(body)
    except json.JSONDecodeError:
        return [ToolCall("", None, raw, "invalid_json" if is_whole else "truncated")]
    if not is_whole:
        return [ToolCall("", None, raw, "truncated")]
    listed = listed if isinstance(listed, list) else [listed]
    return [_from_object(one, json.dumps(one, ensure_ascii=False)) for one in listed]


def _each_object(body: str, is_whole: bool) -> Iterator[ToolCall]:
    """Llama 3's calls: objects with semicolons between them."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(body):
        try:
            found, end = decoder.raw_decode(body, place)
        except json.JSONDecodeError:
            status: CallStatus = "invalid_json" if is_whole else "truncated"
            yield ToolCall("", None, body[place:], status)
            return
        raw = body[place:end]
        place = end + len(body[end:]) - len(body[end:].lstrip(" \n;"))
        is_last = place >= len(body)
        if is_last and not is_whole:
            yield ToolCall("", None, raw, "truncated")
        else:
            yield _from_object(found, raw)


def _from_json(body: str, raw: str, closed: bool) -> ToolCall:
    if not closed:
        return ToolCall("", None, raw, "truncated")
    try:
        return _from_object(json.loads(body), raw)
    except json.JSONDecodeError:
        return ToolCall("", None, raw, "invalid_json")


def _from_object(found: Any, raw: str) -> ToolCall:
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return ToolCall("", None, raw, "missing_name")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # as OpenAI writes them
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return ToolCall(found["name"], None, raw, "invalid_json")
    if not isinstance(arguments, Mapping):
        return ToolCall(found["name"], None, raw, "invalid_arguments")
    return ToolCall(found["name"], arguments, raw, "ok")


def _from_xml(body: str, raw: str, closed: bool) -> ToolCall:
    if not closed:
        return ToolCall("", None, raw, "truncated")
    match = _FUNCTION.fullmatch(body)
    if match is None:
        return ToolCall("", None, raw, "missing_name")
    arguments = {name: _value(value) for name, value in _PARAMETER.findall(match[2])}
    return ToolCall(match[1].strip(), arguments, raw, "ok")


def _value(text: str) -> Any:
    """A parameter written as text: JSON where it is such, else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
