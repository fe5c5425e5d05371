"""Parses an assistant's turn into thoughts, text and tool calls.

A call counts as complete only where its text is closed and its JSON whole. What was cut off by the
length limit is `truncated`, and never run.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

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

_HERMES = ("<tool_call>", "</tool_call>")
_GEMMA = ("<|tool_call>", "<tool_call|>")
_PYTHONIC = ("<|tool_call_start|>", "<|tool_call_end|>")
_COHERE = ("<|START_ACTION|>", "<|END_ACTION|>")
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
# What stands around thoughts, by the syntax that has marks of its own.
_THINK = {
    "gemma4": ("<|channel>thought", "<channel|>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
_THINK_DEFAULT = ("<think>", "</think>")
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
# What ends an argument, and an argument up to there. It ends where the next one begins, or the call
# ends: it may quote its own end mark.
_XML_ARGUMENTS = (
    re.compile(r"\n?</parameter>\s*(?=<parameter=|\Z)"),
    re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*)", re.DOTALL),
)
_GLM_ARGUMENTS = (
    re.compile(r"</arg_value>\s*(?=<arg_key>|\Z)"),
    re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*)", re.DOTALL),
)
_NAMED_MISTRAL = re.compile(r"\s*([\w.-]+)(?:\s*\[CALL_ID\]\w*)?(?:\s*\[ARGS\])?\s*(?=\{)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_COHERE_RESPONSE = re.compile(r"<\|START_RESPONSE\|>|<\|END_RESPONSE\|>")

_HALVES = re.compile("[\ud800-\udfff]")  # of characters, which JSON can name
_MOST_LEVELS = 64  # of objects and lists in arguments, which templates and tools walk by recursion
_LARGEST = 10**4300  # of integers: Python reads and writes no more digits
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
    text: str,
    *,
    syntax: str,
    finish: str = "stop",
    tools: Collection[str] | Schemas | None = None,
    opens_thoughts: bool = False,
    first_call: int = 0,
    max_calls: int | None = None,
    reads_calls: bool = True,
) -> ParsedReply:
    """Takes an assistant's turn apart.

    Args:
        text: without the token that ends the turn.
        finish: of the sampling; a call at the very end of a turn that did not end by "stop" may
            lack something, and is `truncated` even where it could be read.
        tools: names that there are, or their parameters' schemas by name, which say what is a text
            where a syntax writes all values as text; None: any.
        opens_thoughts: whether the generation prompt ended with <think>.
        first_call: number of the conversation's first call in this turn, for the ids.
        max_calls: most calls of a turn; later ones are `too_many_calls`.
        reads_calls: whether there can be any; else what looks like one is words.
    """
    if syntax not in SYNTAXES:
        raise ValueError(
            f"syntax={syntax!r} must be one of {SYNTAXES}: it says how a tool call is written. "
            "Take the one that the chat template writes."
        )
    if syntax == "harmony":
        reasoning, content, found = _read_harmony(text, finish == "stop", reads_calls)
    else:
        marks = _THINK.get(syntax, _THINK_DEFAULT)
        reasoning, said = _split_thoughts(text, opens_thoughts, marks)
        schemas = tools if isinstance(tools, Mapping) else {}
        if syntax == "cohere":
            said = _COHERE_RESPONSE.sub("", said)
        content, found = said, []
        if reads_calls and syntax in _BLOCKS:
            content, found = _find_blocks(syntax, said, schemas)
        elif reads_calls and syntax in _ALONE:
            content, found = _ALONE[syntax](said, finish == "stop")
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


def _split_thoughts(
    text: str, opens_thoughts: bool, marks: tuple[str, str] = _THINK_DEFAULT
) -> tuple[str, str]:
    """Thoughts, and the text after them. Without an end marker everything is thought."""
    start, end = marks
    begins = text.lstrip().startswith(start)
    if not begins and not opens_thoughts:
        return "", text
    body = text.lstrip()[len(start) :] if begins else text
    thoughts, _, rest = body.partition(end)
    return thoughts, rest


Found = tuple[str, list[ToolCall]]


def _find_blocks(syntax: str, text: str, schemas: Schemas) -> Found:
    """Text outside of blocks between two marks, and the calls in each block."""
    (start, end), read = _BLOCKS[syntax]
    content, opening, rest = text.partition(start)
    calls: list[ToolCall] = []
    while opening:
        place = _end_of_block(syntax, rest)
        body, closing, tail = rest[:place], rest[place : place + len(end)], rest[place + len(end) :]
        if place < 0:
            body, closing, tail = rest, "", ""
        raw = start + body + closing
        calls += read(body, raw, schemas) if closing else [ToolCall("", None, raw, "truncated")]
        between, opening, rest = tail.partition(start)
        content += between
    return content, calls


def _end_of_block(syntax: str, rest: str) -> int:
    """Where the mark stands that ends a block, -1 if none does; arguments may quote that mark."""
    start, end = _BLOCKS[syntax][0]
    if syntax not in _LAST_WORDS:
        return rest.find(end, _end_of_json(rest, len(rest) - len(rest.lstrip())))
    whole = re.search(f"{re.escape(_LAST_WORDS[syntax])}\\s*{re.escape(end)}", rest)
    next_start = rest.find(start)
    if whole is None or 0 <= next_start < whole.start():
        return rest.find(end)
    return whole.end() - len(end)


def _find_mistral(text: str, is_whole: bool) -> Found:
    content, mark, body = text.partition(_MISTRAL)
    if not mark:
        return text, []
    if not _NAMED_MISTRAL.match(body):
        return content, _from_array(body, mark + body, is_whole)
    calls, start = [], 0
    while start <= len(body):
        named = _NAMED_MISTRAL.match(body, start)
        opens = named.end() if named else start
        end = body.find(mark, _end_of_json(body, opens))
        end = end if end >= 0 else len(body)
        raw = mark + body[start:end]
        if end == len(body) and not is_whole:
            calls.append(ToolCall("", None, raw, "truncated"))
        elif named is None:
            calls.append(ToolCall("", None, raw, "missing_name"))
        else:
            calls.append(_named(named[1], body[opens:end], raw))
        start = end + len(mark)
    return content, calls


def _end_of_json(text: str, start: int) -> int:
    """Where the JSON value that begins at `start` ends; `start` if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return start


