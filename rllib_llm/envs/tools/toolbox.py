"""Tools that a policy may call: typed Python functions, their schemas, and calls that may fail.

The schema comes from the function's signature and docstring, as transformers reads them. Whatever a
tool does (raise, hang, return a megabyte or something that is no text), the conversation gets a
message about it, or the rollout is not valid, as set; nothing else is touched.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import jsonschema
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
)

from rllib_llm.conversations.tool_calls import ToolCall
from rllib_llm.envs.event_loop import call, told
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.elsewhere import Away

ERRORS = ("message", "invalid")
_SHOWN = 200  # characters of an error
_ALARMS = ("SIGALRM", "setitimer", "alarm")
_NO_SIGNALS = "signal only works in main thread"
_STATUS_MESSAGES = {
    "truncated": "the call was cut off before its end",
    "invalid_json": "the call is not valid JSON",
    "missing_name": "the call does not name a tool",
    "invalid_arguments": "the arguments must be a JSON object",
    "too_many_calls": "a turn may hold no more calls; make this one in your next turn",
}


class ToolError(ValueError):
    """A function that cannot be a tool, or a wrong setting of tools."""


class Tool(Protocol):
    """A tool that a policy can call. With a `timeout_s` it enforces that limit itself. One that
    raises `Away` is unavailable, and the rollout is invalid."""

    name: str
    schema: Mapping[str, Any]
    """JSON schema as chat templates and OpenAI's interface take it."""

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        """The result, any JSON value or object with a text; raises what went wrong."""


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The tool's description for the model; `parameters`: JSON schema of its arguments."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def text_parameter(name: str, description: str) -> dict[str, Any]:
    """The JSON schema of one parameter, a text."""
    text = {"type": "string", "description": description}
    return {"type": "object", "properties": {name: text}, "required": [name]}


class FunctionTool:
    """A Python function, plain or async; a plain one is run in a thread.

    Raises:
        ToolError: it lacks type hints or a docstring that says what its arguments are.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self.schema: Mapping[str, Any] = get_json_schema(function)
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ToolError(
                f"tool {getattr(function, '__name__', function)!r} must have type hints and a "
                f"Google-style docstring with Args: the model is told from them what to call. "
                f"{error}"
            ) from error
        self.name = str(self.schema["function"]["name"])
        self.function = function
        if alarm := _alarm_in(function):
            raise ToolError(
                f"tool {self.name!r} must not use {alarm!r}: it wants the main thread, and tools "
                "run beside it, many at once. Leave the limit to tool_timeout_s."
            )

    def with_function(self, function: Callable[..., Any]) -> FunctionTool:
        """The tool with another function behind the same name and schema."""
        tool = copy.copy(self)
        tool.function = function
        return tool

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        """The function's result for these arguments."""
        return await call(self.function, **arguments)


@dataclass(frozen=True)
class ToolResult:
    """The result of a call: the text for the policy, and the error if there was one.

    failure: "" | "error" | "timeout" | "unavailable" | the call's status.
    """

    text: str
    failure: str = ""
    seconds: float = 0.0


