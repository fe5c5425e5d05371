"""Tools that a policy may call: typed Python functions, Python programs in a sandbox, search in a
folder of texts, MCP servers; their schemas, and calls that may fail.

A function's schema comes from its signature and docstring, as transformers reads them. Whatever a
tool does (raise, hang, return a megabyte or something that is no text), the conversation gets a
message about it, or the rollout is not valid, as set; nothing else is touched. An MCP server that
is away (it died, restarts, or answers nothing any more) is not the policy's fault: a call waits for
it so long, and then the rollout is not valid.

    env_config: {mcp_servers: [{command: my-server, args: [--quiet]}, "http://localhost:8000/mcp"]}
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

from transformers.utils import get_json_schema

from rllib_llm.conversations.json_values import objection
from rllib_llm.conversations.tool_calls import ToolCall
from rllib_llm.data.files import text_of
from rllib_llm.envs.judges.reward_functions import copied
from rllib_llm.envs.sandbox import Contained
from rllib_llm.envs.sandbox_backends import Sandbox
from rllib_llm.shared.arguments import Count, Seconds, checked
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.messages import blamed_on, told
from rllib_llm.shared.remote import Away, Late, Outage, backoff_seconds, call, ended, within

_SHOWN = 200  # characters of an error
_ALARMS = ("SIGALRM", "setitimer", "alarm")
_NO_SIGNALS = "signal only works in main thread"
_STATUS_MESSAGES = {
    "truncated": "the call has no end: nothing closes it",
    "invalid_json": "the call is not valid JSON",
    "missing_name": "the call does not name a tool",
    "unknown_tool": "the call names no tool, but an empty text",
    "invalid_arguments": "its arguments cannot be read",
    "too_many_calls": "a turn may hold no more calls; make this one in your next turn",
}


class PolicyTool(Protocol):
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
        Problems: it lacks type hints or a docstring that says what its arguments are.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self.schema: Mapping[str, Any] = get_json_schema(function)
        except Exception as error:  # noqa: BLE001  (also of a hint that names nothing)
            raise Problems(
                f"tool {getattr(function, '__name__', function)!r}",
                "have type hints and a Google-style docstring with Args", error,
            ) from error  # fmt: skip
        self.name = str(self.schema["function"]["name"])
        self.function = function
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
        parameters = inspect.signature(function).parameters.values()
        nameless = [p.name for p in parameters if p.kind in kinds]
        yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        alarm = _alarm_in(function)
        for is_wrong, rule, reason in (
            (nameless, f"take {nameless} by name", "a call names its arguments"),
            (yields, "return its result", "it yields"),
            (alarm, f"not use {alarm!r}", "tools run beside the main thread; set tool_timeout_s"),
        ):  # fmt: skip
            require(not is_wrong, f"tool {self.name!r}", ..., rule, reason)

    def objection(self, arguments: Mapping[str, Any]) -> str:
        """Why these arguments do not suit it; "" where they do."""
        reason = objection(self.schema["function"].get("parameters") or {}, arguments)
        if not reason:  # its schema may take what it does not
            try:
                inspect.signature(self.function).bind(**arguments)
            except TypeError as error:
                return str(error)
        return reason

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
    """The tools of a conversation: functions, dotted paths, or objects with `name`, `schema` and
    `run`. `timeout_s`: of one call, of tools that have no limit of their own. `max_chars`: of a
    result; a longer one keeps its beginning and its end.

    Raises:
        Problems: two of one name, or a function that cannot be a tool.
    """

    def __init__(
        self, tools: Sequence[Any] = (), *, timeout_s: float = 10.0, max_chars: int = 4000
    ) -> None:
        made = [as_tool(tool) for tool in tools]
        self.tools: dict[str, PolicyTool] = {tool.name: tool for tool in made}
        require(len(self.tools) >= len(made), "tools", [tool.name for tool in made],
                "have names of their own")  # fmt: skip
        self.timeout_s, self.max_chars = timeout_s, max_chars

    def of(self, functions: Sequence[Callable[..., Any]]) -> Toolbox:
        """The same tools with one conversation's own functions."""
        own = copy.copy(self)
        own.tools = dict(self.tools)
        for function in functions:
            known = self.tools.get(function.__name__)
            if not isinstance(known, FunctionTool):
                rule = f"be one of those that tools() returns, {sorted(self.tools)}"
                raise Problems(f"tool {function.__name__!r}", rule)
            tool = own.tools[known.name] = copy.copy(known)
            tool.function = function
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
            result = await within(limit, tool.run(copied(asked.arguments)))
            text, failure, half = as_text(result), "", self.max_chars // 2
            if len(text) > self.max_chars:
                begin, end = text[:half], text[len(text) - half :]
                text = f"{begin}\n[{len(text) - 2 * half} characters left out]\n{end}"
        except Exception as error:  # noqa: BLE001  (of a user's tool: the policy reads it)
            late = (TimeoutError, asyncio.TimeoutError)  # noqa: UP041  (another class in Python 3.10)
            is_signal = isinstance(error, ValueError) and _NO_SIGNALS in told(error)
            failure = "unavailable" if is_signal or isinstance(error, Away) else "error"
            failure = "timeout" if isinstance(error, late) else failure  # of either limit
            shown = None if failure == "unavailable" else _SHOWN  # the policy does not read it
            text = f"Error: {told(error)[:shown]}"
        return ToolResult(text, failure, time.perf_counter() - start)

    def _refusal(self, asked: ToolCall) -> str:
        """Why a call is not run; "" where it is."""
        if asked.name and asked.name not in self.tools:
            return f"there is no tool {asked.name!r}, but {sorted(self.tools)}"
        if asked.status != "ok":
            return _STATUS_MESSAGES.get(asked.status, asked.status)
        tool, arguments = self.tools[asked.name], dict(asked.arguments or {})
        if isinstance(tool, FunctionTool):
            reason = tool.objection(arguments)
        else:
            reason = objection(tool.schema["function"].get("parameters") or {}, arguments)
        return reason and f"arguments of {asked.name!r}: {reason:.{_SHOWN}}"


