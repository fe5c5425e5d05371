"""Requests made at random from the interface's own description: none brings the server down."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from rllib_llm.serving.clients import Clients
from rllib_llm.serving.security import ADMIN_PATHS
from tests.serving.tiny_server import running, service

schemathesis = pytest.importorskip("schemathesis")

ADMIN_KEY = "root"
ASKED = ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/tokenize",
         "/detokenize", "/sessions/{session_id}/v1/chat/completions",
         "/sessions/{session_id}/reward"]  # fmt: skip


@schemathesis.serializer("application/jsonl")
def as_it_is(context, value) -> bytes:
    """A batch is text."""
    return str(value).encode()


def operations(address: str) -> list[tuple[str, str]]:
    """(path, method) of everything that the interface describes."""
    described = httpx.get(f"{address}/openapi.json").json()["paths"]
    return [(path, method) for path, methods in described.items() for method in methods]


def ask_at_random(address: str, path: str, method: str, headers: dict[str, str]) -> None:
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")

    @settings(
        max_examples=15,
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


@pytest.mark.parametrize("path", ASKED)
def test_no_request_for_completions_is_answered_by_a_fault_of_the_server(tiny, path):
    ask_at_random(tiny[0], path, "post", {})


@pytest.mark.slow  # everything else
def test_no_request_is_answered_by_a_fault_of_the_server(tiny):
    described = operations(tiny[0])
    assert len(described) > 20 and {path for path, _ in described} >= ADMIN_PATHS
    for path, method in described:
        if path not in ASKED:
            ask_at_random(tiny[0], path, method, {})


@pytest.mark.slow  # with a server of its own
def test_no_request_of_the_administration_is_answered_by_a_fault_of_the_server():
    made = service(drain_s=0)
    with running(made, Clients([], ADMIN_KEY.encode())) as address:
        for path, method in operations(address):
            if path in ADMIN_PATHS:
                ask_at_random(address, path, method, {"Authorization": f"Bearer {ADMIN_KEY}"})
