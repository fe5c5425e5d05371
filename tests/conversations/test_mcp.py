"""Tools of an MCP server, as those of Python."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time

import pytest

from rllib_llm.conversations.tool_calls import ToolCall
from rllib_llm.envs.conversation import ChatEnv, ConversationEnv
from rllib_llm.envs.tools import MCPServers, MCPTool, Toolbox
from rllib_llm.shared.errors import Problems
from rllib_llm.shared.remote import EventLoop
from tests.conversations.scripted import roll, settings
from tests.ports import free_port

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

MUTE = "import os, time; open(__file__ + '.pid', 'w').write(str(os.getpid())); time.sleep(600)"
REFUSES = """
import json, sys
for line in sys.stdin:
    if (asked := json.loads(line)).get("id") is not None:
        error = {"code": -32600, "message": "not today"}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
"""
FRAIL = """
import asyncio, os, sys, time
from mcp.server import MCPServer

server = MCPServer("frail")


@server.tool()
async def add(a: int, b: int) -> str:
    "Adds two numbers, or goes away."
    if a == 9:
        os._exit(1)
    if a == 8:
        await asyncio.sleep(60)
    if a == 6:
        os.close(1)
        time.sleep(600)
    if a == 7:
        time.sleep(60)  # and nothing else is answered meanwhile
    return str(a + b)


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


@pytest.fixture
def served(tmp_path):
    """(calls, tools) of servers: `calls(*asked)` gives the results of `add`."""
    loop, opened = EventLoop(), []

    def serve(*servers, **settings):
        opened.append(MCPServers(servers, **settings))
        tools = loop.run(opened[-1].connect())
        box = Toolbox(tools)

        def calls(*asked):
            return [loop.run(box.run(ToolCall("add", {"a": a, "b": 2}, "", "ok"))) for a in asked]

        return calls, tools

    def close():
        while opened:
            loop.run(opened.pop().close())
        loop.close()

    serve.close = close
    yield serve
    close()


def program(tmp_path, text):
    script = tmp_path / "server.py"
    script.write_text(text)
    return {"command": sys.executable, "args": [str(script)]}


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up_and_ended(served, tmp_path):
    with pytest.raises(Problems, match="must be reachable: it did not answer within 5 s"):
        served(program(tmp_path, MUTE), connect_s=5)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "server.py.pid").read_text()), 0)


PID = "import os; open(__file__ + '.pid', 'w').write(str(os.getpid()))\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [("raise SystemExit(3)", "MCPError: Connection closed"), (REFUSES, "MCPError: not today")],
    ids=["ends", "refuses"],
)
def test_why_a_server_cannot_be_reached_is_told(served, tmp_path, text, said):
    """It was "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)"."""
    with pytest.raises(Problems, match=f"must be reachable: {said}"):
        served(program(tmp_path, text))


NOTED = PID + SERVER


def is_alive(tmp_path):
    try:
        os.kill(int((tmp_path / "server.py.pid").read_text()), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        pytest.param(
            ConversationEnv, {"chat_template": "{{ bos_token }}"}, marks=pytest.mark.slow
        ),
        (ChatEnv, {"base_url": "http://a/v1"}),
    ],
    ids=["template", "of a subclass"],
)  # fmt: skip
def test_a_refused_environment_leaves_no_server_behind(tmp_path, kind, wrong):
    with pytest.raises(ValueError, match="must"):
        kind(settings(mcp_servers=[program(tmp_path, NOTED)], **wrong))
    assert not is_alive(tmp_path)


def test_one_server_counts_as_a_list_of_one(tmp_path):
    """Its settings' names were taken for servers, a URL letter by letter."""
    env = ConversationEnv(settings(mcp_servers=program(tmp_path, SERVER)))
    assert set(env.toolbox.tools) == {"add"}
    env.close()


def test_an_environment_is_closed_twice(tmp_path):
    env = ConversationEnv(settings(mcp_servers=[program(tmp_path, NOTED)]))
    assert is_alive(tmp_path)
    env.close()
    env.close()
    assert not is_alive(tmp_path)


@pytest.mark.slow  # servers in processes of their own
def test_a_server_that_dies_is_started_again(served, tmp_path, caplog):
    calls, _ = served(program(tmp_path, FRAIL))
    first, died, again = calls(1, 9, 1)
    assert (first.text, first.failure) == ("3", "")
    assert died.failure == "unavailable" and "the MCP server went away" in died.text
    assert (again.text, again.failure) == ("3", "")
    assert "Rollouts that call it are not valid until it is back." in caplog.text
    assert "is back after" in caplog.text


