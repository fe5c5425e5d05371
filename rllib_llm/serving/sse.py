"""Answers that come while they are made, as server-sent events; and what ends with its client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.responses import Response

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
        events: each is sent as JSON; closed when the client goes away or reads nothing for long.
        slow_reader_s: seconds that the client may read nothing.
    """

    def __init__(self, events: AsyncIterator[dict[str, Any]], slow_reader_s: float) -> None:
        super().__init__()
        self._events, self._slow_reader_s = events, slow_reader_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
        try:
            await sending
        except asyncio.CancelledError:
            if not leaving.done():
                raise

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
    """Sends, and tells after a while that nobody reads; now and then it says that it is alive."""

    def __init__(self, send: Send, slow_reader_s: float) -> None:
        self._send, self._slow_reader_s = send, slow_reader_s
        self._events = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._is_late = self._is_sending = self.has_started = False
        self._sent_at = self._events.time()
        self._pinger = self._events.call_later(PING_SECONDS, self._ping)
        self._pings: set[asyncio.Task] = set()

    async def start(self) -> None:
        self.has_started = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]  # fmt: skip
        await self._out({"type": "http.response.start", "status": 200, "headers": headers})

    async def data(self, event: dict[str, Any]) -> None:
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        await self._body(b"data: " + text.encode() + b"\n\n")

    def _ping(self) -> None:
        """A comment, where there was nothing else to say for long."""
        is_idle = self._events.time() - self._sent_at >= PING_SECONDS
        if is_idle and self.has_started and not self._is_sending:
            task = self._events.create_task(self._body(b": ping\n\n"))
            self._pings.add(task)
            task.add_done_callback(self._pings.discard)
        self._pinger = self._events.call_later(PING_SECONDS, self._ping)

    def close(self) -> None:
        """No more pings."""
        self._pinger.cancel()

    async def done(self) -> None:
        await self._body(b"data: [DONE]\n\n", more=False)

    async def _body(self, body: bytes, more: bool = True) -> None:
        await self._out({"type": "http.response.body", "body": body, "more_body": more})

    async def _out(self, message: dict[str, Any]) -> None:
        timer = self._events.call_later(self._slow_reader_s, self._late)
        self._is_sending = True
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._is_late:
                raise ClientGoneError from None
            raise
        finally:
            self._is_sending = False
            self._sent_at = self._events.time()
            timer.cancel()

    def _late(self) -> None:
        self._is_late = True
        if self._task is not None:
            self._task.cancel()


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
