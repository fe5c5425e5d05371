"""Authentication, rate limits and size limits.

    request ─▶ CORS ─▶ Gate: its id, size and time of its body ─▶ FastAPI ─▶ the route's dependency:
                       a key of a client or of the administration, and its rate

What a route needs is declared where it is (`client_key`, `admin_key`), so that no form of its path
passes by. A body that comes without any known key is not read.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import anyio
import yaml
from fastapi import HTTPException, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rllib_llm.serving.schemas import ApiError, refuse
from rllib_llm.serving.settings import ONE_REPLICA, RATES, ServeSettings
from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.strict_yaml import read_text

logger = logging.getLogger(__name__)


class TokenBucket:
    """A rate limit in units per minute with a burst of one minute. Usage that was unknown in
    advance may exceed it and is then waited for.

    Args:
        per_minute: None: no limit.
        clock: seconds.
    """

    def __init__(
        self, per_minute: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._level, self._at = per_minute or 0.0, clock()

    def wait_seconds(self, units: float = 1.0) -> float:
        """Until so many units are there; 0 where they are. More than a minute's are never there:
        for them a full bucket will do."""
        if self._per_minute is None:
            return 0.0
        now = self._clock()
        filled = self._level + (now - self._at) * self._per_minute / 60
        self._level, self._at = min(self._per_minute, filled), now
        missing = min(units, self._per_minute) - self._level
        return max(0.0, missing * 60 / self._per_minute)

    def use(self, units: float) -> None:
        """Takes units out."""
        self._level -= units


@dataclass
class Client:
    """A key's owner, with what remains of its limits."""

    name: str
    key: bytes
    requests: TokenBucket
    tokens: TokenBucket

    def book(self, bucket: TokenBucket, units: float = 1) -> None:
        """Takes units out of one of its buckets, if one is there; 429, with Retry-After, if not."""
        wait = bucket.wait_seconds()
        if wait > 0:
            limit = "tokens" if bucket is self.tokens else "requests"
            raise ApiError(
                429, f"The key {self.name!r} has used its {limit} of this minute: come again in "
                f"{wait:.1f} s.", None, "rate_limit_exceeded",
                {"Retry-After": str(max(1, round(wait + 0.5)))},
            )  # fmt: skip
        bucket.use(units)


class Clients:
    """The keys of a server.

    Args:
        clients: all that have one; none: everybody may ask.
        admin_key: of the administration; None: it is off.
    """

    def __init__(self, clients: Sequence[Client], admin_key: bytes | None = None) -> None:
        require(
            all(client.key for client in clients) and admin_key != b"",
            "A key of the server must have at least one character: who sends none would have it. "
            "Remove the empty one.", ..., "",
        )  # fmt: skip
        keys = [client.key for client in clients] + [admin_key] * (admin_key is not None)
        require(
            len(set(keys)) == len(keys), "A key of the server must have one owner: of two "
            "entries with the same key, or of a client and the administration, only one would "
            "count. Give each its own.", ..., "",
        )  # fmt: skip
        self.clients, self.admin_key = list(clients), admin_key
        self._nobody = Client("", b"", TokenBucket(None), TokenBucket(None))

    def of(self, token: bytes) -> Client | None:
        """The client whose key it is; anybody where there are no keys."""
        if not self.clients:
            return self._nobody
        # All are compared, so that the time tells nothing.
        found = [client for client in self.clients if hmac.compare_digest(client.key, token)]
        return found[0] if found else None

    def is_admin(self, token: bytes) -> bool:
        """Whether it is the administration's key."""
        return self.admin_key is not None and hmac.compare_digest(self.admin_key, token)


