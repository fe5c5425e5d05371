"""Parses an assistant's turn into thoughts, text and tool calls.

A call counts as complete only where its text is closed and its JSON whole. What was cut off by the
length limit is `truncated`, and never run.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rllib_llm.conversations.json_values import is_json, objection
from rllib_llm.data.encoding import broken_up

CallStatus = Literal[
    "ok", "truncated", "invalid_json", "missing_name", "invalid_arguments", "unknown_tool",
    "too_many_calls",
]  # fmt: skip
"""Whole; cut off; no JSON; JSON without a name; arguments that are no object; no such tool; more in
a turn than the chat template can write."""
SYNTAXES = (
    "hermes", "xml", "glm", "mistral", "llama3", "harmony", "gemma4", "pythonic", "cohere", "none",
)  # fmt: skip
"""<tool_call>{JSON}</tool_call> (Hermes, Qwen); <tool_call><function=...> (Qwen3-Coder);
<tool_call>name<arg_key>... (GLM); [TOOL_CALLS][{JSON}] or [TOOL_CALLS]name[ARGS]{JSON} (Mistral);
{JSON} alone (Llama 3); channels with recipients (gpt-oss); <|tool_call>call:name{...} (Gemma 4);
<|tool_call_start|>[name(key=value)] (LFM2); <|START_ACTION|>[{JSON}] (Command R); no calls."""

_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
THINK = {
    "gemma4": ("<|channel>thought", "<channel|>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
THINK_DEFAULT = ("<think>", "</think>")
"""What stands around thoughts, by the syntax that has marks of its own, and of the others."""
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
# What ends an argument, and an argument's key and value. It ends where the next one begins, or the
# call ends: it may quote its own end mark.
_XML_ARGUMENTS = (
    re.compile(r"\n?</parameter>\s*(?=<parameter=|\Z)"),
    re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*)", re.DOTALL),
)
_GLM_ARGUMENTS = (
    re.compile(r"</arg_value>\s*(?=<arg_key>|\Z)"),
    re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*)", re.DOTALL),
)
_NAMED_MISTRAL = re.compile(r"\s*([\w.-]+)(?:\s*\[CALL_ID\]\w*)?(?:\s*\[ARGS\])?\s*(?=\{)")
_SPACES = re.compile(r"\s*")
_BETWEEN_OBJECTS = re.compile(r"[ \n;]*")
_KEY = re.compile(r'"(\w+)"\s*:')
_ARGUMENTS = ("arguments", "parameters")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_HARMONY_START = "<|start|>assistant"
_HARMONY = re.compile(rf"<\|message\|>|{re.escape(_HARMONY_START)}")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_COHERE_RESPONSE = re.compile(r"<\|START_RESPONSE\|>|<\|END_RESPONSE\|>")

_MOST_PYTHON = 65_536  # characters of a list of calls that Python's parser is given

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of tools' parameters by their names."""


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
    """A parsed assistant turn: thoughts, text outside calls, and calls."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    text: str = ""
    """All of it as it was said, without the token that ends the turn."""

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


_SIGNS = {
    "<arg_key>": "glm", "<|channel|>": "harmony", "<|tool_call>": "gemma4",
    "<|tool_call_start|>": "pythonic", "<|START_ACTION|>": "cohere", "<function=": "xml",
    "<tool_call>": "hermes", _MISTRAL: "mistral", _PYTHON_TAG: "llama3", '"parameters": ': "llama3",
}  # fmt: skip


def syntax_of(template: str) -> str:
    """The syntax of tool calls that a chat template writes, one of `SYNTAXES`."""
    return next((syntax for sign, syntax in _SIGNS.items() if sign in template), "none")


def parse_reply(
    text: str, *, syntax: str, finish: str = "stop", tools: Collection[str] | Schemas | None = None,
    thoughts_end: str = "", first_call: int = 0, max_calls: int | None = None,
    reads_calls: bool = True,
) -> ParsedReply:  # fmt: skip
    """Takes an assistant's turn apart.

    Args:
        text: without the token that ends the turn.
        finish: of the sampling; a call at the very end of a turn that did not end by "stop" may
            lack something, and is `truncated` even where it could be read.
        tools: names that there are, or their parameters' schemas by name, which say what is a text
            where a syntax writes all values as text; None: any.
        thoughts_end: ends the thoughts that the generation prompt opened; "" where it opened none.
        first_call: number of the conversation's first call in this turn, for the ids.
        max_calls: most calls of a turn; later ones are `too_many_calls`.
        reads_calls: whether there can be any; else what looks like one is words.
    """
    assert syntax in SYNTAXES, syntax
    begin, end = THINK.get(syntax, THINK_DEFAULT)
    reasoning, said = "", text
    if text.lstrip().startswith(begin):
        said, thoughts_end = text.lstrip()[len(begin) :], end
    if thoughts_end:  # without an end marker everything is thought
        reasoning, _, said = said.partition(thoughts_end)
    if syntax == "harmony":
        analysis, content, found = _read_harmony(said, finish == "stop", reads_calls)
        reasoning = reasoning or analysis
    else:
        schemas = tools if isinstance(tools, Mapping) else {}
        content, found = said, []
        if reads_calls and syntax in _BLOCKS:
            content, found = _find_blocks(syntax, said, schemas, finish == "stop")
        elif reads_calls and syntax == "mistral":
            content, found = _find_mistral(said, finish == "stop")
        elif reads_calls and syntax == "llama3":
            content, found = _find_llama3(said, finish == "stop", tools)
        if syntax == "cohere":
            content = _COHERE_RESPONSE.sub("", content)
    calls = []
    for i, call in enumerate(found):
        if not is_json(call.name):
            call = replace(call, name="", arguments=None, status="invalid_json")
        if not is_json(call.arguments):
            call = replace(call, arguments=None, status="invalid_json")
        call = replace(call, raw=broken_up(call.raw))
        status = call.status
        if max_calls is not None and i >= max_calls:
            call, status = replace(call, arguments=None), "too_many_calls"
        elif status == "ok" and tools is not None and call.name not in tools:
            status = "unknown_tool"
        calls.append(replace(call, status=status, id=f"call{first_call + i:05d}"))
    return ParsedReply(content.strip(), reasoning.strip(), tuple(calls), text)


Found = tuple[str, list[ToolCall]]


def _find_blocks(syntax: str, text: str, schemas: Schemas, is_whole: bool) -> Found:
    """Text outside of blocks between two marks, and the calls in each block.

    Arguments may quote the end mark, those that are written verbatim not the start mark too: it
    could as well begin the next call. What follows a block that cannot be read may be part of its
    arguments, and is not read either.
    """
    (start, end), ends, read = _BLOCKS[syntax]
    verbatim = syntax in ("xml", "glm")
    words: list[str] = []
    calls: list[ToolCall] = []
    place = 0
    while (opening := text.find(start, place)) >= 0:
        words.append(text[place:opening])
        inside = opening + len(start)
        place = next((mark.end() for mark in ends.finditer(text, inside) if mark[1]), -1)
        body = text[inside : place - len(end)]
        if place < 0 or (verbatim and start in body):
            found = [ToolCall("", None, "", "invalid_arguments" if verbatim else "invalid_json")]
        else:
            found = read(body, text[opening:place], schemas)
        unread = [c.status == "invalid_json" or (verbatim and c.arguments is None) for c in found]
        if found and all(unread):
            raw = text[opening:]
            is_cut = not is_whole or end not in raw
            return "".join(words), [*calls, _as_written(found[0], raw, is_cut)]
        calls += found
    return "".join(words) + text[place:], calls


def _find_mistral(text: str, is_whole: bool) -> Found:
    content, mark, body = text.partition(_MISTRAL)
    if not mark:
        return text, []
    if not _NAMED_MISTRAL.match(body):
        raw = mark + body
        found = _from_array(body, raw) if is_whole else [ToolCall("", None, raw, "truncated")]
        return content, found
    calls, start = [], 0
    while start <= len(body):
        named = _NAMED_MISTRAL.match(body, start)
        end = body.find(mark, _end_of_json(body, named.end()) if named else start)
        end = end if end >= 0 else len(body)
        call = ToolCall("", None, "", "missing_name")
        if named is not None:
            call = _named(named[1], body[named.end() : end], "")
        if call.status == "invalid_json":  # what follows may be part of the arguments
            end = len(body)
        raw = mark + body[start:end]
        calls.append(_as_written(call, raw, end == len(body) and not is_whole))
        start = end + len(mark)
    return content, calls


def _as_written(call: ToolCall, raw: str, is_cut: bool) -> ToolCall:
    """The call with its text, `truncated` where that was cut off."""
    return ToolCall("", None, raw, "truncated") if is_cut else replace(call, raw=raw)


def _after(pattern: re.Pattern[str], text: str, place: int) -> int:
    """Where what the pattern matches at `place` ends; `place` if it does not."""
    match = pattern.match(text, place)
    return match.end() if match else place


def _end_of_json(text: str, start: int) -> int:
    """Where the JSON value that begins at `start`, after spaces, ends; `start` if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, _after(_SPACES, text, start))[1]
    except (ValueError, RecursionError):
        return start


