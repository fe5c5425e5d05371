"""Tools of MCP servers: one connection to each, opened again when it is lost.

    env_config: {mcp_servers: [{command: my-server, args: [--quiet]}, "http://localhost:8000/mcp"]}

A server that is away (it died, restarts, or answers nothing any more) is no doing of the policy: a
call waits for it so long, and then the rollout is not valid.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rllib_llm.envs.tools import ToolError, tool_schema
from rllib_llm.shared.remote import Away, Late, Outage, backoff_seconds, ended, told, within

_PROBE_SECONDS = 5.0  # that a server has to show that it is there
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 60.0  # seconds between attempts to connect
_MOST_PAGES = 1000


class MCPTool:
    """One tool of a server. Its limit begins when the server is there.

    Args:
        server: that has it.
        listed: as the server lists it.
        timeout_s: of a call.
    """

    def __init__(self, server: _Server, listed: Any, timeout_s: float) -> None:
        self.name, self.timeout_s = str(listed.name), timeout_s
        self.schema = tool_schema(self.name, listed.description or "", listed.input_schema)
        self._server = server

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        """The texts of the result.

        Raises:
            RuntimeError: the server says that the call failed.
            TimeoutError: the server is there, and gave no result in time.
            Away: the server is away.
        """
        result = await self._server.call(self.name, dict(arguments), self.timeout_s)
        parts = [getattr(part, "text", f"[{part.type}]") for part in result.content]
        text = "\n".join(parts)
        if result.is_error:
            raise RuntimeError(text or "the server reported an error without a word")
        return text


class MCPServers:
    """Connections to servers.

    Args:
        servers: {command, args, env} of a program that speaks over its standard input, a URL, or an
            object that `mcp.Client` takes.
        timeout_s: of one call.
        connect_s: of an attempt to connect, and that a call waits for a server that is away.
    """

    def __init__(
        self, servers: Sequence[Any], *, timeout_s: float = 10.0, connect_s: float = 30.0
    ) -> None:
        self._servers = [_Server(server, connect_s) for server in servers]
        self._timeout_s = timeout_s

    async def connect(self) -> list[MCPTool]:
        """Connects to all servers; returns their tools.

        Raises:
            ToolError: one cannot be reached.
        """
        try:
            return [
                MCPTool(server, listed, self._timeout_s)
                for server in self._servers
                for listed in await server.open()
            ]
        except ToolError:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends all connections, and the programs that were started for them."""
        await asyncio.gather(*(server.close() for server in self._servers))


class _Server:
    """One server, and whatever connection to it there is."""

    def __init__(self, address: Any, connect_s: float) -> None:
        self._address, self._connect_s = address, connect_s
        self._names: frozenset[str] = frozenset()  # of the tools in the prompt
        self._client: Any = None
        self._error = ""
        self._keeper: asyncio.Task | None = None
        self._outage = Outage(
            f"mcp_servers={address!r}",
            meanwhile="Rollouts that call it are not valid until it is back.",
        )

    async def open(self) -> list[Any]:
        """Its tools as it lists them; from now on the connection is kept."""
        self._here, self._lost = asyncio.Event(), asyncio.Event()
        first: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.ensure_future(self._keep(first))
        try:
            listed = await first
        except Exception as error:  # noqa: BLE001  (whatever the server or its transport raises)
            raise ToolError(
                f"mcp_servers={self._address!r} must be reachable: {told(error)}. Start the "
                "server, or correct the command."
            ) from error
        self._names = frozenset(str(tool.name) for tool in listed)
        return listed

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """The tool's result; raises as `MCPTool.run`."""
        client = await self._connected()
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
            await ended(self._keeper)

    async def _connected(self) -> Any:
        """The client, when there is one."""
        if self._client is None:
            try:
                await within(self._connect_s, self._here.wait())
            except Late:
                raise Away(f"the MCP server is away: {self._error}") from None
        return self._client

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
            holding = asyncio.ensure_future(self._hold(opened))
            try:
                await asyncio.wait({opened}, timeout=self._connect_s)
                if not opened.done():
                    opened.set_exception(
                        TimeoutError(f"it did not answer within {self._connect_s:g} s")
                    )
                if error := opened.exception():
                    self._error = told(error)
                    if not first.done():
                        first.set_exception(error)
                        return
                    attempt += 1
                else:
                    if not first.done():
                        first.set_result(opened.result())
                    self._outage.end()
                    attempt = 0
                    await self._lost.wait()
            finally:
                self._client = None
                self._here.clear()
                await ended(holding)
            self._outage.waits(self._error)
            await asyncio.sleep(
                backoff_seconds(attempt, random.uniform, _FIRST_PAUSE, _LONGEST_PAUSE)
            )

    async def _hold(self, opened: asyncio.Future[list[Any]]) -> None:
        """Opens a connection and closes it in the same task, as the client demands."""
        try:
            from mcp import Client

            async with Client(_for_client(self._address)) as client:
                listed = await _listed_by(client)
                gone = self._names - {str(tool.name) for tool in listed}
                if gone:
                    raise ToolError(f"it has no tools {sorted(gone)} any more")
                if not opened.done():
                    self._client = client
                    self._here.set()
                    opened.set_result(listed)
                    await self._lost.wait()
        except Exception as error:  # noqa: BLE001  (the task's border: the caller gets it)
            if not opened.done():
                opened.set_exception(error)


async def _listed_by(client: Any) -> list[Any]:
    """A server's tools, from all pages of its list."""
    listed: list[Any] = []
    cursor = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return listed
    raise ToolError(f"its list of tools does not end within {_MOST_PAGES} pages")


def _is_answer(error: Exception) -> bool:
    """Whether an error is the server's answer, rather than a closed connection."""
    from mcp.shared.exceptions import MCPError
    from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

    return isinstance(error, MCPError) and error.error.code not in (
        CONNECTION_CLOSED, REQUEST_TIMEOUT
    )  # fmt: skip


def _for_client(server: Any) -> Any:
    """A server's settings as an argument of `mcp.Client`."""
    if not isinstance(server, Mapping):
        return server
    from mcp import StdioServerParameters, stdio_client

    return stdio_client(StdioServerParameters(**server))  # mcp 2.0 takes no parameters alone
