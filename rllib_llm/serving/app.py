"""The server as an ASGI application: whatever serves ASGI serves it.

Gate (keys, limits) ─▶ FastAPI ─▶ routes ─▶ Service
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from rllib_llm.serving import (
    admin_routes,
    batch_routes,
    openai_routes,
    session_routes,
    token_routes,
)
from rllib_llm.serving.chat import Chats
from rllib_llm.serving.clients import Clients, read_clients
from rllib_llm.serving.errors import ApiError, error_body
from rllib_llm.serving.guides import Guides
from rllib_llm.serving.json_route import field_error
from rllib_llm.serving.metrics import set_gauges
from rllib_llm.serving.security import Gate
from rllib_llm.serving.service import Service

logger = logging.getLogger(__name__)

_PAGE = Path(__file__).with_name("page.html")
_LAG_SECONDS = 0.5


def make_app(service: Service, clients: Clients | None = None, names_requests: bool = True) -> Gate:
    """The application. Its lifespan starts the service, and drains it at the end.

    Args:
        service: that answers.
        clients: who may ask; None: as the service's settings say.
        names_requests: whether answers have `x-request-id`; Ray Serve gives it by itself, and a
            client's own as it came, also where it is no word and the log has another one.
    """
    settings = service.settings
    app = FastAPI(title="rllib_llm", docs_url=None, redoc_url=None, lifespan=_lifespan(service))
    chats = Chats(service.tokenizer)
    ends = service.limits.eos_token_ids
    guides = Guides(service.tokenizer, ends[0] if ends else None)
    for router in (
        openai_routes.make_router(service, chats, guides),
        token_routes.make_router(service, chats),
        batch_routes.make_router(app),
        session_routes.make_router(service, chats, guides),
        admin_routes.make_router(service),
    ):
        app.include_router(router)
    _add_errors(app)
    _add_health(app, service)
    if clients is None:
        clients = read_clients(settings)
    return Gate(app, settings, clients, names_requests)


def _lifespan(service: Service) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        lag = asyncio.create_task(_measure_lag(service))
        yield
        lag.cancel()
        await service.drain(service.settings.drain_s)
        service.close()

    return lifespan


async def _measure_lag(service: Service) -> None:
    events = asyncio.get_running_loop()
    while True:
        due = events.time() + _LAG_SECONDS
        await asyncio.sleep(_LAG_SECONDS)
        service.metrics.lag.set(max(0.0, events.time() - due))


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> str:
        return _PAGE.read_text(encoding="utf-8")

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        service.check_open()
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        if service.is_ready:
            with contextlib.suppress(RuntimeError):  # the engine has ended, which /readyz says
                counts = await asyncio.wrap_future(service.host.count())
                set_gauges(service.metrics, counts, service.weights)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def of_ours(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def of_fields(request: Request, error: RequestValidationError) -> JSONResponse:
        kind = request.headers.get("content-type", "")
        return JSONResponse(field_error(list(error.errors()), kind).body(), 400)

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}."
        code = "invalid_json" if error.status_code == 400 else None
        body = error_body(error.status_code, message, code=code)
        return JSONResponse(body, error.status_code, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def of_the_server(request: Request, error: Exception) -> JSONResponse:
        logger.exception("%s %s failed", request.method, request.url.path)
        return JSONResponse(error_body(500, "The server failed; its log says how."), 500)