def as_tool(given: Any) -> PolicyTool:
    """The tool of a function, a dotted path, or an object that is one already."""
    if isinstance(given, str):
        given = import_dotted(given, name="tools")
    if inspect.isclass(given):
        with blamed_on("tools", given, "be made without arguments"):
            given = given()
    if all(hasattr(given, name) for name in ("name", "schema", "run")):
        schema = given.schema if isinstance(given.schema, Mapping) else {}
        described = schema.get("function")
        require(
            isinstance(described, Mapping) and described.get("name") == given.name, "tools", given,
            f"have a schema {{'type': 'function', 'function': {{'name': {given.name!r}, ...}}}}",
            f"it has {given.schema!r}", "Make it with rllib_llm.envs.tools.tool_schema",
        )  # fmt: skip
        return given
    require(callable(given), "tools", given,
            "be functions, their dotted paths, or objects with name, schema and run")  # fmt: skip
    return FunctionTool(given)


def as_text(result: Any) -> str:
    """A tool's result as text: itself, JSON, or at worst what `str` makes of it."""
    if isinstance(result, bytes):
        return result.decode("utf-8", errors="replace")
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # keys that JSON has not, an object that holds itself
        return str(result)


def _alarm_in(function: Callable[..., Any]) -> str:
    """Signal alarms used by a function, directly or in functions that it wraps or calls; "" for
    none."""
    first = inspect.unwrap(function)
    first = getattr(first, "__func__", first)
    held = [cell.cell_contents for cell in getattr(first, "__closure__", None) or ()]
    code = getattr(first, "__code__", None)
    called = [first.__globals__.get(name) for name in code.co_names] if code else []
    for one in map(inspect.unwrap, filter(callable, (first, *held, *called))):
        names = _names_in(one.__code__) if inspect.isfunction(one) else set()
        if found := sorted(names.intersection(_ALARMS)):
            return found[0]
    return ""


