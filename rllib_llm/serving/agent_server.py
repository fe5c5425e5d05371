"""The server that agents of an environment talk to, each in a session of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.serving.engine_host import ThreadHost
from rllib_llm.serving.http_server import in_thread
from rllib_llm.serving.security import Clients
from rllib_llm.serving.service import Service
from rllib_llm.serving.sessions import Rules, Session
from rllib_llm.serving.settings import ServeSettings


class AgentServer:
    """See `envs.adapters.agent.AgentServer`.

    Args:
        service: that samples; closed with this. Its sessions begin here alone.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.max_tokens = service.limits.max_model_len
        service.sessions.begin_by_themselves = False
        self._address = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Answers in the block."""
        with in_thread(self.service, Clients([])) as self._address:
            yield

    @contextmanager
    def session(
        self,
        sampling: Mapping[str, Any],
        *,
        max_new_tokens: int,
        max_turns: int,
        template_settings: Mapping[str, Any],
    ) -> Iterator[tuple[str, Session]]:
        """The address of a session, and what is said in it."""
        rules = Rules(
            sampling, max_new_tokens=max_new_tokens, max_turns=max_turns,
            max_tokens=self.max_tokens, template_settings=template_settings,
        )  # fmt: skip
        session_id = uuid.uuid4().hex  # nobody guesses it
        session = self.service.sessions.begin(session_id, rules=rules)
        try:
            yield f"{self._address}/sessions/{session_id}/v1", session
        finally:
            self.service.sessions.forget(session_id)

    def check_open(self) -> None:
        """Raises RuntimeError where the engine has ended."""
        self.service.host.check_open()

    def close(self) -> None:
        """Ends the engine."""
        self.service.close()


def open_agent_server(
    engine: TorchEngine,
    tokenizer: Any,
    *,
    stop_token_ids: Sequence[int],
    max_rows: int,
    max_tokens: int | None,
    max_seconds: float,
    name: str,
) -> AgentServer:
    """A server of an engine that is there.

    Args:
        engine: samples, and is closed with the server.
        tokenizer: of its model.
        stop_token_ids: of the policy.
        max_rows: turns at the same time.
        max_tokens: of a prompt and its turn; None: what the model reads.
        max_seconds: of a turn.
        name: of whoever asks for it.
    """
    settings = ServeSettings.model_validate(
        {
            "model": "policy", "in_flight": "recompute", "max_rows": max_rows,
            "max_waiting": max_rows, "drain_s": 0, "max_model_len": max_tokens,
            "deadline_s": max_seconds,
        }
    )  # fmt: skip
    host = ThreadHost(engine.model, settings, tuple(stop_token_ids), tokenizer, engine=engine)
    service = Service(host, tokenizer, settings, source=name, serial=engine.version or 0)
    return AgentServer(service)
