"""The server: an ASGI application, which Ray Serve serves, too, and uvicorn in this process.

CORS ─▶ Gate (limits) ─▶ FastAPI ─▶ routes, each with the key that it needs ─▶ Service

`open_service` makes a service from its settings, `HttpServer` listens, drains and ends, and
`open_agent_server` is the server that agents of an environment talk to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rllib_llm.checkpoints.folder import find_model
from rllib_llm.engines.protocol import EngineEndedError
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.serving.engine_host import SWITCH_SECONDS, ThreadHost, served_tokenizer
from rllib_llm.serving.engine_process import EngineProcess
from rllib_llm.serving.routes import ROUTERS
from rllib_llm.serving.schemas import FAILED, ApiError, field_error
from rllib_llm.serving.security import Clients, Gate, read_clients
from rllib_llm.serving.service import Service, engine_ended
from rllib_llm.serving.sessions import Session, SessionRules
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.shared.errors import nearest

logger = logging.getLogger(__name__)

_LAG_SECONDS = 0.5
_MAX_HEAD_BYTES = 2**16  # of a request's line and headers


class _App(FastAPI):
    """FastAPI without 422 in its description: an invalid field gets a 400 here."""

    def openapi(self) -> dict[str, Any]:
        """As FastAPI's."""
        described = super().openapi()
        for operations in described["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            described["components"]["schemas"].pop(name, None)
        return described


def make_app(
    service: Service, clients: Clients | None = None, names_requests: bool = True
) -> ASGIApp:
    """The application. Its lifespan starts the service, and drains it at the end.

    Args:
        clients: who may ask; None: as the service's settings say.
        names_requests: whether answers have `x-request-id`; Ray Serve gives it by itself, and a
            client's own as it came, also where it is no word and the log has another one.
    """
    settings = service.settings
    if clients is None:
        clients = read_clients(settings)

    async def measure_lag() -> None:
        events = asyncio.get_running_loop()
        while True:
            due = events.time() + _LAG_SECONDS
            await asyncio.sleep(_LAG_SECONDS)
            service.metrics.lag.set(max(0.0, events.time() - due))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        lag = asyncio.create_task(measure_lag())
        yield
        lag.cancel()
        await service.drain(settings.drain_s)
        service.close()

    failures = ApiError, EngineEndedError, RequestValidationError, HTTPException, Exception
    app = _App(
        title="rllib_llm", docs_url=None, redoc_url=None, lifespan=lifespan,
        exception_handlers=dict.fromkeys(failures, error_response),
    )  # fmt: skip
    app.state.service, app.state.clients = service, clients
    for router in ROUTERS:
        app.include_router(router)
    gate = Gate(app, settings, clients, names_requests)
    if not settings.cors_origins:
        return gate
    return CORSMiddleware(  # OpenAI's client in a browser sends a dozen headers of its own
        gate, allow_origins=settings.cors_origins, allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
    )  # fmt: skip


async def error_response(request: Request, error: Exception) -> JSONResponse:
    """The answer to a request that has failed."""
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, EngineEndedError):
        return engine_ended().response()
    path = request.url.path
    if isinstance(error, RequestValidationError):
        kind = request.headers.get("content-type", "")
        return field_error(error.errors(), kind, path).response()
    if not isinstance(error, HTTPException):
        logger.exception("%s %s failed", request.method, path)
        return ApiError(500, FAILED).response()
    message, headers = f"{request.method} {path}: {error.detail}.", dict(error.headers or {})
    if error.status_code == 404:
        asked = path.removeprefix(request.scope.get("root_path", ""))
        near = nearest(asked, request.app.openapi()["paths"], 1, 0.8)
        message += "".join(f" Did you mean {one}?" for one in near)
    if error.status_code == 405:  # Starlette names those of the first route of this path
        scopes = {each: {**request.scope, "method": each} for each in ("DELETE", "GET", "POST")}
        known = [method for method, scope in scopes.items()
                 if any(each.matches(scope)[0] is Match.FULL for each in request.app.routes)]
        if "GET" in known:  # the gate turns HEAD into it
            known.append("HEAD")
        headers["Allow"] = ", ".join(known)
    code = "invalid_json" if error.status_code == 400 else None
    return ApiError(error.status_code, message, None, code, headers).response()


