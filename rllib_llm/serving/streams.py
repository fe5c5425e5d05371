"""An answer on its way: pieces of a completion, server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rllib_llm.data.decoding import TextStream
from rllib_llm.engines.protocol import Ended, Likeliest, Tokens
from rllib_llm.serving.schemas import FAILED, ApiError, refuse


@dataclass
class Piece:
    """The part of a completion since the previous piece."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[Likeliest] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of each token, the serial number of the weights that sampled it."""
    offsets: list[int] = field(default_factory=list)
    """Of each token, where its text begins in the completion's."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, other: Piece) -> None:
        """Puts a later piece behind this one."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.likeliest += other.likeliest
        self.versions += other.versions
        self.offsets += other.offsets
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason


class Choice:
    """Converts the tokens of one row into pieces. Streams send the pieces and other responses join
    them, so both give the same text. That of a stop token is left out; `eos_token_ids` are those of
    them that the model ends with anyway."""

    def __init__(
        self, text: TextStream, stop_token_ids: Sequence[int], eos_token_ids: Sequence[int]
    ) -> None:
        self._text = text
        self._stops, self._eos = frozenset(stop_token_ids), frozenset(eos_token_ids)
        self.is_done = False

    def tokens(self, new: Tokens) -> Piece:
        """The piece that sampled tokens add; tokens after a stop sequence add nothing."""
        piece = Piece()
        for i, (token, logprob) in enumerate(zip(new.token_ids, new.logprobs, strict=True)):
            if self.is_done:
                break
            piece.token_ids.append(token)
            piece.logprobs.append(logprob)
            piece.offsets.append(self._text.length)
            if new.likeliest:
                piece.likeliest.append(new.likeliest[i])
            piece.versions.append(new.versions[i])
            if token not in self._stops:  # else it is the last
                piece.text += self._text.push(token)
            if self._text.stopped_by is not None:
                self._finish(piece, "stop", self._text.stopped_by)
        return piece

    def end(self, ended: Ended) -> Piece:
        """The last piece; 500 where the model gave no numbers."""
        piece = Piece()
        if self.is_done:
            return piece
        refuse(ended.finish == "error",
               "The model's logits are not finite: its weights are broken.", status=500)
        piece.text = self._text.finish()
        if self._text.stopped_by is not None:
            self._finish(piece, "stop", self._text.stopped_by)
            return piece
        last = ended.token_ids[-1] if ended.token_ids else None
        is_named = ended.finish == "stop" and last not in self._eos
        reasons = {"aborted": "abort"}
        self._finish(piece, reasons.get(ended.finish, ended.finish), last if is_named else None)
        return piece

    def _finish(self, piece: Piece, reason: str, stop_reason: str | int | None) -> None:
        self.is_done = True
        piece.finish_reason, piece.stop_reason = reason, stop_reason


GONE = 499  # nobody reads it; nginx's number in logs
PING_SECONDS = 15.0
Event = dict[str, Any] | bytes
"""Of an answer: what is sent as JSON, or that JSON."""
Result = TypeVar("Result")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def while_there(
    receive: Receive,
    work: Callable[[], Awaitable[Result]],
    beside: Callable[[], Awaitable[None]] | None = None,
) -> Result:
    """Returns or raises what `work` does; ClientGoneError, and it is cancelled, where the client
    disconnects or `beside`, which runs meanwhile, returns. receive: ASGI's, behind the body."""
    done: list[Result] = []
    failed: Exception | None = None
    async with anyio.create_task_group() as group:

        async def leaves() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        async def watch(ends: Callable[[], Awaitable[None]]) -> None:
            await ends()
            group.cancel_scope.cancel()

        for ends in filter(None, (leaves, beside)):
            group.start_soon(watch, ends)
        try:
            done.append(await work())
        except Exception as error:  # noqa: BLE001  (raised below, as it is and not in a group)
            failed = error
        group.cancel_scope.cancel()
    if failed is not None:
        raise failed
    if not done:
        raise ClientGoneError
    return done[0]


def encoded(event: Any) -> bytes:
    """The event as JSON, in which numbers that are too large are null."""
    return event if isinstance(event, bytes) else to_json(event, inf_nan_mode="null")


_LEVELS = 5  # from an answer to the likeliest tokens at a place of one of its texts


def encoded_in_parts(event: Any, levels: int = _LEVELS) -> bytes:
    """As `encoded`, for a thread: other threads may run in between, which one call for all of a
    large answer would not let. Keys are texts."""
    if levels and isinstance(event, dict):
        pairs = (
            to_json(str(name)) + b":" + encoded_in_parts(value, levels - 1)
            for name, value in event.items()
        )
        return b"{" + b",".join(pairs) + b"}"
    if levels and isinstance(event, list):
        return b"[" + b",".join(encoded_in_parts(each, levels - 1) for each in event) + b"]"
    return encoded(event)


class EventStream(Response):
    """A streamed response. It starts with the first event, so that an earlier error has its own
    status code; a later one is sent as an event. Comments keep the connection alive while nothing
    is sent.

    Args:
        events: each is sent as JSON, which it may be already; closed when the client goes away or
            reads nothing for long.
        slow_reader_s: seconds that the client may read nothing.
        names: whether each is named by its "type".
        ends: what is sent behind the last event.
    """

    def __init__(
        self, events: AsyncGenerator[Event, None], slow_reader_s: float, *, names: bool = False,
        ends: bytes = b"data: [DONE]\n\n",
    ) -> None:  # fmt: skip
        super().__init__()
        self._events, self._slow_reader_s = events, slow_reader_s
        self._names, self._ends = names, ends
        self._is_sending = False
        self._since = 0.0  # when sending, or being idle, began
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._since = send, anyio.current_time()
        with contextlib.suppress(ClientGoneError):
            await while_there(receive, self._send_all, self._look_after)

    async def _look_after(self) -> None:
        """Pings; returns when the client reads nothing for long."""
        while True:
            await anyio.sleep(min(PING_SECONDS, self._slow_reader_s) / 4)
            seconds = anyio.current_time() - self._since
            if self._is_sending and seconds >= self._slow_reader_s:
                return
            if not self._is_sending and self._num_sent and seconds >= PING_SECONDS:
                await self._body(b": ping\n\n")

    async def _send_all(self) -> None:
        try:
            async for event in self._events:
                await self._data(event)
        except ApiError as error:
            if not self._num_sent:
                raise
            await self._data(self._told(error))
        except Exception:
            if self._num_sent:
                await self._data(self._told(ApiError(500, FAILED)))
            raise
        finally:
            await self._events.aclose()
        await self._body(self._ends, more=False)

    async def _data(self, event: Event) -> None:
        if not self._num_sent:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"),
            ]  # fmt: skip
            await self._out({"type": "http.response.start", "status": 200, "headers": headers})
        self._num_sent += 1
        name = b""
        if self._names and isinstance(event, dict):
            name = b"event: " + str(event["type"]).encode() + b"\n"
        await self._body(name + b"data: " + encoded(event) + b"\n\n")

    def _told(self, error: ApiError) -> dict[str, Any]:
        body = error.body()
        if self._names:  # flat, as OpenAI documents it, and nested, which its clients raise
            body |= {**body["error"], "type": "error", "sequence_number": self._num_sent}
        return body

    async def _body(self, body: bytes, more: bool = True) -> None:
        await self._out({"type": "http.response.body", "body": body, "more_body": more})

    async def _out(self, message: Message) -> None:
        self._is_sending, self._since = True, anyio.current_time()
        await self._send(message)
        self._is_sending, self._since = False, anyio.current_time()