def _find_llama3(text: str, is_whole: bool, tools: Collection[str] | None) -> Found:
    """Objects with semicolons between them: calls after their mark, and where the first one has
    arguments beside its name, or nothing but a tool's name; else an answer in JSON."""
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{"):
        return text, []
    end = _end_of_json(body, 0)
    first = json.loads(body[:end]) if end else dict.fromkeys(_KEY.findall(body), "")
    name, is_marked = first.get("name"), text.lstrip().startswith(_PYTHON_TAG)
    is_tool = len(first) == 1 and (tools is None or name in [*tools])
    if not isinstance(name, str) or not (is_marked or is_tool or first.keys() & {*_ARGUMENTS}):
        return text, []
    calls, place = [], 0
    while place < len(body):
        end = _end_of_json(body, place)
        end = end if end > place else len(body)
        calls.append(_from_json(body[place:end], body[place:end]))
        place = _after(_BETWEEN_OBJECTS, body, end)
    return "", [*calls[:-1], _as_written(calls[-1], calls[-1].raw, not is_whole)]


def _read_harmony(text: str, is_whole: bool, reads_calls: bool) -> tuple[str, str, list[ToolCall]]:
    """Thoughts, words and calls of messages in channels: header<|message|>body<|end|>."""
    thoughts, words, calls = [], [], []
    place = 0
    while place < len(text):
        mark = _HARMONY.search(text, place)
        header = text[place : mark.start() if mark else len(text)]
        if mark is None or mark[0] == _HARMONY_START:
            words.append(header)
            place = mark.end() if mark else len(text)
            continue
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header) if reads_calls else None
        quoting = mark.end() if recipient is None else _end_of_json(text, mark.end())
        end = text.find(_HARMONY_START, quoting)
        end = end if end >= 0 else len(text)
        body = text[mark.end() : quoting] + text[quoting:end].partition("<|end|>")[0]
        if recipient is not None:
            call = _named(recipient[1], body, "")
            if call.status == "invalid_json":  # what follows may be part of the arguments
                end = len(text)
            raw = _HARMONY_START + text[place:end]
            calls.append(_as_written(call, raw, end == len(text) and not is_whole))
        elif channel is not None and channel[1] == "analysis":
            thoughts.append(body)
        else:
            words.append(body)
        place = end + len(_HARMONY_START)
    return "\n".join(thoughts), "\n".join(filter(str.strip, words)), calls