def _names_in(code: CodeType) -> set[str]:
    """Names that a function's code and functions within it use."""
    within = [_names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*within)


@checked
class PythonTool:
    """A tool `python(code)`: a program in a sandbox with limits of time, memory, files and output,
    and no network.

    Args:
        timeout_s: of the program, from when it is started; a program that waits for a place among
            `max_processes` is not late.
        memory_mb: of its address space.
        max_output: bytes of what it prints that are read.
        name: of the tool.
        max_processes: that run at the same time in this process; None: as many as there are cores.
        sandbox: further fields of `Sandbox`.
    """

    def __init__(
        self, *, timeout_s: Seconds = 5.0, memory_mb: Count = 512, max_output: Count = 20_000,
        name: str = "python", max_processes: Count | None = None, **sandbox: Any,
    ) -> None:  # fmt: skip
        self.timeout_s, self.max_output, self.name = timeout_s, max_output, name
        limits = {"num_files": 64, "file_mb": 16, "num_processes": 64, **sandbox}
        self._sandbox = Sandbox(memory_mb=memory_mb, cpu_s=math.ceil(timeout_s) + 1, **limits)
        self._places = threading.BoundedSemaphore(max_processes or os.cpu_count() or 1)
        code = text_parameter("code", "the program; print() what you want to see")
        description = "Runs a Python program and returns what it prints."
        self.schema = tool_schema(name, description, code)

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """The program's output, including errors.

        Raises:
            Late: it did not end in time; it and what it started are ended.
        """
        return str(await call(self._run, str(arguments["code"])))

    def _run(self, code: str) -> str:
        order, files = {"mode": "program", "program": "program.py"}, {"program.py": code}
        with self._places, Contained(self._sandbox, order, files=files) as program:
            late = f"the program did not end within {self.timeout_s:g} s"
            printed = program.read(self.timeout_s, late, most=self.max_output)
            exit_code = program.end()
        text = printed.decode("utf-8", errors="replace")
        if len(printed) == self.max_output:
            return f"{text}\n[only the first {self.max_output} bytes]"
        if exit_code:
            return f"{text}\n[exit code {exit_code}]".strip()
        return text.strip() or "[no output]"


_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75  # Robertson & Zaragoza 2009, section 3: usual values
_SUFFIXES = (".txt", ".md")


@checked
class SearchTool:
    """A tool `search(query)` over passages, the paragraphs of the texts in a folder, ranked as BM25
    does.

    Args:
        folder: with .txt or .md files of UTF-8, whose titles are their paths in it without the
            suffix; or {title: text}.
        num_results: passages in an answer.
        max_chars: of a passage.
        name: of the tool.

    Raises:
        Problems: no text there, or a file in another encoding.
    """

    def __init__(
        self, folder: str | Path | Mapping[str, str], *, num_results: Count = 3,
        max_chars: Count = 500, name: str = "search",
    ) -> None:  # fmt: skip
        texts = dict(folder) if isinstance(folder, Mapping) else {}
        if not isinstance(folder, Mapping):
            root = Path(folder)
            for path in sorted(p for p in root.rglob("*") if p.suffix in _SUFFIXES and p.is_file()):
                texts[path.relative_to(root).with_suffix("").as_posix()] = text_of(path)
        parts = [(title, part) for title in texts for part in re.split(r"\n\s*\n", texts[title])]
        self.passages = [(title, part.strip()) for title, part in parts if part.strip()]
        require(self.passages, "folder", str(folder)[:80], f"hold texts, {_SUFFIXES}")
        self.num_results, self.max_chars, self.name = num_results, max_chars, name
        self._counts = [Counter(_WORD.findall(" ".join(part).lower())) for part in self.passages]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean = sum(self._lengths) / len(self._lengths)
        self._places: dict[str, list[int]] = {}  # of the passages that hold a word
        for place, counts in enumerate(self._counts):
            for word in counts:
                self._places.setdefault(word, []).append(place)
        query = text_parameter("query", "words to look for")
        self.schema = tool_schema(name, "Finds passages about the words of a query.", query)

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """The best passages, best first, or that there is none."""
        found = self.search(str(arguments["query"]))
        if not found:
            return "Nothing found."
        return "\n\n".join(f"{title}: {text[: self.max_chars]}" for title, text in found)

    def search(self, query: str) -> list[tuple[str, str]]:
        """(title, passage) of the passages that match best, those of no common word left out."""
        words = _WORD.findall(query.lower())
        places = {place for word in words for place in self._places.get(word, ())}
        scored = [(self._score(words, place), -place) for place in places]
        best = sorted(scored, reverse=True)[: self.num_results]
        return [self.passages[-place] for _, place in best]

    def _score(self, words: list[str], i: int) -> float:
        counts, total = self._counts[i], len(self.passages)
        norm = _K1 * (1 - _B + _B * self._lengths[i] / self._mean)
        score = 0.0
        for word in words:
            if count := counts.get(word, 0):
                holding = len(self._places[word])
                rarity = math.log(1 + (total - holding + 0.5) / (holding + 0.5))
                score += rarity * count * (_K1 + 1) / (count + norm)
        return score


