"""The engine in its own process, so that HTTP's Python code does not delay its steps.

In one process both would want the same interpreter, and hand it to and fro with every operation of
the engine and every message to a client: at a few milliseconds a step that is a third of the time.

    server ── submit, abort, swap ... ──▶ EngineProcess ─── socket ──▶ EngineWorker (a ThreadHost)
    rows   ◀── tokens, ends, results ──── event loop    ◀── socket ── one message a step

The server's event loop reads the socket itself (`AsyncChannel`): a thread for it would wait for the
interpreter, and the loop for the thread, at every step. It never waits for the engine: what the
socket does not take at once is buffered, and the caller waits in `ready` until the buffer is small
again. The engine's process has a `multiprocessing.Connection`. `EngineProcess` starts it by

    python -m rllib_llm.serving.engine_process SOCKET
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rllib_llm.engines.engine_loop import settle
from rllib_llm.engines.protocol import Ended, EngineEndedError, Row, Tokens
from rllib_llm.serving.engine_host import ThreadHost
from rllib_llm.serving.settings import ENVIRONMENT_PREFIX, ServeSettings
from rllib_llm.shared.process import forget_startup

logger = logging.getLogger(__name__)

_ENDED = "The engine's process must be alive: its log says why it has ended."
_STOP_SECONDS = 10.0
_CODE_SECONDS = 1.0  # until a process that has closed its socket has an exit code
_MEMORY = Path("/dev/shm")  # where files need no disk
_SPARE = 1.2  # of the room that weights take there

# (id, result) of completions and calls: Tokens, then the end, a result or an error.
Events = list[tuple[int, Any]]
_HEAD = struct.Struct("!i")  # bytes of the message behind it, as `Connection` writes them
_READ_BYTES = 2**20


def pickled(message: Any) -> bytes:
    """The bytes of a message."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