def _named(name: str, arguments: Any, raw: str) -> ToolCall:
    """A call with its name and its arguments, an object or the JSON of one."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return ToolCall(name, None, raw, "invalid_json")
    if not isinstance(found, Mapping):
        return ToolCall(name, None, raw, "invalid_arguments")
    return ToolCall(name, found, raw, "ok")


def _from_array(body: str, raw: str) -> list[ToolCall]:
    try:
        listed = json.loads(body)
    except (ValueError, RecursionError):
        return [ToolCall("", None, raw, "invalid_json")]
    calls = []
    for one in listed if isinstance(listed, list) else [listed]:
        written = json.dumps(one, ensure_ascii=False)  # halves of characters alone are escaped
        calls.append(_from_object(one, written.encode("utf-8", "backslashreplace").decode()))
    return calls


def _from_json(body: str, raw: str) -> ToolCall:
    try:
        return _from_object(json.loads(body), raw)
    except (ValueError, RecursionError):
        return ToolCall("", None, raw, "invalid_json")


def _from_object(found: Any, raw: str) -> ToolCall:
    if isinstance(found, Mapping) and "tool_name" in found:
        found = {**found, "name": found["tool_name"]}
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return ToolCall("", None, raw, "missing_name")
    given = next((g for k in _ARGUMENTS if (g := found.get(k)) is not None), "")
    is_empty = isinstance(given, str) and given.strip() in ("", "null")
    return _named(found["name"], {} if is_empty else given, raw)


def _from_xml(body: str, raw: str, schemas: Schemas) -> ToolCall:
    match = _FUNCTION.fullmatch(body)
    if match is None:
        return ToolCall("", None, raw, "missing_name")
    return _of_texts(match[1].strip(), _XML_ARGUMENTS, match[2], raw, schemas)


def _from_glm(body: str, raw: str, schemas: Schemas) -> ToolCall:
    name, key, rest = body.partition("<arg_key>")
    if not name.strip() or name.strip().startswith("{"):
        return ToolCall("", None, raw, "missing_name")
    return _of_texts(name.strip(), _GLM_ARGUMENTS, key + rest, raw, schemas)


def _of_texts(
    name: str, how: tuple[re.Pattern[str], re.Pattern[str]], written: str, raw: str,
    schemas: Schemas,
) -> ToolCall:  # fmt: skip
    """A call whose argument values are all written as text.

    `how`: what ends an argument, and an argument's key and value.
    """
    *parts, rest = how[0].split(written)
    found = [how[1].fullmatch(part) for part in parts]
    if rest.strip() or not all(found):
        return ToolCall(name, None, raw, "invalid_arguments")
    texts = [(match[1], match[2]) for match in found if match]
    schema = schemas.get(name) or {}
    kinds = schema.get("properties") or {}
    values = {key: _value(text, schema, kinds.get(key, {})) for key, text in texts}
    return ToolCall(name, values, raw, "ok")


_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_JSON_WORDS = {"true": True, "false": False, "null": None}


def _value(text: str, schema: Mapping[str, Any], kind: Any) -> Any:
    """A value written as text: parsed as JSON, unless its part `kind` of the schema takes the text
    alone."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _PYTHON_WORDS.get(text.strip(), text)
    if (isinstance(value, str) and kind) or objection(schema, value, kind):
        return value if objection(schema, text, kind) else text
    return value


