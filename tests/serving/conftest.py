"""One server for all tests that only ask."""

from __future__ import annotations

import importlib.util

import pytest

if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")):
    collect_ignore_glob = ["test_*.py"]  # the extra `serve` is not installed
else:
    from httpx._config import DEFAULT_TIMEOUT_CONFIG

    # httpx waits five seconds, which a busy machine may take for an answer.
    for part in ("connect", "read", "write", "pool"):
        setattr(DEFAULT_TIMEOUT_CONFIG, part, 60.0)

    @pytest.fixture(scope="session")
    def tiny():
        """(address, service) of a server that nobody changes."""
        from tests.serving.tiny_server import running, service

        made = service()
        with running(made) as address:
            yield address, made
