"""Requests made at random from the interface's own description: none brings the server down."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")

ASKED = ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/tokenize",
         "/detokenize", "/sessions/{session_id}/reward"]  # fmt: skip


@pytest.mark.parametrize("path", ASKED)
def test_no_request_is_answered_by_a_fault_of_the_server(tiny, path):
    schema = schemathesis.openapi.from_url(f"{tiny[0]}/openapi.json")

    @settings(
        max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(case=schema[path]["POST"].as_strategy())
    def ask(case) -> None:
        if isinstance(case.body, dict):  # a server that answers at length is no fault
            if path.endswith("completions"):
                case.body |= {"n": 1, "max_tokens": 2}
                case.body.pop("max_completion_tokens", None)
            if isinstance(case.body.get("sampling_params"), dict):
                case.body["sampling_params"] |= {"n": 1, "max_tokens": 2}
        answer = case.call(timeout=30)
        assert answer.status_code < 500 and answer.status_code != 422, answer.text

    ask()