@pytest.mark.slow  # as above
def test_a_server_whose_connection_was_just_lost_is_ended(served, tmp_path):
    """It stayed behind: the connection was not yet closed when the loop ended."""
    calls, _ = served(program(tmp_path, PID + FRAIL))
    assert calls(6)[0].failure == "unavailable"
    served.close()
    assert not is_alive(tmp_path)


@pytest.mark.slow  # as above
def test_slow_calls_are_told_and_servers_that_hang_are_not_the_policy_s(
    served, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("rllib_llm.envs.tools._PROBE_SECONDS", 2.0)
    calls, _ = served(program(tmp_path, FRAIL), timeout_s=1.0)
    (slow,) = calls(8)
    assert (slow.failure, slow.text) == ("timeout", "Error: no answer within 1 s")
    hung, again = calls(7, 1)
    assert "answered nothing for 1 s" in caplog.text
    assert hung.failure == "unavailable" and again.text == "3"


@pytest.mark.slow  # as above
def test_a_server_that_is_restarted_is_found_again(served, tmp_path, caplog):
    port, script = free_port(), program(tmp_path, FRAIL)
    command = [script["command"], *script["args"], str(port)]
    with open(tmp_path / "log", "w") as log:
        running = subprocess.Popen(command, stderr=log)
        try:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                with socket.socket() as probe:
                    if not probe.connect_ex(("127.0.0.1", port)):
                        break
                time.sleep(0.1)
            calls, _ = served(f"http://127.0.0.1:{port}/mcp", connect_s=60)
            assert calls(1)[0].text == "3"
            running.kill()
            running.wait()
            assert calls(1)[0].failure == "unavailable"
            running = subprocess.Popen(command, stderr=log)
            assert calls(1)[0].text == "3"
            assert "went away" in caplog.text
        finally:
            running.kill()
            running.wait()


def test_all_pages_of_a_list_are_read():
    from rllib_llm.envs.tools import _listed_by

    class Paged:
        async def list_tools(self, *, cursor=None):
            page = int(cursor or 0)
            following = str(page + 1) if page < 2 else None
            return type("Page", (), {"tools": [f"tool{page}"], "next_cursor": following})

    assert asyncio.run(_listed_by(Paged())) == ["tool0", "tool1", "tool2"]


def test_texts_within_resources_and_structured_results_are_read():
    """A file that a server gave was "[resource]", and a result without words an empty text."""
    import mcp_types as types

    file = types.TextResourceContents(uri="file:///a.txt", text="the file")
    blob = types.BlobResourceContents(uri="file:///b.png", blob="AA==")
    parts = [
        types.TextContent(type="text", text="Here:"),
        types.EmbeddedResource(type="resource", resource=file),
        types.EmbeddedResource(type="resource", resource=blob),
        types.ImageContent(type="image", data="AA==", mime_type="image/png"),
    ]
    listed = types.Tool(name="read", input_schema={"type": "object"})

    def said(**result):
        class Server:
            async def call(self, *asked):
                return types.CallToolResult(**result)

        return asyncio.run(MCPTool(Server(), listed, 1.0).run({}))

    assert said(content=parts) == "Here:\nthe file\n[resource]\n[image]"
    assert said(content=[], structured_content={"sum": 3}) == '{"sum": 3}'
    assert said(content=[]) == ""


def test_a_rollout_whose_server_is_away_is_not_valid(tmp_path):
    class Gone:
        name, timeout_s = "add", 1.0
        schema = {
            "type": "function",
            "function": {"name": "add", "description": "", "parameters": {}},
        }

        async def run(self, arguments):
            from rllib_llm.shared.remote import Away

            if arguments["a"]:
                return "3"
            raise Away("the MCP server is away")

    env = ConversationEnv(
        settings(tools=[Gone()], reward_functions=lambda completions: [1.0] * len(completions))
    )
    try:
        with pytest.warns(UserWarning, match="the MCP server is away"):
            attempts, judged, _ = roll(env, lambda row: call(row % 2), "3")
    finally:
        env.close()
    assert judged.columns["valid"].tolist() == [False, True, False, True]


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
    with pytest.raises(Problems, match="must be reachable"):
        ConversationEnv(settings(mcp_servers=[{"command": "no-such-program-anywhere"}]))


@pytest.mark.parametrize("code", [-32000, -32001, -32602, 1])
def test_an_application_s_own_error_is_an_answer(code):
    """-32000 counted as a lost connection, which made all calls under way invalid."""
    from mcp.shared.exceptions import MCPError

    from rllib_llm.envs.tools import _is_answer

    assert _is_answer(MCPError(code=code, message="no such order"))
    assert not _is_answer(MCPError(code=-32000, message="Connection closed"))
    assert not _is_answer(ConnectionResetError("Connection closed"))
