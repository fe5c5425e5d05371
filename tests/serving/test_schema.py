"""Requests made at random from the interface's own description: none brings the server down."""

from __future__ import annotations

import contextlib
import socket
import threading

import httpx
import pytest
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from starlette.applications import Starlette
from starlette.routing import Mount

from rllib_llm.serving.http_server import make_app
from rllib_llm.serving.security import Clients, read_clients
from tests.serving.tiny_server import running, service, until
from tests.serving.tiny_server import settings as tiny_settings

schemathesis = pytest.importorskip("schemathesis")

ADMIN_KEY = "root"
ASKED = ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/tokenize",
         "/detokenize", "/sessions/{session_id}/v1/chat/completions",
         "/sessions/{session_id}/reward"]  # fmt: skip


def operations(address: str) -> list[tuple[str, str, bool]]:
    """(path, method, whether it is the administration's) of all that the interface describes."""
    described = httpx.get(f"{address}/openapi.json").json()["paths"]
    return [
        (path, method, operation.get("security") == [{"admin_key": []}])
        for path, methods in described.items()
        for method, operation in methods.items()
    ]


def ask_at_random(
    address: str, path: str, method: str, headers: dict[str, str], count: int = 15
) -> None:
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # as they come is plain enough
    )
    @given(case=schema[path][method].as_strategy())
    def ask(case) -> None:
        if isinstance(case.body, dict):  # a server that answers at length is no fault
            if path.endswith("completions"):
                case.body |= {"n": 1, "max_tokens": 2}
                case.body.pop("max_completion_tokens", None)
            if isinstance(case.body.get("sampling_params"), dict):
                case.body["sampling_params"] |= {"n": 1, "max_tokens": 2}
        answer = case.call(timeout=30, headers=headers)
        told = f"{method} {path}: {answer.status_code} {answer.text}"
        assert answer.status_code < 500 and answer.status_code != 422, told

    ask()


def test_streams_are_described(tiny):
    whole = httpx.get(f"{tiny[0]}/openapi.json").json()
    described = whole["paths"]
    streamed = {
        path
        for path, methods in described.items()
        for operation in methods.values()
        if "text/event-stream" in operation["responses"]["200"].get("content", {})
    }
    taking = [f"schemas/{name}'" for name, schema in whole["components"]["schemas"].items()
              if "stream" in schema.get("properties", {})]  # fmt: skip
    assert streamed == {
        path
        for path, methods in described.items()
        for operation in methods.values()
        if any(name in str(operation.get("requestBody")) for name in taking)
    } - {"/v1/chat/completions/batch"}  # has a chat's fields, and refuses `stream`
    assert "/inference/v1/generate" in streamed


def test_what_every_route_may_answer_is_described(tiny):
    """A client's rate may be used up on each route that wants its key; one that samples or encodes
    may have to wait for weights."""
    described = httpx.get(f"{tiny[0]}/openapi.json").json()["paths"]
    assert list(described["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    for path, methods in described.items():
        for operation in methods.values():
            told = set(operation["responses"])
            if operation.get("security") == [{"key": []}]:
                assert {"401", "429"} <= told, path
            if path in ASKED[:-1]:
                assert {"404", "409", "503"} <= told, path


@pytest.mark.parametrize("path", ASKED)
def test_no_request_for_completions_is_answered_by_a_fault_of_the_server(tiny, path):
    ask_at_random(tiny[0], path, "post", {})


@pytest.mark.slow  # everything else
def test_no_request_is_answered_by_a_fault_of_the_server(tiny):
    described = operations(tiny[0])
    assert len(described) > 20
    for path, method, _ in described:
        if path not in ASKED:
            ask_at_random(tiny[0], path, method, {})


@pytest.mark.slow  # with a server of its own
def test_no_request_of_the_administration_is_answered_by_a_fault_of_the_server():
    made = service(drain_s=0)
    with running(made, Clients([], ADMIN_KEY.encode())) as address:
        paths = [(path, method) for path, method, is_admin in operations(address) if is_admin]
        assert len(paths) == 8
        for path, method in paths:
            if path != "/drain":  # behind it there are no answers
                ask_at_random(address, path, method, {"Authorization": f"Bearer {ADMIN_KEY}"})


@contextlib.contextmanager
def below(made, prefix: str, clients: Clients):
    """The server's address below a prefix, as Ray Serve mounts it."""
    inner = make_app(made, clients)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        await made.start()
        yield
        made.close()

    app = Starlette(routes=[Mount(prefix, inner)], lifespan=lifespan)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}{prefix}"
        server.should_exit = True
        thread.join()


@pytest.mark.slow  # with a server of its own
@pytest.mark.parametrize("key", ["k", "wrong", ADMIN_KEY])
def test_no_request_below_a_prefix_is_answered_by_a_fault_of_the_server_or_without_its_key(key):
    keys = read_clients(tiny_settings(api_keys="k")).clients
    with below(service(), "/llm", Clients(keys, ADMIN_KEY.encode())) as address:
        headers = {"Authorization": f"Bearer {key}"}
        for path, method, is_admin in operations(address):
            open_paths = ("/health", "/healthz", "/readyz", "/metrics")
            right = is_admin == (key == ADMIN_KEY) and key != "wrong"
            if path in open_paths or (right and path != "/drain"):
                ask_at_random(address, path, method, headers, 6)
            elif not right:
                answer = httpx.request(method, f"{address}{path}", headers=headers, json={})
                assert answer.status_code == 401, path
