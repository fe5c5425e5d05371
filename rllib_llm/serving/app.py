"""The server as an ASGI application: whatever serves ASGI serves it.

CORS ─▶ Gate (limits) ─▶ FastAPI ─▶ routes, each with the key that it needs ─▶ Service
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from rllib_llm.serving.errors import ApiError, documented, error_body, field_error
from rllib_llm.serving.metrics import set_gauges
from rllib_llm.serving.openai_routes import Completer, openai_router
from rllib_llm.serving.response_routes import response_router
from rllib_llm.serving.schemas import AbortRequest, UpdateRequest
from rllib_llm.serving.security import Clients, Gate, Guards, read_clients, with_cors
from rllib_llm.serving.service import Service
from rllib_llm.serving.session_routes import session_router
from rllib_llm.serving.sources import load_folder
from rllib_llm.serving.token_routes import token_router
from rllib_llm.serving.versions import Weights

logger = logging.getLogger(__name__)

_PAGE = Path(__file__).with_name("page.html")
_LAG_SECONDS = 0.5


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
        service: that answers.
        clients: who may ask; None: as the service's settings say.
        names_requests: whether answers have `x-request-id`; Ray Serve gives it by itself, and a
            client's own as it came, also where it is no word and the log has another one.
    """
    settings = service.settings
    if clients is None:
        clients = read_clients(settings)
    guards = Guards(clients)
    app = _App(title="rllib_llm", docs_url=None, redoc_url=None, lifespan=_lifespan(service))
    completer = Completer(service)
    for router in (
        openai_router(service, completer, guards),
        response_router(service, completer, guards),
        token_router(service, completer, guards),
        session_router(service, completer, guards),
        _administration(service, guards),
    ):
        app.include_router(router)
    _add_errors(app)
    _add_health(app, service)
    return with_cors(Gate(app, settings, clients, names_requests), settings.cors_origins)


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
    """Routes that want no key."""

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> str:
        return _PAGE.read_text(encoding="utf-8")

    @app.get("/health")  # of vLLM's clients
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", responses=documented(503))
    async def readyz() -> dict[str, str]:
        await service.check_alive()
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response)
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


def _administration(service: Service, guards: Guards) -> APIRouter:
    """Routes that want the administration's key."""
    router = APIRouter(
        dependencies=[guards.admin], responses=documented(401, 403), tags=["administration"]
    )

    @router.post("/pause")
    async def pause() -> dict[str, Any]:
        service.host.pause()
        return {"is_paused": True}

    @router.post("/resume")
    async def resume() -> dict[str, Any]:
        service.host.resume()
        return {"is_paused": False}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        return {"is_paused": service.host.is_paused}

    @router.post("/abort_requests")
    @router.post("/inference/v1/abort_requests")
    async def abort_requests(body: AbortRequest | None = None) -> dict[str, Any]:
        wanted = None if body is None else body.request_ids
        jobs = [job for job in service.jobs.values() if wanted is None or job.request_id in wanted]
        for job in jobs:
            job.abort()
        return {"aborted": [job.request_id for job in jobs]}

    @router.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        newest, *_ = service.weights.live
        return {
            "newest": _told(newest),
            "live": [_told(each) for each in service.weights.live],
            "in_flight": service.settings.in_flight,
        }

    @router.post("/update_weights")
    async def update_weights(body: UpdateRequest) -> dict[str, Any]:
        newest = service.weights.newest
        epoch = newest.epoch if body.epoch is None else body.epoch
        version = newest.version + 1 if body.version is None else body.version
        try:
            loaded = await asyncio.to_thread(load_folder, service, body.path, epoch, version)
        except (ValueError, OSError) as error:
            raise ApiError(400, str(error), param="path", code="invalid_value") from error
        return _told(loaded)

    @router.post("/drain")
    async def drain() -> dict[str, Any]:
        is_done = await service.drain(service.settings.drain_s)
        return {"drained": is_done, "under_way": len(service.jobs)}

    return router


def _told(weights: Weights) -> dict[str, Any]:
    return {
        "epoch": weights.epoch,
        "version": weights.version,
        "fingerprint": weights.fingerprint,
        "source": weights.source,
        "load_seconds": weights.load_seconds,
        "loaded_at": weights.loaded_at,
    }
