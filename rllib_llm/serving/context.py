"""What belongs to a request beside its body."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from rllib_llm.serving.clients import Client
from rllib_llm.serving.service import Service
from rllib_llm.serving.sse import ClientGoneError, EventStream, while_there

GONE = 499  # nobody reads it; nginx's number in logs
Event = dict[str, Any] | bytes
"""Of an answer: what is sent as JSON, or that JSON."""


class RequestContext:
    """A request that was let in.

    Args:
        request: FastAPI's.
        service: that answers it.
        version: serial number of the weights that it asks for; None: the newest.
    """

    def __init__(self, request: Request, service: Service, version: int | None) -> None:
        self._request, self._service, self.version = request, service, version
        state = request.scope.get("state", {})
        self.request_id: str = state["request_id"]
        self.client: Client | None = state.get("client")

    async def answer(self, events: AsyncIterator[Event], stream: bool | None) -> Any:
        """The events as a stream, or the only one; what makes them ends when the client goes."""
        if stream:
            return EventStream(events, self._service.settings.slow_reader_s)
        try:
            whole = await while_there(self._request.receive, _only(events))
        except ClientGoneError:
            return JSONResponse({}, GONE)
        return JSONResponse(whole)


async def _only(events: AsyncIterator[Event]) -> Event:
    try:
        return await anext(events)
    finally:
        await events.aclose()  # type: ignore[attr-defined]  # of a generator


async def context_of(request: Request, service: Service, model: str | None) -> RequestContext:
    """The context of a request, once the weights are there that it asks for.

    Raises:
        ApiError: they are gone, or do not come.
    """
    service.check_open()
    wanted = request.headers.get("x-min-weight-version")
    await service.weights.wait_for(wanted, service.settings.weights_wait_s)
    weights = service.weights.named(model)
    return RequestContext(request, service, None if weights is None else weights.serial)
