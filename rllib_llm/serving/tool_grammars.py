"""Grammars of turns that have to call a tool, in the syntax that the model's template writes.

    harmony   [thoughts]  to=functions.add<|channel|>commentary json<|message|>{JSON}<|call|>
    gemma4    [thoughts] <|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|><|tool_response>
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.data.turn_ends import special_texts
from rllib_llm.serving.guides import with_single_spaces
from rllib_llm.serving.schemas import MAX_TOLD, NamedTool, ToolSchema, refuse

_NO_SYNTAX = "llama3"  # a call as JSON alone, of a model whose template writes none
# OpenAI's of a function that names none.
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_GEMMA_MARK = '<|"|>'  # around texts
_MOST_REFERENCES = 16  # of a schema, one to another
_SCALARS = ("integer", "number", "boolean", "null")


class _Syntax(NamedTuple):
    """The text around all calls, around each (with its `{name}`) and between them. keys: of the
    name and the arguments in an object; none: the arguments are an object of their own."""

    begin: str
    open: str
    close: str
    between: str
    end: str
    keys: tuple[str, str] | None = None


_TAGGED = ("", "<tool_call>\n", "\n</tool_call>", "\n", "")
_SYNTAXES = {
    "hermes": _Syntax(*_TAGGED, ("name", "arguments")),
    "xml": _Syntax("", "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", "\n", ""),
    "glm": _Syntax("", "<tool_call>{name}\n", "</tool_call>", "\n", ""),
    "mistral": _Syntax("[TOOL_CALLS][", "", "", ", ", "]", ("name", "arguments")),
    "llama3": _Syntax("", "", "", "; ", "", ("name", "parameters")),
    "harmony": _Syntax(
        "", " to=functions.{name}<|channel|>commentary json<|message|>", "", "", "",
    ),
    "gemma4": _Syntax("", "<|tool_call>call:{name}{{", "}}<tool_call|>", "", ""),
    "pythonic": _Syntax("<|tool_call_start|>[", "{name}(", ")", ", ", "]<|tool_call_end|>"),
    "cohere": _Syntax("<|START_ACTION|>[", "", "", ", ", "]<|END_ACTION|>",
                      ("tool_name", "parameters")),
}  # fmt: skip
# Around each argument of the syntaxes that write them one by one, and between two.
_ARGUMENTS = {
    "xml": ("<parameter={name}>\n", "\n</parameter>\n", ""),
    "glm": ("<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    "gemma4": ("{name}:", "", ","),
    "pythonic": ("{name}=", "", ", "),
}
# Ids that some templates write within a call, before its name or behind its arguments.
_IDS = {
    "before cohere": {"tool_call_id": {"type": "string", "pattern": "^[0-9]{1,3}$"}},
    "behind mistral": {"id": {"type": "string", "pattern": "^[a-zA-Z0-9]{9}$"}},
}
_TAG_NAME = r"[^\s<>{][^<>\n]*"
_NAMES = {"pythonic": r"[^\W\d]\w*(\.[^\W\d]\w*)*", "xml": _TAG_NAME, "glm": _TAG_NAME}
"""What a tool and its arguments may be called where the syntax does not quote their names; of the
others letters, digits, `_`, `.` and `-`."""


def forced_syntax(chat_format: ChatFormat) -> str:
    """How a call is written that has to be made."""
    return _NO_SYNTAX if chat_format.syntax == "none" else chat_format.syntax


def call_grammar(
    chat_format: ChatFormat, tools: Sequence[ToolSchema], choice: NamedTool | str, one_call: bool
) -> str:
    """llguidance's grammar of a turn that calls a tool, up to the token that ends it; 400 where
    there is no such tool, or the syntax cannot write a name.

    Args:
        choice: "required" or the tool that has to be called.
        one_call: whether there is one call at most.
    """
    named = choice.function.name if isinstance(choice, NamedTool) else None
    callable_ = [each.function for each in tools if named in (None, each.function.name)]
    refuse(not callable_, f"tool_choice={(named or str(choice))[:MAX_TOLD]!r} must name one of the "
           f"tools {[each.function.name for each in tools]}.", "tool_choice")  # fmt: skip
    alone = chat_format.max_calls == 1 or chat_format.syntax == "harmony"  # its end ends the turn
    return _Writer(chat_format).turn(callable_, one_call or alone)


def behind_thoughts(grammar: str, end: str, chat_format: ChatFormat) -> str:
    """The grammar of a turn whose thoughts are open, and end with `end`."""
    writer = _Writer(chat_format)
    start = f'{writer.text_until(end)} ("\\n" "\\n"?)? @answer'
    is_json = grammar.startswith("{")
    given = json.loads(grammar) if is_json else {"grammars": [{"lark_grammar": grammar}]}
    first, *others = given["grammars"]
    top = {"lark_grammar": "\n".join([f"start: {start}", *writer.rules])}
    return json.dumps({**given, "grammars": [top, {**first, "name": "answer"}, *others]})


class _Writer:
    """Writes rules in Lark with JSON Schemas in it; `rules`: those that others refer to."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self.rules: list[str] = []
        self._references: dict[str, str] = {}  # names of rules by the parts of a schema
        self._format, self._syntax = chat_format, forced_syntax(chat_format)
        self._special = special_texts(chat_format.tokenizer)
        template = str(chat_format.tokenizer.chat_template)
        self._around = _SYNTAXES[self._syntax]
        if self._syntax == "mistral" and "[ARGS]" in template:
            self._around = _Syntax("", "[TOOL_CALLS]{name}[ARGS]", "", "", "")
        elif self._syntax == "mistral" and "[TOOL_CALLS] [" in template:
            self._around = self._around._replace(begin="[TOOL_CALLS] [")

    def turn(self, functions: Sequence[Any], one_call: bool) -> str:
        """The grammar of a turn."""
        around = self._around
        self.rules += [f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}"]
        self.rules += [f"call{i}: {self._call(each)}" for i, each in enumerate(functions)]
        more = "" if one_call else f" ({self.literal(around.between)} call)*"
        end = self._format.ends.calls
        end = "" if end == self._format.tokenizer.eos_token else end
        start = f"{self.literal(around.begin)} call{more} {self.literal(around.end + end)}"
        return "\n".join([f"start: {start}", *self.rules])

    def literal(self, text: str) -> str:
        """A text; special tokens in it by their numbers."""
        parts = re.split(f"({'|'.join(map(re.escape, self._special))})", text) if text else []
        return " ".join(
            f"<[{self._format.encode(part)[-1]}]>" if part in self._special
            else json.dumps(part, ensure_ascii=False) for part in parts if part
        )  # fmt: skip

    def text_until(self, end: str) -> str:
        """Any text, and `end`."""
        if any(special in end for special in self._special):
            return f"/(?s:.*)/ {self.literal(end)}"
        return self._rule("/(?s:.*)/", f"[suffix={json.dumps(end)}]")

    def _rule(self, rule: str, attributes: str = "") -> str:
        """The name of a rule."""
        self.rules.append(f"rule{len(self.rules)}{attributes}: {rule}")
        return f"rule{len(self.rules) - 1}"

    def _call(self, function: Any) -> str:
        schema, around = function.parameters or _NO_PARAMETERS, self._around
        name = function.name if around.keys else self._name(function.name)
        open_, close = (self.literal(each.format(name=name)) for each in around[1:3])
        if around.keys is not None:
            name_key, arguments = around.keys
            body = _json({
                "type": "object", "additionalProperties": False, "required": [*around.keys],
                # With an id of its own it is where its references, as `#/$defs/x`, are looked up.
                "properties": {**_IDS.get(f"before {self._syntax}", {}),
                               name_key: {"const": function.name},
                               arguments: {"$id": "urn:parameters", **schema},
                               **_IDS.get(f"behind {self._syntax}", {})},
            })  # fmt: skip
        elif self._syntax in _ARGUMENTS:
            body = self._arguments(schema, schema)
        else:
            body = _json(schema)
        return f"{open_} {body} {close}"

    def _name(self, name: str) -> str:
        is_word = self._syntax == "pythonic" and any(map(keyword.iskeyword, name.split(".")))
        is_name = re.fullmatch(_NAMES.get(self._syntax, r"[\w.-]+"), name)
        refuse(is_word or not is_name, f"tools: {name[:MAX_TOLD]!r} must be a name that calls of "
               f"the model's chat template ({self._syntax}) can have.", "tools")  # fmt: skip
        return name

    def _arguments(self, root: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        """Arguments one by one: those that are required, then any of the others in their order."""
        open_, close, between = _ARGUMENTS[self._syntax]
        comma, found = self.literal(between), {}
        for name, kind in (schema.get("properties") or {}).items():
            begin = self.literal(open_.format(name=self._name(name)))
            found[name] = self._rule(f"{begin} {self._value(root, kind, close)}")
        needed = [rule for name, rule in found.items() if name in (schema.get("required") or ())]
        others = [rule for rule in found.values() if rule not in needed]

        def optional(rules: Sequence[str]) -> str:
            return " ".join(f"({comma} {rule})?" for rule in rules)

        if needed:
            return f" {comma} ".join(needed) + f" {optional(others)}"
        chains = (f"{rule} {optional(others[i + 1 :])}" for i, rule in enumerate(others))
        return f"({' | '.join(chains)})?" if others else ""

    def _value(self, root: Mapping[str, Any], kind: Any, close: str) -> str:
        """A value, and what follows it."""
        kind = _resolved(root, kind)
        if self._syntax == "gemma4":
            return self._gemma(root, kind)
        if self._syntax == "pythonic" or not _takes_text(kind):
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            return f"{_json({**shared, **kind})} {self.literal(close)}"
        if "enum" not in kind:
            return self.text_until(close.strip()) + (' "\\n"' if close.endswith("\n") else "")
        each = (v if isinstance(v, str) else json.dumps(v) for v in kind["enum"])
        return f"({' | '.join(map(self.literal, each))}) {self.literal(close)}"

    def _gemma(self, root: Mapping[str, Any], kind: Any) -> str:
        """A value as Gemma 4 writes it: JSON without quotes around keys, and with marks of its own
        around texts. Its schema may refer to itself."""
        ref = kind.get("$ref") if isinstance(kind, Mapping) else None
        if ref is not None:
            if ref not in self._references:
                self._references[ref] = f"of{len(self._references)}"
                rule = self._gemma(root, _resolved(root, kind))
                self.rules.append(f"{self._references[ref]}: {rule}")
            return self._references[ref]
        kind = _resolved(root, kind)
        if "enum" in kind:
            each = (
                f"{_GEMMA_MARK}{value}{_GEMMA_MARK}" if isinstance(value, str)
                else json.dumps(value) for value in kind["enum"]
            )  # fmt: skip
            return f"({' | '.join(map(self.literal, each))})"
        types = kind.get("type")
        united = kind.get("anyOf") or kind.get("oneOf") or isinstance(types, list) and [
            {**kind, "type": each} for each in types
        ]  # fmt: skip
        if united:
            return f"({' | '.join(self._gemma(root, each) for each in united)})"
        if types == "string":
            return f"{self.literal(_GEMMA_MARK)} {self.text_until(_GEMMA_MARK)}"
        if types in _SCALARS:
            return _json(kind)
        if types == "array" and "items" in kind:
            item = self._rule(self._gemma(root, kind["items"]))
            return f'"[" ({item} ("," {item})*)? "]"'
        if types == "object" and kind.get("properties"):
            return f'"{{" {self._arguments(root, kind)} "}}"'
        if "" not in self._references:  # rules of values that no schema describes
            self._references[""] = "any"
            text = self._gemma(root, {"type": "string"})
            self.rules += [
                f"any: {text} | {_json({'type': list(_SCALARS)})} | list | object",
                'list: "[" (any ("," any)*)? "]"',
                'object: "{" (pair ("," pair)*)? "}"',
                'pair: /[\\w.-]+/ ":" any',
            ]
        return {"array": "list", "object": "object"}.get(types, "any")


def _json(schema: Any) -> str:
    return f"%json {json.dumps(with_single_spaces(schema))}"


def _resolved(root: Mapping[str, Any], kind: Any) -> Any:
    """A part of a schema, where it refers to another part: that one; `const` as `enum`."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(kind, Mapping) or not str(kind.get("$ref", "")).startswith("#/"):
            break
        found: Any = root
        for name in kind["$ref"][2:].split("/"):
            found = found.get(name, {}) if isinstance(found, Mapping) else {}
        kind = found
    if not isinstance(kind, Mapping):
        return {}
    return {**kind, "enum": [kind["const"]]} if "const" in kind else kind


def _takes_text(kind: Any) -> bool:
    """Whether a value may be a text, which is then written without quotes."""
    if not isinstance(kind, Mapping):
        return False
    if "enum" in kind:
        return any(isinstance(value, str) for value in kind["enum"])
    united = [*(kind.get("anyOf") or ()), *(kind.get("oneOf") or ())]
    return "string" in (kind.get("type") or ()) or any(map(_takes_text, united))