def _find_llama3(text: str, is_whole: bool) -> Found:
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{") or '"name"' not in body:
        return text, []
    return "", list(_each_object(body, is_whole))


def _read_harmony(text: str, is_whole: bool, reads_calls: bool) -> tuple[str, str, list[ToolCall]]:
    """Thoughts, words and calls of messages in channels: header<|message|>body<|end|>."""
    thoughts, words, calls = [], [], []
    parts = [part for part in text.split("<|start|>assistant") if part.strip()]
    for place, part in enumerate(parts):
        header, mark, body = part.partition("<|message|>")
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        quoting = 0 if recipient is None else _end_of_json(body, len(body) - len(body.lstrip()))
        body = body[:quoting] + body[quoting:].partition("<|end|>")[0]
        if not mark:
            words.append(part)
        elif recipient is not None and reads_calls:
            is_cut = place == len(parts) - 1 and not is_whole
            raw = "<|start|>assistant" + part
            calls.append(
                ToolCall("", None, raw, "truncated") if is_cut else _named(recipient[1], body, raw)
            )
        elif channel is not None and channel[1] == "analysis":
            thoughts.append(body)
        else:
            words.append(body)
    return "\n".join(thoughts), "\n".join(words), calls


def _named(name: str, arguments: Any, raw: str) -> ToolCall:
    """A call with its name and its arguments, an object or the JSON of one."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return ToolCall(name, None, raw, "invalid_json")
    if not isinstance(found, Mapping):
        return ToolCall(name, None, raw, "invalid_arguments")
    return ToolCall(name, found, raw, "ok")


def _from_array(body: str, raw: str, is_whole: bool) -> list[ToolCall]:
    try:
        listed = json.loads(body)
    except (ValueError, RecursionError):
        return [ToolCall("", None, raw, "invalid_json" if is_whole else "truncated")]
    if not is_whole:
        return [ToolCall("", None, raw, "truncated")]
    listed = listed if isinstance(listed, list) else [listed]
    return [_from_object(one, _dumped(one)) for one in listed]


def _dumped(value: Any) -> str:
    """JSON, in which halves of characters alone are escaped."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def _each_object(body: str, is_whole: bool) -> Iterator[ToolCall]:
    """Llama 3's calls: objects with semicolons between them."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(body):
        try:
            found, end = decoder.raw_decode(body, place)
        except (ValueError, RecursionError):
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
    return _named(found["name"], found.get("arguments", found.get("parameters", {})), raw)


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
    name: str,
    how: tuple[re.Pattern[str], re.Pattern[str]],
    written: str,
    raw: str,
    schemas: Schemas,
) -> ToolCall:
    """A call whose argument values are all written as text, in the way of `_XML_ARGUMENTS`."""
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


def _or_null(keyword: str) -> Callable[..., Iterator[Any]]:
    """A keyword of JSON Schema that lets null pass where the schema is also `nullable`."""
    check = Draft202012Validator.VALIDATORS[keyword]

    def checked(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[Any]:
        if value is not None or not schema.get("nullable"):
            yield from check(validator, wanted, value, schema) or ()

    return checked


# transformers writes `X | None` as X that is `nullable`, a word of OpenAPI's.
Arguments = extend(Draft202012Validator, {word: _or_null(word) for word in ("type", "enum")})


def objection(schema: Mapping[str, Any], value: Any, part: Any = None) -> str:
    """The objection of a tool's schema, or of a part of it, to a value; "" where it fits, or where
    the schema cannot be checked (JavaScript's regular expressions, references to other sites)."""
    try:
        validator = Arguments(schema)
        (validator if part is None else validator.evolve(schema=part)).validate(value)
    except ValidationError as error:
        return str(error.message)
    except Exception:  # noqa: BLE001  (of somebody's schema: the tool says what is wrong)
        return ""
    return ""


def broken_up(value: Any, special: Sequence[str] = ()) -> Any:
    """The value, no text in it one of `special`, or with half of a character (a lone surrogate)."""
    if isinstance(value, str):
        value = value.encode(errors="replace").decode()
        for token in special:
            value = value.replace(token, f"{token[0]} {token[1:]}")
        return value
    if isinstance(value, Mapping):
        return {broken_up(key, special): broken_up(part, special) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [broken_up(part, special) for part in value]
    return value


def is_json(value: Any, levels: int = _MOST_LEVELS) -> bool:
    """Whether a value is one of JSON, with finite numbers and whole characters, and nested no
    deeper than `levels`."""
    if isinstance(value, Mapping):
        return levels > 0 and all(
            isinstance(key, str) and is_json(key) and is_json(each, levels - 1)
            for key, each in value.items()
        )
    if isinstance(value, list):
        return levels > 0 and all(is_json(each, levels - 1) for each in value)
    if isinstance(value, str):
        return not _HALVES.search(value)
    return (
        value is None
        or (isinstance(value, int) and abs(value) < _LARGEST)
        or (isinstance(value, float) and math.isfinite(value))
    )


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


_BLOCKS: dict[str, tuple[tuple[str, str], Callable[[str, str, Schemas], list[ToolCall]]]] = {
    "hermes": (_HERMES, lambda body, raw, schemas: [_from_json(body, raw)]),
    "xml": (_HERMES, lambda body, raw, schemas: [_from_xml(body, raw, schemas)]),
    "glm": (_HERMES, lambda body, raw, schemas: [_from_glm(body, raw, schemas)]),
    "gemma4": (_GEMMA, lambda body, raw, schemas: [_from_gemma(body, raw)]),
    "pythonic": (_PYTHONIC, lambda body, raw, schemas: _from_python(body, raw)),
    "cohere": (_COHERE, lambda body, raw, schemas: _from_array(body, raw, True)),
}
# What stands before the end mark of a block whose arguments are not JSON.
_LAST_WORDS = {"xml": "</function>", "glm": "</arg_value>", "gemma4": "}", "pythonic": "]"}
_ALONE = {"mistral": _find_mistral, "llama3": _find_llama3}  # a call is the end of the turn