def _from_gemma(body: str, raw: str) -> ToolCall:
    name, _, rest = body.strip().removeprefix("call:").partition("{")
    if not name.strip() or not body.strip().startswith("call:"):
        return ToolCall("", None, raw, "missing_name")
    strings = rest.split('<|"|>')  # texts stand at odd places
    for i, part in enumerate(strings):
        if i % 2:
            strings[i] = json.dumps(part)
        else:
            keyed = re.sub(r"(^|[{,])\s*([\w.-]+)\s*:", r'\1"\2":', part)
            strings[i] = re.sub(r"\bNone\b", "null", keyed)  # the template's, within lists
    return _named(name.strip(), "{" + "".join(strings), raw)


def _from_python(body: str, raw: str) -> list[ToolCall]:
    """Calls written as a Python list, with literals as arguments."""
    if len(body) > _MOST_PYTHON:
        return [ToolCall("", None, raw, "invalid_json")]
    for text in (body.strip(), body.strip().replace("\n", "\\n")):  # templates write lines in texts
        try:
            listed = _JSONWords().visit(ast.parse(text, mode="eval")).body
            calls = listed.elts if isinstance(listed, ast.List) else [listed]
            return [_from_call(call) for call in calls]
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return [ToolCall("", None, raw, "invalid_json")]


class _JSONWords(ast.NodeTransformer):
    """Replaces JSON's words, which templates write in lists and objects, by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def _from_call(call: ast.expr) -> ToolCall:
    if not isinstance(call, ast.Call):
        return ToolCall("", None, ast.unparse(call), "missing_name")
    raw, name = ast.unparse(call), ast.unparse(call.func)
    if call.args or not all(keyword.arg for keyword in call.keywords):
        return ToolCall(name, None, raw, "invalid_arguments")
    values = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    return ToolCall(name, values, raw, "ok")


# Texts in arguments, in which an end mark ends nothing; without an end they take all that is left.
_JSON_TEXT = r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)'
_PYTHON_TEXT = _JSON_TEXT + "|" + _JSON_TEXT.replace('"', "'")
_GEMMA_TEXT = r'<\|"\|>.*?(?:<\|"\|>|\Z)'
_XML_TEXT = r"<parameter=.*?(?:</parameter>\s*(?=<parameter=|</function>\s*</tool_call>)|\Z)"
_GLM_TEXT = r"<arg_value>.*?(?:</arg_value>\s*(?=<arg_key>|</tool_call>)|\Z)"
_ReadBlock = Callable[[str, str, Schemas], list[ToolCall]]


def _block(
    start: str, end: str, text: str, read: _ReadBlock
) -> tuple[tuple[str, str], re.Pattern[str], _ReadBlock]:
    """Marks, what finds the end mark (the group) outside of texts in arguments, and the reader."""
    return (start, end), re.compile(f"{text}|({re.escape(end)})", re.DOTALL), read


_TOOL_CALL = ("<tool_call>", "</tool_call>")
_BLOCKS = {
    "hermes": _block(*_TOOL_CALL, _JSON_TEXT, lambda body, raw, _: [_from_json(body, raw)]),
    "xml": _block(*_TOOL_CALL, _XML_TEXT, lambda *block: [_from_xml(*block)]),
    "glm": _block(*_TOOL_CALL, _GLM_TEXT, lambda *block: [_from_glm(*block)]),
    "gemma4": _block(
        "<|tool_call>", "<tool_call|>", _GEMMA_TEXT, lambda body, raw, _: [_from_gemma(body, raw)]
    ),
    "pythonic": _block(
        "<|tool_call_start|>", "<|tool_call_end|>", _PYTHON_TEXT,
        lambda body, raw, _: _from_python(body, raw),
    ),
    "cohere": _block(
        "<|START_ACTION|>", "<|END_ACTION|>", _JSON_TEXT,
        lambda body, raw, _: _from_array(body, raw),
    ),
}  # fmt: skip