class Toolbox:
    """The tools of a conversation.

    Args:
        tools: functions, dotted paths, or objects with `name`, `schema` and `run`.
        timeout_s: of one call, of tools that have no limit of their own.
        max_chars: of a result; a longer one keeps its beginning and its end.

    Raises:
        ToolError: two of one name, or a function that cannot be a tool.
    """

    def __init__(
        self, tools: Sequence[Any] = (), *, timeout_s: float = 10.0, max_chars: int = 4000
    ) -> None:
        made = [as_tool(tool) for tool in tools]
        self.tools: dict[str, Tool] = {tool.name: tool for tool in made}
        if len(self.tools) < len(made):
            raise ToolError(
                f"tools={[tool.name for tool in made]!r} must have names of their own: the policy "
                "calls them by name. Rename one."
            )
        self.timeout_s, self.max_chars = timeout_s, max_chars

    def of(self, functions: Sequence[Callable[..., Any]]) -> Toolbox:
        """The same tools with one conversation's own functions.

        Raises:
            ToolError: a function that is none of the tools.
        """
        own = copy.copy(self)
        own.tools = dict(self.tools)
        for function in functions:
            known = self.tools.get(function.__name__)
            if not isinstance(known, FunctionTool):
                raise ToolError(
                    f"tool {function.__name__!r} must be one of {sorted(self.tools)}: the policy "
                    "learns of tools before a conversation begins. Return it from tools(), too."
                )
            own.tools[known.name] = known.with_function(function)
        return own

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Every tool's schema, for the chat template."""
        return [dict(tool.schema) for tool in self.tools.values()]

    async def run(self, asked: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
        """The result of one call; a call that is not complete is not run."""
        start = time.perf_counter()
        reason = self._refusal(asked)
        if reason:
            return ToolResult(
                f"Error: {reason}.", asked.status if asked.status != "ok" else "invalid_arguments"
            )
        tool = self.tools[asked.name]
        own_limit = self.timeout_s if getattr(tool, "timeout_s", None) is None else math.inf
        limit = min(own_limit, math.inf if timeout_s is None else timeout_s)
        assert asked.arguments is not None, "a complete call has arguments"
        try:
            running = tool.run(asked.arguments)
            result = await asyncio.wait_for(running, None if limit == math.inf else limit)
            text, failure = self._shortened(as_text(result)), ""
        except (TimeoutError, asyncio.TimeoutError) as error:
            said = str(error) or f"no result within {limit:g} s"
            text, failure = f"Error: {said}.", "timeout"
        except Away as error:
            text, failure = f"Error: {error}", "unavailable"
        except Exception as error:  # noqa: BLE001  (of a user's tool: the policy is told)
            is_signal = isinstance(error, ValueError) and str(error).startswith(_NO_SIGNALS)
            failure = "unavailable" if is_signal else "error"
            text = f"Error: {told(error)[:_SHOWN]}"
        return ToolResult(text, failure, time.perf_counter() - start)

    def _refusal(self, asked: ToolCall) -> str:
        """Why a call is not run; "" where it is."""
        if asked.name and asked.name not in self.tools:
            return f"there is no tool {asked.name!r}, but {sorted(self.tools)}"
        if asked.status != "ok":
            return _STATUS_MESSAGES.get(asked.status, asked.status)
        parameters = self.tools[asked.name].schema["function"].get("parameters", {})
        try:
            jsonschema.validate(dict(asked.arguments or {}), parameters)
        except jsonschema.ValidationError as error:
            return f"arguments of {asked.name!r}: {error.message[:_SHOWN]}"
        return ""

    def _shortened(self, text: str) -> str:
        if len(text) <= self.max_chars:
            return text
        half = self.max_chars // 2
        left_out = len(text) - 2 * half
        return f"{text[:half]}\n[{left_out} characters left out]\n{text[len(text) - half :]}"


def as_tool(given: Any) -> Tool:
    """The tool of a function, a dotted path, or an object that is one already."""
    if isinstance(given, str):
        given = import_dotted(given, name="tools")
    if inspect.isclass(given):
        given = given()
    if all(hasattr(given, name) for name in ("name", "schema", "run")):
        return given
    if not callable(given):
        raise ToolError(
            f"tools={given!r} must be functions, their dotted paths, or objects with name, schema "
            f"and run: it is {type(given).__name__}. Pass a function."
        )
    return FunctionTool(given)


def as_text(result: Any) -> str:
    """A tool's result as text: itself, JSON, or at worst what `str` makes of it."""
    if isinstance(result, bytes):
        return result.decode("utf-8", errors="replace")
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=str)


def _alarm_in(function: Callable[..., Any]) -> str:
    """Signal alarms used by a function, directly or in functions that it wraps or calls; "" for
    none."""
    first = inspect.unwrap(function)
    first = getattr(first, "__func__", first)
    held = [cell.cell_contents for cell in getattr(first, "__closure__", None) or ()]
    code = getattr(first, "__code__", None)
    called = [first.__globals__.get(name) for name in code.co_names] if code else []
    for one in map(inspect.unwrap, filter(callable, (first, *held, *called))):
        names = _names_in(getattr(one, "__code__", None)) if inspect.isfunction(one) else set()
        if found := sorted(names.intersection(_ALARMS)):
            return found[0]
    return ""


def _names_in(code: CodeType | None) -> set[str]:
    """Names that a function's code and functions within it use."""
    if code is None:
        return set()
    within = [_names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*within)
