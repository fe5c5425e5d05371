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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jsonschema
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
)

from rllib_llm.conversations.tool_calls import ToolCall
from rllib_llm.dotted import import_dotted
from rllib_llm.envs.event_loop import call, told

ERRORS = ("message", "invalid")
_SHOWN = 200  # characters of an error
_STATUS_MESSAGES = {
    "truncated": "the call was cut off before its end",
    "invalid_json": "the call is not valid JSON",
    "missing_name": "the call does not name a tool",
    "invalid_arguments": "the arguments must be a JSON object",
}


class ToolError(ValueError):
    """A function that cannot be a tool, or a wrong setting of tools."""


class Tool(Protocol):
    """What a policy can call."""

    name: str
    schema: Mapping[str, Any]
    """JSON schema as chat templates and OpenAI's interface take it."""

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        """The result, any JSON value or object with a text; raises what went wrong."""


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

    def with_function(self, function: Callable[..., Any]) -> FunctionTool:
        """The tool with another function behind the same name and schema."""
        tool = copy.copy(self)
        tool.function = function
        return tool

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        """What the function returns for the arguments."""
        return await call(self.function, **arguments)


@dataclass(frozen=True)
class ToolResult:
    """What became of a call: the text for the policy, and what went wrong, if anything did.

    failure: "" | "error" | "timeout" | the call's status.
    """

    text: str
    failure: str = ""
    seconds: float = 0.0


class Toolbox:
    """The tools of a conversation.

    Args:
        tools: functions, dotted paths, or objects with `name`, `schema` and `run`.
        timeout_s: of one call.
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
        """The same tools where one conversation has functions of its own behind them.

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
                    "is told of tools before a conversation begins. Return it from tools(), too."
                )
            own.tools[known.name] = known.with_function(function)
        return own

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of all tools, for the chat template."""
        return [dict(tool.schema) for tool in self.tools.values()]

    async def run(self, asked: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
        """The result of one call; a call that is not complete is not run."""
        start = time.perf_counter()
        reason = self._refusal(asked)
        if reason:
            return ToolResult(
                f"Error: {reason}.", asked.status if asked.status != "ok" else "error"
            )
        limit = self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)
        assert asked.arguments is not None, "a complete call has arguments"
        try:
            result = await asyncio.wait_for(self.tools[asked.name].run(asked.arguments), limit)
            text, failure = self._shortened(as_text(result)), ""
        except (TimeoutError, asyncio.TimeoutError):
            text, failure = f"Error: no result within {limit:g} s.", "timeout"
        except Exception as error:  # noqa: BLE001  (of a user's tool: the policy is told)
            text, failure = f"Error: {told(error)[:_SHOWN]}", "error"
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
