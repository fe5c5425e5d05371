"""Rows of an engine in another thread, as an event loop sees them.

engine's thread ── on_tokens ──▶ Mailbox ── one wake-up for a step ──▶ event loop ──▶ RowEvents

What comes in the event loop itself, as of an engine in another process, is there at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from typing import Any

from rllib_llm.engines.completions import Tokens
from rllib_llm.engines.engine_loop import Wanted
from rllib_llm.engines.protocol import Ended
from rllib_llm.serving.engine_host import EngineHost


class Mailbox:
    """Calls from any thread, made in an event loop in their order. Made in that loop.

    Args:
        events: the loop.
    """

    def __init__(self, events: asyncio.AbstractEventLoop) -> None:
        self._events = events
        self._thread = threading.get_ident()
        self._calls: deque[tuple[Callable[..., None], tuple]] = deque()
        self._is_woken = False

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Has `call` called soon; at once in the loop's own thread, unless others come first."""
        if threading.get_ident() == self._thread and not self._calls:
            call(*arguments)
            return
        self._calls.append((call, arguments))
        if not self._is_woken:
            self._is_woken = True
            self._events.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        while self._calls:
            call, arguments = self._calls.popleft()
            call(*arguments)


class RowEvents:
    """What becomes of some rows, in the order in which it comes.

    async for i, event in rows:      # Tokens, then Ended or an exception, of row i
        ...
    rows.close()                     # whatever has not ended leaves the engine

    Args:
        host: of the engine.
        mailbox: of the event loop that waits.
        wanted: the rows.
    """

    def __init__(self, host: EngineHost, mailbox: Mailbox, wanted: Sequence[Wanted]) -> None:
        self._events: deque[tuple[int, Tokens | Ended | BaseException]] = deque()
        self._reader: asyncio.Future[None] | None = None  # that waits for an event
        self._host, self._mailbox = host, mailbox
        self._num_left = len(wanted)
        self._futures = host.submit_all(
            [replace(each, on_tokens=self._teller(i)) for i, each in enumerate(wanted)]
        )
        for i, future in enumerate(self._futures):
            future.add_done_callback(self._ender(i))

    def _teller(self, i: int) -> Callable[[Tokens], None]:
        return lambda tokens: self._mailbox.post(self._put, i, tokens)

    def _ender(self, i: int) -> Callable[[Future], None]:
        def tell(future: Future) -> None:
            if not future.cancelled():
                self._mailbox.post(self._put, i, future.exception() or future.result())

        return tell

    def _put(self, i: int, event: Tokens | Ended | BaseException) -> None:
        self._events.append((i, event))
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def fail(self, error: Exception) -> None:
        """Has whoever waits get an error, such as a timeout."""
        self._put(-1, error)

    def __aiter__(self) -> RowEvents:
        return self

    async def __anext__(self) -> tuple[int, Tokens | Ended]:
        while not self._events:
            if not self._num_left:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        i, event = self._events.popleft()
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Ended):
            self._num_left -= 1
            return i, event
        return i, self._with_later(i, event)

    def _with_later(self, i: int, tokens: Tokens) -> Tokens:
        """Tokens of a row with those that came behind them: a reader that is slower than the engine
        is given more at a time."""
        later = [tokens]
        while self._events and self._events[0][0] == i:
            event = self._events[0][1]
            if not isinstance(event, Tokens):
                break
            later.append(event)
            self._events.popleft()
        if len(later) == 1:
            return tokens
        return Tokens(*(list(chain.from_iterable(parts)) for parts in zip(*later, strict=True)))

    def leave(self, i: int) -> None:
        """Takes a row out of the engine; nothing more comes of it."""
        if self._futures[i].cancel():
            self._num_left -= 1
            self._wake_reader()

    def abort(self) -> None:
        """Takes all rows out of the engine: they end, with what there is of them."""
        for future in self._futures:
            self._host.abort(future)

    def close(self) -> None:
        """Takes all rows out of the engine."""
        for future in self._futures:
            future.cancel()