class _KeyEntry(BaseModel):
    """An entry of `api_keys_file`; limits that it does not name are the settings'."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    name: str | None = None
    key: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)


_ENTRIES = TypeAdapter(Annotated[list[_KeyEntry], Field(min_length=1)])


def read_clients(settings: ServeSettings) -> Clients:
    """The keys that the settings name.

    Raises:
        Problems: a file that holds something else.
    """
    entries: list[_KeyEntry] = []
    if settings.api_keys is not None:
        keys = [key.strip() for key in settings.api_keys.get_secret_value().split(",")]
        if not all(keys):
            raise Problems(
                f"api_keys must hold keys with a comma between them: key {keys.index('') + 1} of "
                f"{len(keys)} is empty, and requests without one would match. Remove the comma."
            )
        entries += [_KeyEntry(key=key) for key in keys]
    if settings.api_keys_file is not None:
        text, problem = settings.api_keys_file.read_text(encoding="utf-8"), ""
        try:
            entries += _ENTRIES.validate_python(read_text(text))
        except yaml.YAMLError:
            problem = "it is not YAML"
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            at = [f"entry {k + 1}" if isinstance(k, int) else k for k in first["loc"]]
            problem = ": ".join([*at, first["msg"]])
        if problem:  # raised here, since the errors above would show the keys
            raise Problems(
                "api_keys_file must hold a YAML list of {name, key, requests_per_minute, "
                f"tokens_per_minute}}, of which each has at least a key: {problem}. Correct the "
                "file.",
            )  # fmt: skip
    if settings.has_replicas:
        for name in RATES:
            if any(name in entry.model_fields_set for entry in entries):
                raise Problems(f"{name} of api_keys_file {ONE_REPLICA}.")
    clients = []
    for i, entry in enumerate(entries):
        buckets = [
            TokenBucket(getattr(entry if rate in entry.model_fields_set else settings, rate))
            for rate in RATES
        ]
        clients.append(Client(entry.name or f"key {i}", entry.key.encode(), *buckets))
    admin = settings.admin_key.get_secret_value() if settings.admin_key else None
    if settings.admin_key_file is not None:
        admin = settings.admin_key_file.read_text(encoding="utf-8")
    return Clients(clients, None if admin is None else admin.strip().encode())


# --- in front of the routes ----------------------------------------------------------------------

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}\Z", re.ASCII)
_KEY = HTTPBearer(auto_error=False, scheme_name="key", description="A client's key.")
_ADMIN = HTTPBearer(auto_error=False, scheme_name="admin_key", description="The administration's.")
_Given = Annotated[HTTPAuthorizationCredentials | None, Security(_KEY)]
_GivenByAdmin = Annotated[HTTPAuthorizationCredentials | None, Security(_ADMIN)]
_NO_KEY = "invalid_api_key"


async def client_key(request: Request, given: _Given) -> None:
    """The dependency of routes that want a client's key, whose request is counted; anybody's where
    there are no keys."""
    client = request.scope["state"]["client"]
    refuse(client is None, "The API key is missing or wrong. Give it as "
           "`Authorization: Bearer KEY`.", None, _NO_KEY, 401)  # fmt: skip
    client.book(client.requests)


async def admin_key(request: Request, given: _GivenByAdmin) -> None:
    """The dependency of routes that want the administration's key: 401 without it; 403 to any where
    the administration is off."""
    clients, key = request.app.state.clients, request.scope["state"]["key"]
    if clients.is_admin(key):
        return
    message = "The key is missing or wrong: the administration has one of its own."
    if clients.admin_key is None:
        message = "The administration is off: the server was started without an admin_key."
        refuse(key, message, None, "admin_off", 403)
    raise ApiError(401, message, None, _NO_KEY)


class Gate:
    """The ASGI application that stands before another one.

    Args:
        names_requests: whether answers name their request (`x-request-id`).
    """

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, clients: Clients, names_requests: bool = True
    ) -> None:
        self._app, self._settings, self._clients = app, settings, clients
        self._names_requests = names_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.match(given) else f"req-{uuid.uuid4().hex}"
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key.strip() if kind.lower() == b"bearer" else b""
        client, method, status = self._clients.of(key), scope["method"], 0
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "key": key, "client": client}
        if method == "HEAD":  # answered as GET, whose body the HTTP server leaves out
            scope = {**scope, "method": "GET"}

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._names_requests:
                    named = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
                    message = {**message, "headers": named}
            await send(message)

        start = time.perf_counter()
        try:
            known = client is not None or self._clients.is_admin(key)
            body = await self._body(headers, receive) if known else b""
            state["size"] = len(body)
            if request_id != given and b'"seed"' in body:
                state["digest"] = hashlib.blake2b(body, digest_size=16).hexdigest()
            unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay() -> Message:  # the body, then the client's further messages
                return unread.pop() if unread else await receive()

            await self._app(scope, replay, answer)
        except ApiError as error:
            if not status:  # else it has begun: the client sees that it is cut off
                await error.response()(scope, receive, answer)
        finally:
            if logger.isEnabledFor(logging.INFO):
                host, _ = scope.get("client") or ("", 0)
                told = {
                    "request_id": request_id, "method": method, "path": scope["path"],
                    "status": status, "client": client.name if client and client.name else host,
                    "seconds": round(time.perf_counter() - start, 4),
                }  # fmt: skip
                logger.info(json.dumps(told))

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """All of the body, before anybody parses it; 413 too large, 408 too slow. Behind a 413 the
        connection stays open, and what still comes is thrown away: a client that is cut off while
        it sends never reads why."""
        most, seconds = self._settings.max_body_bytes, self._settings.slow_request_s
        told = f"The request must have at most {most} bytes.", None, "request_too_large", 413
        length = headers.get(b"content-length", b"0")
        refuse(length.isdigit() and int(length) > most, *told)
        body, more = bytearray(), True
        try:
            with anyio.fail_after(seconds):
                while more:
                    message = await receive()
                    gone = message["type"] == "http.disconnect"
                    refuse(gone, "The client went away.", code="disconnected")
                    body += message.get("body", b"")
                    refuse(len(body) > most, *told)
                    more = message.get("more_body", False)
        except TimeoutError:
            text = f"The request took longer than {seconds:g} s to arrive."
            raise ApiError(408, text, None, "slow_request") from None
        return bytes(body)


MAX_PARTS = 2**15
"""Objects and lists of a request: reading, copying and validating them takes the event loop, and
each pass of Python's garbage collector over them stops all threads."""
# The end is left out where it is missing: looking for it from each quote would be quadratic.
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)


def _has_many_parts(body: bytes) -> bool:
    return body.count(b"[") + body.count(b"{") > MAX_PARTS


class _JsonRequest(Request):
    """Parses its body as pydantic does, several times faster than Python's `json`."""

    async def json(self) -> Any:
        """The body. Halves of characters, other encodings than UTF-8, more than 200 levels of
        nesting, on which what walks it would fail, and very many objects and lists are errors."""
        body = await self.body()
        if _has_many_parts(body) and _has_many_parts(_TEXT.sub(b"", body)):
            raise HTTPException(400, f"the request must have at most {MAX_PARTS} objects and lists")
        try:
            # A cache of strings doubles the time of many different keys.
            return from_json(body, cache_strings="none")
        except ValueError as error:
            raise HTTPException(400, f"the request must be JSON in UTF-8: {error}") from error


class JsonRoute(APIRoute):
    """A route whose body is parsed by `_JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json
