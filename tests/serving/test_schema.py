"""Requests made at random from the interface's own description: none brings the server down."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def schema(tiny):
    return schemathesis.openapi.from_url(f"{tiny[0]}/openapi.json")


lazy = schemathesis.pytest.from_fixture("schema")
ASKED = ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/tokenize",
         "/detokenize", "/v1/batch", "/sessions/{session_id}/reward"]  # fmt: skip


@lazy.include(path=ASKED).parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_answered_by_a_fault_of_the_server(case):
    if isinstance(case.body, dict):  # a server that answers at length is no fault
        if case.path.endswith("completions"):
            case.body |= {"n": 1, "max_tokens": 2}
            case.body.pop("max_completion_tokens", None)
        if isinstance(case.body.get("sampling_params"), dict):
            case.body["sampling_params"] |= {"n": 1, "max_tokens": 2}
    answer = case.call(timeout=30)
    assert answer.status_code < 500 and answer.status_code != 422, answer.text