class AsyncChannel:
    """A `Connection`'s other end, in an event loop. Made in any thread and opened in the loop's,
    which calls `on_message` with each message and `on_end` once, when the other end is gone.
    connected: to that; shut down with this."""

    def __init__(
        self, connected: socket.socket, on_message: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._socket, self._on_message, self._on_end = connected, on_message, on_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._thread = 0

    async def open(self) -> None:
        """Sends and receives from now on, in the running loop; asked again it does nothing, since
        asyncio closes the socket of a transport that another has taken the place of."""
        if self._loop is not None:
            return
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        reader, self._writer = await asyncio.open_unix_connection(
            sock=self._socket, limit=_READ_BYTES
        )
        self._receiving = asyncio.create_task(self._receive(reader, self._writer))

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                self._on_message(pickle.loads(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            pass  # the other end is gone
        except Exception:  # the border of the task
            logger.exception("A message of the engine could not be passed on.")
        writer.close()
        self._on_end()

    def send(self, message: Any) -> None:
        """Sends a message, or buffers it. From any thread. OSError: the loop has ended."""
        assert self._loop is not None, "open was called"
        body = pickled(message)
        data = _HEAD.pack(len(body)) + body
        if threading.get_ident() == self._thread:
            self._write(data)
            return
        try:
            self._loop.call_soon_threadsafe(self._write, data)
        except RuntimeError as error:
            raise OSError("the event loop has ended") from error

    def _write(self, data: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    async def ready(self) -> None:
        """Waits while the other end has much left to read."""
        with contextlib.suppress(OSError):  # it is gone, which `on_end` tells
            if self._writer is not None:
                await self._writer.drain()

    def close(self) -> None:
        """Ends the connection, in the loop or after its end; the other end notices."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already
        if self._writer is None:
            self._socket.close()


# --- the server's side ----------------------------------------------------------------------------


class EngineProcess:
    """As `ThreadHost`, with the engine in a process of its own. Results come in the event loop that
    `listen` is called in. `source` is of the model, as `load_causal_lm` takes it; what loading it
    raises is raised here."""

    def __init__(self, settings: ServeSettings, source: str) -> None:
        self._ids = itertools.count()
        self._futures: dict[int, Future] = {}
        self._on_tokens: dict[int, Callable[[Tokens], None]] = {}
        self._lock = threading.Lock()  # of what is waited for
        self._is_closed = self._is_closing = self.is_paused = False
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))  # it finds what this process does
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=_without_keys() | {"PYTHONPATH": path},
            )  # fmt: skip
        self._channel = AsyncChannel(ours, self._take, self._end)
        self.listen, self.ready = self._channel.open, self._channel.ready
        self.compile, self.score = partial(self._call, "compile"), partial(self._call, "score")
        self.count = partial(self._call, "count")
        keyless = settings.model_copy(update={"api_keys": None, "admin_key": None})
        try:
            with Connection(os.dup(ours.fileno())) as waiting:  # until the model is loaded
                waiting.send_bytes(pickled((keyless, source)))
                answer = pickle.loads(waiting.recv_bytes())
        except (EOFError, OSError):
            raise EngineEndedError(_ENDED) from None
        if isinstance(answer, Exception):
            self._process.wait()
            raise answer
        self.limits, self.fingerprint = answer

    # --- completions -------------------------------------------------------------------------

    def submit_all(self, rows: Sequence[Row], grammar: str | None = None) -> list[Future[Ended]]:
        futures: list[Future[Ended]] = [Future() for _ in rows]
        numbers, sent = [*map(self._expect, futures)], []
        for number, each in zip(numbers, rows, strict=True):
            if each.on_tokens is not None:
                self._on_tokens[number] = each.on_tokens
            sent.append((number, each.on_tokens is not None, replace(each, on_tokens=None)))
        self._send(numbers, "add", sent, grammar)
        return futures

    def _expect(self, future: Future) -> int:
        """The number under which a future's result will arrive."""
        number = next(self._ids)
        with self._lock:
            self.check_open()
            self._futures[number] = future
        future.add_done_callback(partial(self._forget, number))
        return number

    def _forget(self, number: int, future: Future) -> None:
        with self._lock:
            is_wanted = self._futures.pop(number, None) is not None
        self._on_tokens.pop(number, None)
        if is_wanted:  # it was cancelled, or settled on this side, as of a scoring that is aborted
            with contextlib.suppress(EngineEndedError):  # its row has ended with the process
                self._send((), "cancel", number)

    def abort(self, future: Future[Ended]) -> None:
        with self._lock:
            found = [number for number, each in self._futures.items() if each is future]
        for number in found:
            self._send((), "end", number)

    # --- calls -------------------------------------------------------------------------------

    def release(self, pin: int) -> None:
        with contextlib.suppress(EngineEndedError):  # it has ended, and holds nothing
            self._send((), "release", pin)

    def swap(self, weights: Mapping[str, torch.Tensor], serial: int) -> list[int]:
        """The weights are handed over in a file, in memory where there is room for them."""
        memory = None
        if _MEMORY.is_dir():
            held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                    for tensor in weights.values()}  # fmt: skip
            free = os.statvfs(_MEMORY)
            has_room = free.f_bavail * free.f_frsize > _SPARE * sum(held.values())
            memory = _MEMORY if has_room else None
        with tempfile.TemporaryDirectory(prefix="weights-", dir=memory) as folder:
            file = str(Path(folder) / "weights")
            torch.save(dict(weights), file)
            return self._call("swap", file, serial).result()

    def pause(self) -> None:
        self._send((), "pause")
        self.is_paused = True

    def resume(self) -> None:
        self._send((), "resume")
        self.is_paused = False

    def _call(self, name: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._send((self._expect(future),), name, *arguments)
        return future

    def check_open(self) -> None:
        if self._is_closed:
            raise EngineEndedError(_ENDED)

    def close(self) -> None:
        """Its process notices that this end is closed, and ends."""
        self._is_closing = True
        self._channel.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._end()

    # --- the socket --------------------------------------------------------------------------

    def _send(self, numbers: Sequence[int], name: str, *arguments: Any) -> None:
        """Calls a method of the worker; its result is that of the numbers."""
        self.check_open()
        try:
            self._channel.send((numbers, name, *arguments))
        except OSError as error:
            raise EngineEndedError(_ENDED) from error

    def _end(self) -> None:
        """Fails all pending calls, since the process has ended."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            left = list(self._futures.values())
        if not was_closed and not self._is_closing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CODE_SECONDS)
            logger.error("The engine's process has ended (exit code %s).", self._process.poll())
        for future in left:
            settle(future, EngineEndedError(_ENDED))

    def _take(self, events: Events) -> None:
        """Passes on the results of a step."""
        for number, what in events:
            if isinstance(what, Tokens):
                on_tokens = self._on_tokens.get(number)
                if on_tokens is not None:  # else nobody waits for them any more
                    on_tokens(what)
                continue
            with self._lock:
                future = self._futures.pop(number, None)
            if future is not None:
                settle(future, what)


def _without_keys() -> dict[str, str]:
    """The engine's environment, without the server's keys."""
    return {k: v for k, v in os.environ.items() if not k.upper().startswith(ENVIRONMENT_PREFIX)}


EngineHost = ThreadHost | EngineProcess

# --- the engine's side ---------------------------------------------------------------------------


class EngineWorker(ThreadHost):
    """The engine of a server in another process, to which the connection is. The answers are
    numbers, under which the server waits for a result, a method's name and its arguments."""

    def __init__(self, *model: Any, connection: Connection, **further: Any) -> None:
        self._connection, self._sends = connection, threading.RLock()
        self._events: deque[tuple[int, Any]] = deque()
        self._futures: dict[int, Future[Any]] = {}
        super().__init__(*model, after_step=self._flush, **further)

    def _send(self, message: Any) -> None:
        data = pickled(message)
        with self._sends, contextlib.suppress(OSError):  # the server has ended, which `run` sees
            self._connection.send_bytes(data)

    def run(self) -> None:
        """Sends facts about the model, then carries out requests until the connection ends."""
        self._send((self.limits, self.fingerprint))
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.call(*pickle.loads(self._connection.recv_bytes()))
        self.close()

    def call(self, numbers: Sequence[int], name: str, *arguments: Any) -> None:
        """Calls a method and sends its result, or that of the future that it returns."""

        def work() -> None:
            try:
                result = getattr(self, name)(*arguments)
            except Exception as error:  # noqa: BLE001  (the border of the process)
                result = _portable(error)
            if isinstance(result, Future):
                for number in numbers:
                    self._expect(number, result)
                result.add_done_callback(lambda _: self._flush())  # in whichever thread it comes
            elif result is not None:
                self._send([(number, result) for number in numbers])

        if name == "swap":  # takes a while
            threading.Thread(target=work).start()
        else:
            work()

    def add(self, sent: Sequence[tuple[int, bool, Row]], grammar: str | None) -> None:
        """Adds rows: the number of each, and whether its tokens are streamed."""
        def noted(number: int, new: Tokens) -> None:
            self._events.append((number, new))

        rows = [replace(each, on_tokens=partial(noted, number)) if streams else each
                for number, streams, each in sent]  # fmt: skip
        for (number, *_), future in zip(sent, self.submit_all(rows, grammar), strict=True):
            self._expect(number, future)
        self._flush()  # what had ended before it was looked after

    def _expect(self, number: int, future: Future[Any]) -> None:
        self._futures[number] = future
        future.add_done_callback(partial(self._note_end, number))

    def swap(self, file: Any, serial: int) -> list[int]:
        """As `ThreadHost.swap`; the weights are in a file."""
        return super().swap(torch.load(file, mmap=True), serial)

    def _note_end(self, number: int, future: Future[Any]) -> None:
        self._futures.pop(number, None)
        if not future.cancelled():
            error = future.exception()
            self._events.append((number, _portable(error) if error else future.result()))

    def _flush(self) -> None:
        """Sends pending results in order. Thread-safe."""
        with self._sends:
            events: Events = [self._events.popleft() for _ in range(len(self._events))]
            if events:
                self._send(events)

    def cancel(self, number: int) -> None:
        """Nobody waits for it any more."""
        if (future := self._futures.get(number)) is not None:  # it has not ended meanwhile
            future.cancel()

    def end(self, number: int) -> None:
        """Aborts a row, returning its partial output."""
        if (future := self._futures.get(number)) is not None:
            self.abort(future)


def _portable(error: BaseException) -> Exception:
    """The error, or its text where it cannot be sent."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (whatever pickling a stranger's class raises)
        return RuntimeError(f"{type(error).__name__}: {error}")


def main() -> None:
    """Runs the engine of the server with the given socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server drains, and then ends this
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    settings, source = pickle.loads(connection.recv_bytes())
    try:
        worker = EngineWorker.open(settings, source, connection=connection)
    except Exception as error:  # noqa: BLE001  (the border of the process: the server raises it)
        connection.send_bytes(pickled(_portable(error)))
        return
    forget_startup()
    worker.run()


if __name__ == "__main__":
    main()