class HttpServer(uvicorn.Server):
    """Runs until SIGTERM or SIGINT, or `should_exit`; then reports not ready, drains requests for
    up to `drain_s`, and closes. The methods that are uvicorn's are called by it.

    Args:
        clients: who may ask; None: as the service's settings say.
        given: an open socket to listen on; None: one of the settings' host and port.
        ends_with_engine: whether it ends, with `engine_has_ended`, when the engine does: whatever
            started it starts it again. Else it answers 503.
    """

    def __init__(
        self, service: Service, clients: Clients | None = None,
        given: socket.socket | None = None, *, ends_with_engine: bool = False,
    ) -> None:  # fmt: skip
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
        self.on_start: Callable[[], Any] = lambda: None  # called when it listens

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
        except EngineEndedError:
            self.engine_has_ended = True
            logger.critical("The engine has ended with an error, and the server with it.")
        return self.engine_has_ended

    def handle_exit(self, sig: int, frame: Any) -> None:
        """As uvicorn's; from the signal on the server is not ready."""
        self._service.is_draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, behind the drain; what is under way then is aborted."""
        if not await self._service.drain(self._service.settings.drain_s):
            self._service.abort()
        await super().shutdown(sockets)

    def serve_here(self) -> None:
        """Serves in this thread until the end."""
        self.run(None if self._given is None else [self._given])

    @property
    def port(self) -> int:
        """That it listens on."""
        return int(self.servers[0].sockets[0].getsockname()[1])


def timed_protocol(seconds: float) -> type:
    """uvicorn's protocol, which closes connections that take longer to send a request's head, or
    whose head is very large."""

    class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # chosen at run time
        _timer: Any = None
        _is_in_head, _head_bytes = False, 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            if self._timer is None and not self._has_request():
                self._wait_for_head()
            was_in_head = self._is_in_head
            super().data_received(data)
            if self._has_request():
                self._stop_waiting()
            if was_in_head and self._is_in_head:
                self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self.transport.close()

        # Called by httptools, which puts heads of any size together; h11 has a limit of its own.
        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._is_in_head, self._head_bytes = True, 0

        def on_headers_complete(self) -> None:
            self._is_in_head, self._head_bytes = False, 0
            super().on_headers_complete()

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self._is_in_head:  # behind a body in chunks
                self._head_bytes += len(name) + len(value)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self.transport.close()
                    return
            super().on_header(name, value)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _has_request(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait_for_head(self) -> None:
            self._timer = self.loop.call_later(seconds, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

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
    or the dotted path of a function. A folder without a model is a mistake of the user."""
    sys.setswitchinterval(SWITCH_SECONDS)
    source = find_model(settings.model)
    chats = {"template_settings": settings.template_settings}
    tokenizer = served_tokenizer(source, chat_template=settings.chat_template, **chats)
    start: Callable[..., Any] = EngineProcess if settings.engine_process else ThreadHost.open
    return Service(start(settings, source), tokenizer, settings, source=source)


class AgentServer:
    """An OpenAI-compatible server whose sessions record every sampled token, for agents.

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
        """Answers in the block, on the loopback device, from a thread of this process."""
        listening = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(self.service, Clients([]), listening)
        thread = threading.Thread(target=server.serve_here, name="http-server", daemon=True)
        started = threading.Event()
        server.on_start = started.set
        thread.start()
        try:
            while not started.wait(0.5):
                if not thread.is_alive():
                    raise RuntimeError("The server in this process did not start; see its log.")
            self._address = f"http://127.0.0.1:{server.port}"
            yield
        finally:
            server.should_exit = True
            thread.join()
            listening.close()

    @contextmanager
    def session(
        self, sampling: Mapping[str, Any], *, max_new_tokens: int, max_turns: int,
        template_settings: Mapping[str, Any],
    ) -> Iterator[tuple[str, Session]]:  # fmt: skip
        """A session's address and record."""
        rules = SessionRules(
            sampling, max_new_tokens, max_turns, self.max_tokens, template_settings
        )
        session_id = uuid.uuid4().hex  # nobody guesses it
        session = self.service.sessions.begin(session_id, rules=rules)
        try:
            yield f"{self._address}/sessions/{session_id}/v1", session
        finally:
            with contextlib.suppress(ApiError):  # it has been ended
                self.service.sessions.end(session_id)

    def check_open(self) -> None:
        """Raises RuntimeError where the engine has ended."""
        self.service.host.check_open()

    def close(self) -> None:
        """Ends the engine."""
        self.service.close()


def open_agent_server(
    engine: TorchEngine, tokenizer: Any, *, stop_token_ids: Sequence[int], max_rows: int,
    max_tokens: int | None, max_seconds: float, name: str,
) -> AgentServer:  # fmt: skip
    """A server of an engine that is there.

    Args:
        engine: samples, and is closed with the server.
        max_rows: turns at the same time.
        max_tokens: of a prompt and its turn; None: what the model reads.
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
