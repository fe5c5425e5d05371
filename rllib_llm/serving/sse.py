"""Answers that come while they are made, as server-sent events; and what ends with its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import Response

from rllib_llm.serving.cutoff import Cutoff
from rllib_llm.serving.errors import ApiError, error_body
from rllib_llm.serving.security import Receive, Scope, Send

PING_SECONDS = 15.0
Result = TypeVar("Result")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class EventStream(Response):
    """A streamed answer, as an ASGI application. It begins with the first event, so that an error
    before it has a status of its own; an error behind it is an event.

    Args:
        events: each is sent as JSON, which it may be already; closed when the client goes away or
            reads nothing for long.
        slow_reader_s: seconds that the client may read nothing.
    """

    def __init__(self, events: AsyncIterator[dict[str, Any] | bytes], slow_reader_s: float) -> None:
        super().__init__()
        self._events, self._slow_reader_s = events, slow_reader_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with Cutoff() as cutoff:
            leaving = asyncio.ensure_future(until_gone(receive))
            leaving.add_done_callback(cutoff.cut)
            try:
                await self._send_all(send)
            finally:
                leaving.remove_done_callback(cutoff.cut)
                leaving.cancel()

    async def _send_all(self, to_client: Send) -> None:
        send = _Patient(to_client, self._slow_reader_s)
        try:
            first = await anext(self._events)
            await send.start()
            await send.data(first)
            async for event in self._events:
                await send.data(event)
        except (ApiError, StopAsyncIteration) as error:
            if isinstance(error, ApiError):
                if not send.has_started:
                    raise
                await send.data(error.body())
        except ClientGoneError:
            return
        except Exception:
            if send.has_started:
                await send.data(error_body(500, "The server failed; its log says how."))
            raise
        finally:
            send.close()
            await self._events.aclose()  # type: ignore[attr-defined]  # of a generator
        await send.done()


class _Patient:
    """Sends, and tells after a while that nobody reads; now and then it says that it is alive.

    One timer looks after both, whatever the number of messages: starting one for each would take as
    long as writing them.
    """

    def __init__(self, send: Send, slow_reader_s: float) -> None:
        self._send, self._slow_reader_s = send, slow_reader_s
        self._events = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._is_late = self._is_sending = self.has_started = False
        self._since = self._events.time()  # when sending, or being idle, began
        self._looks_after_s = min(PING_SECONDS, slow_reader_s) / 4
        self._timer = self._events.call_later(self._looks_after_s, self._look)
        self._pings: set[asyncio.Task] = set()

    async def start(self) -> None:
        self.has_started = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]  # fmt: skip
        await self._out({"type": "http.response.start", "status": 200, "headers": headers})

    async def data(self, event: dict[str, Any] | bytes) -> None:
        encoded = event if isinstance(event, bytes) else to_json(event)
        await self._body(b"data: " + encoded + b"\n\n")

    def _look(self) -> None:
        self._timer = self._events.call_later(self._looks_after_s, self._look)
        seconds = self._events.time() - self._since
        if self._is_sending:
            if seconds >= self._slow_reader_s and self._task is not None:
                self._is_late = True
                self._task.cancel()
        elif seconds >= PING_SECONDS and self.has_started:
            task = self._events.create_task(self._body(b": ping\n\n"))
            self._pings.add(task)
            task.add_done_callback(self._pings.discard)

    def close(self) -> None:
        """Looks after nothing any more."""
        self._timer.cancel()

    async def done(self) -> None:
        await self._body(b"data: [DONE]\n\n", more=False)

    async def _body(self, body: bytes, more: bool = True) -> None:
        await self._out({"type": "http.response.body", "body": body, "more_body": more})

    async def _out(self, message: dict[str, Any]) -> None:
        self._is_sending, self._since = True, self._events.time()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._is_late:
                raise ClientGoneError from None
            raise
        finally:
            self._is_sending, self._since = False, self._events.time()


async def until_gone(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Receive, work: Awaitable[Result]) -> Result:
    """What `work` gives; it is cancelled when the client goes away.

    Raises:
        ClientGoneError: it went.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