_PROBE_SECONDS = 5.0  # that a server has to show that it is there
_CLOSE_SECONDS = 8.0  # that a connection has to end, and the program behind it: mcp needs 6.5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 60.0  # seconds between attempts to connect
_MOST_PAGES = 1000


class MCPTool:
    """One tool of a server, as the server lists it. Its limit begins when the server is there."""

    def __init__(self, server: _Server, listed: Any, timeout_s: float) -> None:
        self.name, self.timeout_s = str(listed.name), timeout_s
        self.schema = tool_schema(self.name, listed.description or "", listed.input_schema)
        self._server = server

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        """The texts of the result; RuntimeError: the server says that the call failed, Late: it is
        there, and gave no result in time, Away: it is away."""
        result = await self._server.call(self.name, dict(arguments), self.timeout_s)
        parts = [getattr(p, "resource", p) for p in result.content]  # one may lie within
        texts = [getattr(p, "text", f"[{getattr(p, 'type', 'resource')}]") for p in parts]
        text = "\n".join(texts) or as_text(result.structured_content or "")
        if result.is_error:
            raise RuntimeError(text or "the server reported an error without a word")
        return text


class MCPServers:
    """Connections to servers: {command, args, env} of programs that speak over stdin, URLs,
    or objects that `mcp.Client` takes. `timeout_s`: of one call. `connect_s`: of an attempt to
    connect, and that a call waits for a server that is away."""

    def __init__(
        self, servers: Sequence[Any], *, timeout_s: float = 10.0, connect_s: float = 30.0
    ) -> None:
        self._servers = [_Server(server, connect_s) for server in servers]
        self._timeout_s = timeout_s

    async def connect(self) -> list[MCPTool]:
        """Connects to all servers; returns their tools."""
        try:
            opened = [(server, await server.open()) for server in self._servers]
            return [MCPTool(s, each, self._timeout_s) for s, listed in opened for each in listed]
        except Problems:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends all connections, and the programs that were started for them."""
        await asyncio.gather(*(server.close() for server in self._servers))


async def _listed_by(client: Any) -> list[Any]:
    """The tools of an MCP server, all pages of its list."""
    listed, cursor = [], None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return listed
    raise RuntimeError(f"its list of tools has more than {_MOST_PAGES} pages")


class _Server:
    """One server, and whatever connection to it there is."""

    def __init__(self, address: Any, connect_s: float) -> None:
        self._address, self._connect_s = address, connect_s
        self._names: frozenset[str] = frozenset()  # of the tools in the prompt
        self._client: Any = None
        self._error = ""
        self._keeper: asyncio.Task | None = None
        self._holding: asyncio.Task | None = None
        meanwhile = "Rollouts that call it are not valid until it is back."
        self._outage = Outage(f"mcp_servers={address!r}", meanwhile=meanwhile)

    async def open(self) -> list[Any]:
        """Its tools as it lists them; from now on the connection is kept."""
        self._here, self._lost = asyncio.Event(), asyncio.Event()
        first: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.ensure_future(self._keep(first))
        try:
            listed = await first
        except Exception as error:  # noqa: BLE001  (whatever the server or its transport raises)
            rule = "be reachable"
            raise Problems("mcp_servers", rule, told(error), value=self._address) from error
        self._names = frozenset(str(tool.name) for tool in listed)
        return listed

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """The tool's result; raises as `MCPTool.run`."""
        if self._client is None:
            try:
                await within(self._connect_s, self._here.wait())
            except Late:
                raise Away(f"the MCP server is away: {self._error}") from None
        client = self._client
        try:
            return await within(timeout_s, client.call_tool(name, arguments))
        except Late:
            if await self._answers(client):
                raise
            self._lose(client, f"it has answered nothing for {timeout_s:g} s")
        except Exception as error:  # noqa: BLE001  (as above)
            if _is_answer(error) and await self._answers(client):
                raise RuntimeError(str(error)) from error
            self._lose(client, told(error))
        raise Away(f"the MCP server went away: {self._error}")

    async def close(self) -> None:
        """Ends the connection."""
        if self._keeper is not None:
            await ended(self._keeper, _CLOSE_SECONDS + 1)
        if self._holding is not None:  # a keeper that was about to end it waits no more
            await asyncio.wait({self._holding}, timeout=_CLOSE_SECONDS)

    async def _answers(self, client: Any) -> bool:
        """Whether the server is there: it lists its tools."""
        try:
            await within(_PROBE_SECONDS, client.list_tools(cache_mode="refresh"))
        except Exception:  # noqa: BLE001  (as above)
            return False
        return True

    def _lose(self, client: Any, why: str) -> None:
        if client is self._client:  # else another call has found it out
            self._client, self._error = None, why
            self._here.clear()
            self._lost.set()

    async def _keep(self, first: asyncio.Future[list[Any]]) -> None:
        """Keeps a connection open and reconnects with backoff."""
        attempt = 0
        while True:
            opened: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
            self._lost = asyncio.Event()
            self._holding = asyncio.ensure_future(self._hold(opened))
            late = f"it did not answer within {self._connect_s:g} s"
            failed: Exception | None = None
            try:
                listed = await within(self._connect_s, opened, late)
                if not first.done():
                    first.set_result(listed)
                self._outage.end()
                await self._lost.wait()
            except Exception as error:  # noqa: BLE001  (as above)
                failed, self._error = error, told(error)
            finally:
                self._client = None
                self._here.clear()
                await ended(self._holding, _CLOSE_SECONDS)
            if failed is not None and not first.done():
                first.set_exception(failed)
                return
            attempt = 0 if failed is None else attempt + 1
            self._outage.waits(self._error)
            pause = backoff_seconds(attempt, random.uniform, _FIRST_PAUSE, _LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _hold(self, opened: asyncio.Future[list[Any]]) -> None:
        """Opens a connection and closes it in the same task, as the client demands."""
        try:
            from mcp import Client, StdioServerParameters, stdio_client

            address = self._address
            if isinstance(address, Mapping):  # mcp 2.0 takes no parameters alone
                address = stdio_client(StdioServerParameters(**address))
            async with Client(address) as client:
                listed = await _listed_by(client)
                gone = self._names - {str(tool.name) for tool in listed}
                if gone:
                    raise RuntimeError(f"it has no tools {sorted(gone)} any more")
                if not opened.done():
                    self._client = client
                    self._here.set()
                    opened.set_result(listed)
                    await self._lost.wait()
        except Exception as error:  # noqa: BLE001  (the task's border: the caller gets it)
            if not opened.done():
                opened.set_exception(error)


def _is_answer(error: Exception) -> bool:
    """Whether an error is the server's answer, rather than a closed connection, whose code, -32000,
    applications use for errors of their own."""
    from mcp.shared.exceptions import MCPError

    return isinstance(error, MCPError) and error.error.message != "Connection closed"
