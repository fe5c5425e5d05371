"""An event loop in its own thread, for coroutines and blocking calls.

It lives from batch to batch, as the clients do that are bound to it, and a loop that already runs
in the caller's thread (a notebook's) is no matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class ExitedError(RuntimeError):
    """`SystemExit` or the like, raised by a user's code: as it is it would end the event loop."""


def told(error: BaseException) -> str:
    """An exception in one line."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (of a user's class)
        text = "(its text cannot be read)"
    return text if isinstance(error, ExitedError) else f"{type(error).__name__}: {text}"


class EventLoop:
    """A running event loop; `run` waits for a coroutine from any other thread."""

    def __init__(self, name: str = "conversations") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result; an interruption here cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begins the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Ends the loop and its thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of a function: coroutine functions run in the loop, others in a thread.

    A thread that nobody waits for any more cannot be ended; it goes on behind the scenes, and holds
    up neither the loop nor the end of the process.
    """
    if inspect.iscoroutinefunction(function):
        return await harmless(function(*args, **kwargs))
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if waiting.done():
            return
        if error is None:
            waiting.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            waiting.set_exception(error)
        else:  # a future refuses StopIteration
            waiting.set_exception(ExitedError(told(error)))

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as raised:  # noqa: BLE001  (the thread's border: the caller gets it)
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="conversation-call", daemon=True).start()
    result = await waiting
    return await harmless(result) if inspect.isawaitable(result) else result


async def harmless(awaitable: Awaitable[Any]) -> Any:
    """The result of an awaitable.

    Raises:
        ExitedError: it raised what would end the loop and its thread.
    """
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise ExitedError(told(error)) from error
