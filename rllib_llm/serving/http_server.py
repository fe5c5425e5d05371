"""The server in this process, without Ray Serve: a service made from its settings, uvicorn, a
socket, and its end; and the one that agents of an environment talk to.
"""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rllib_llm.checkpoints.folder import find_model
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.serving.app import logger, make_app
from rllib_llm.serving.engine_host import EngineHost, ThreadHost, open_thread, served_tokenizer
from rllib_llm.serving.engine_process import EngineProcess
from rllib_llm.serving.security import Clients
from rllib_llm.serving.service import Service
from rllib_llm.serving.sessions import Rules, Session
from rllib_llm.serving.settings import ServeSettings

class HttpServer(uvicorn.Server):
    """Runs until SIGTERM or SIGINT, or `should_exit`; then reports not ready, drains requests for
    up to `drain_s`, and closes.

    Args:
        service: that answers.
        clients: who may ask; None: as the service's settings say.
        given: an open socket to listen on; None: one of the settings' host and port.
        ends_with_engine: whether it ends, with `engine_has_ended`, when the engine does: whatever
            started it starts it again. Else it answers 503.
    """

    def __init__(
        self,
        service: Service,
        clients: Clients | None = None,
        given: socket.socket | None = None,
        *,
        ends_with_engine: bool = False,
    ) -> None:
        settings = service.settings
        super().__init__(
            uvicorn.Config(
                make_app(service, clients), host=settings.host, port=settings.port,
                http=timed_protocol(settings.slow_request_s), access_log=False,
                log_level="warning", timeout_graceful_shutdown=5, server_header=False,
            )
        )  # fmt: skip
        self._service = service
        self._given, self._ends_with_engine = given, ends_with_engine
        self.engine_has_ended = False
        self.on_start: Callable[[], Any] = lambda: None
        """Called when it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        await super().startup(sockets)
        if self.started:
            self.on_start()

    async def on_tick(self, counter: int) -> bool:
        """As uvicorn's: whether it is to end."""
        if await super().on_tick(counter):
            return True
        if not self._ends_with_engine:
            return False
        try:
            self._service.host.check_open()
        except RuntimeError:
            self.engine_has_ended = True
            logger.critical("The engine has ended with an error, and the server with it.")
        return self.engine_has_ended

    def handle_exit(self, sig: int, frame: Any) -> None:
        """As uvicorn's; from the signal on the server is not ready."""
        self._service.is_draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, behind the drain."""
        await self._service.drain(self._service.settings.drain_s)
        await super().shutdown(sockets)

    def serve_here(self) -> None:
        """Serves in this thread until the end."""
        self.run(None if self._given is None else [self._given])

    @property
    def port(self) -> int:
        """That it listens on."""
        return int(self.servers[0].sockets[0].getsockname()[1])


@contextmanager
def in_thread(service: Service, clients: Clients | None = None) -> Iterator[str]:
    """The server's address on the loopback device, while it runs in a thread of this process.

    Raises:
        RuntimeError: it does not start.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(service, clients, listening)
    thread = threading.Thread(target=server.serve_here, name="http-server", daemon=True)
    started = threading.Event()
    server.on_start = started.set
    thread.start()
    try:
        while not started.wait(0.5):
            if not thread.is_alive():
                raise RuntimeError("The server in this process did not start; its log says why.")
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def timed_protocol(seconds: float) -> type:
    """uvicorn's protocol, which closes connections that take longer to send a request's head."""

    class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # chosen at run time
        _timer: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            if self._timer is None and not self._has_request():
                self._wait_for_head()
            super().data_received(data)
            if self._has_request():
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _has_request(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait_for_head(self) -> None:
            self._timer = self.loop.call_later(seconds, self._too_slow)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self._timer = None
            if not self._has_request():
                self.transport.close()

    return TimedProtocol


def show_log() -> None:
    """Writes the server's log, a line of JSON for each request, to standard error."""
    parent = logging.getLogger("rllib_llm.serving")
    if not parent.handlers:
        parent.addHandler(logging.StreamHandler())
    parent.setLevel(logging.INFO)
    parent.propagate = False


def open_service(settings: ServeSettings) -> Service:
    """Loads the model that the settings name: a checkpoint, trial, Hugging Face folder or hub id,
    or the dotted path of a function.

    Raises:
        UserError: the folder holds no model.
        ModelSourceError: nothing can be loaded from it.
    """
    source = find_model(settings.model)
    tokenizer = served_tokenizer(source, settings.chat_template)
    host: EngineHost
    if settings.engine_process:
        host = EngineProcess(settings, source)
    else:
        host = open_thread(settings, source)
    return Service(host, tokenizer, settings, source=source)


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
        """A session's address and record."""
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
        name: of the caller.
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
