"""Tools of MCP servers: each server is one connection, kept as long as the environment lives.

env_config: {mcp_servers: [{command: my-server, args: [--quiet]}, "http://localhost:8000/mcp"]}
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rllib_llm.envs.tools.toolbox import ToolError

_CONNECT_SECONDS = 30.0


class MCPTool:
    """One tool of a server."""

    def __init__(self, client: Any, listed: Any) -> None:
        self.name = str(listed.name)
        self.schema = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": listed.description or "",
                "parameters": dict(listed.input_schema),
            },
        }
        self._client = client

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        """The texts of the result.

        Raises:
            RuntimeError: the server says that the call failed.
        """
        result = await self._client.call_tool(self.name, dict(arguments))
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
    """

    def __init__(self, servers: Sequence[Any]) -> None:
        self._servers = list(servers)
        self._tasks: list[asyncio.Task] = []
        self._stop: asyncio.Event | None = None

    async def connect(self) -> list[MCPTool]:
        """The tools of all servers.

        Raises:
            ToolError: one cannot be reached.
        """
        self._stop = asyncio.Event()
        tools: list[MCPTool] = []
        for server in self._servers:
            ready: asyncio.Future[list[MCPTool]] = asyncio.get_running_loop().create_future()
            self._tasks.append(asyncio.ensure_future(self._hold(server, ready)))
            try:
                tools += await asyncio.wait_for(ready, _CONNECT_SECONDS)
            except Exception as error:  # noqa: BLE001  (whatever the server or its transport raises)
                await self.close()
                raise ToolError(
                    f"mcp_servers={server!r} must be reachable: {type(error).__name__}: {error}. "
                    "Start the server, or correct the command."
                ) from error
        return tools

    async def _hold(self, server: Any, ready: asyncio.Future) -> None:
        """Opens a connection and closes it in the same task, as the client demands."""
        assert self._stop is not None
        try:
            from mcp import Client

            async with Client(_address(server)) as client:
                listed = await client.list_tools()
                ready.set_result([MCPTool(client, tool) for tool in listed.tools])
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001  (the task's border: whoever connects gets it)
            if not ready.done():
                ready.set_exception(error)

    async def close(self) -> None:
        """Ends all connections, and the programs that were started for them."""
        if self._stop is not None:
            self._stop.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _address(server: Any) -> Any:
    """What `mcp.Client` is given for a server."""
    if not isinstance(server, Mapping):
        return server
    from mcp import StdioServerParameters

    return StdioServerParameters(**server)
