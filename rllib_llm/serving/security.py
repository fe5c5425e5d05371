"""Who may ask, how much, and how large: checked before a request is read.

request ─▶ its id ─▶ CORS ─▶ key ─▶ rate ─▶ size and time of the body ─▶ the application
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from rllib_llm.serving.clients import Client, Clients
from rllib_llm.serving.cutoff import Cutoff
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.settings import ServeSettings

# Of ASGI, as Starlette names them.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/metrics", "/openapi.json"})
ADMIN_PATHS = frozenset(
    {
        "/pause", "/resume", "/is_paused", "/abort_requests", "/weight_info", "/update_weights",
        "/drain", "/inference/v1/abort_requests",
    }
)  # fmt: skip
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}\Z", re.ASCII)


class Gate:
    """The ASGI application that stands before another one.

    Args:
        app: the other.
        settings: of the server.
        clients: who may ask.
        names_requests: whether answers name their request (`x-request-id`).
    """

    def __init__(
        self, app: App, settings: ServeSettings, clients: Clients, names_requests: bool = True
    ) -> None:
        self._app, self._settings, self._clients = app, settings, clients
        self._names_requests = names_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        request_id = _request_id(headers.get(b"x-request-id"))
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        name = [(b"x-request-id", request_id.encode())] if self._names_requests else []
        answer = _Answer(send, [*name, *self._cors(headers)])
        start = time.perf_counter()
        try:
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                await answer.empty(204 if self._allows(headers) else 403)
                return
            state["client"] = self._admitted(scope["path"], headers)
            body = await self._body(headers, receive)
            await self._app(scope, _replayed(body, receive), answer)
        except ApiError as error:
            await answer.error(error)
        finally:
            if logger.isEnabledFor(logging.INFO):
                told = {
                    "request_id": request_id, "method": scope["method"], "path": scope["path"],
                    "status": answer.status, "client": _who(scope),
                    "seconds": round(time.perf_counter() - start, 4),
                }  # fmt: skip
                logger.info(json.dumps(told))

    def _allows(self, headers: Mapping[bytes, bytes]) -> bool:
        return headers.get(b"origin", b"").decode("latin-1") in self._settings.cors_origins

    def _cors(self, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        if not self._allows(headers):
            return []
        return [
            (b"access-control-allow-origin", headers[b"origin"]),
            (b"access-control-allow-headers", b"authorization, content-type, x-request-id, "
             b"x-min-weight-version"),
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"vary", b"origin"),
        ]  # fmt: skip

    def _admitted(self, path: str, headers: Mapping[bytes, bytes]) -> Client | None:
        if path in ADMIN_PATHS:
            self._clients.check_admin(headers.get(b"authorization"))
            return None
        if path in OPEN_PATHS:
            return None
        client = self._clients.of(headers.get(b"authorization"))
        client.admit()
        return client

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """All of the body, before anybody parses it.

        Raises:
            ApiError: 413 too large, 408 too slow.
        """
        most = self._settings.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            raise _too_large(most)
        seconds = self._settings.slow_request_s
        with Cutoff() as cutoff:
            timer = asyncio.get_running_loop().call_later(seconds, cutoff.cut)
            try:
                body = await _read(receive, most)
            finally:
                timer.cancel()
            _check_text(body)
            return body
        raise ApiError(
            408, f"The request took longer than {seconds:g} s to arrive.",
            code="slow_request", headers={"Connection": "close"},
        )  # fmt: skip


def _check_text(body: bytes) -> None:
    """Raises ApiError for JSON that names halves of characters, which are no text."""
    if b"\\ud" not in body.lower():
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"The request must hold text: {error}.", code="invalid_json") from error
    except (ValueError, RecursionError):
        return  # no JSON, which is said further on


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"The request must have at most {most} bytes, which is the server's limit.",
        code="request_too_large", headers={"Connection": "close"},
    )  # fmt: skip


async def _read(receive: Receive, most: int) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The client went away.", code="disconnected")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise _too_large(most)
        more = message.get("more_body", False)
    return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, and then what the client does further."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _who(scope: Scope) -> str:
    """The name of the key that came with a request; without one, the address it came from."""
    client: Client | None = scope["state"].get("client")
    host, _ = scope.get("client") or ("", 0)
    return client.name if client is not None and client.name else host


def _request_id(given: bytes | None) -> str:
    text = (given or b"").decode("latin-1")
    return text if _REQUEST_ID.match(text) else f"req-{uuid.uuid4().hex}"


class _Answer:
    """Sends, with further headers, and knows whether it has begun."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send, self._headers = send, headers
        self.status = 0  # none yet

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), *self._headers]}
        await self._send(message)

    async def empty(self, status: int) -> None:
        await self._whole(status, b"", [])

    async def error(self, error: ApiError) -> None:
        if self.status:  # the answer has begun: whoever reads it sees that it is cut off
            return
        headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        await self._whole(error.status, json.dumps(error.body()).encode(), headers)

    async def _whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        fixed = [
            (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
        ]  # fmt: skip
        await self({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
        await self({"type": "http.response.body", "body": body})
