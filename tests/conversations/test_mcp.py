"""Tools of an MCP server, as those of Python."""

from __future__ import annotations

import sys

import pytest

from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.tools.toolbox import ToolError
from tests.conversations.scripted import roll, settings

pytest.importorskip("mcp")

SERVER = """
from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> str:
    "Adds two numbers."
    if a == 0:
        raise ValueError("nothing to add")
    return str(a + b)


server.run("stdio")
"""


def call(a):
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": 2}}}}</tool_call>'


@pytest.mark.slow  # a server in a process of its own
def test_a_server_started_by_its_command(tmp_path):
    script = tmp_path / "sums.py"
    script.write_text(SERVER)
    server = {"command": sys.executable, "args": [str(script)]}
    env = ConversationEnv(
        settings(
            mcp_servers=[server], reward_functions=lambda completions: [1.0] * len(completions)
        )
    )
    try:
        attempts, _, _ = roll(env, call(1), lambda row: call(0) if row else "3", "3")
        said = [m["content"] for m in attempts[1].conversation.messages if m["role"] == "tool"]
        assert said[0] == "3" and said[1].startswith("Error: RuntimeError: ")
    finally:
        env.close()


def test_a_server_that_is_not_there():
    with pytest.raises(ToolError, match="must be reachable"):
        ConversationEnv(settings(mcp_servers=[{"command": "no-such-program-anywhere"}]))
