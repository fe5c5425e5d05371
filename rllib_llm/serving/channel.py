"""Messages between the server and its engine's process over a socket, each its size and a pickle.

    server: AsyncChannel, in its event loop ◀── socket pair ──▶ engine's process: Channel, blocking

The server never waits in its loop: what the socket does not take at once is buffered, and the
caller waits in `ready` until the buffer is small again.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

_HEAD = struct.Struct("!Q")  # bytes of the message behind it
_READ_BYTES = 2**20


def packed(message: Any) -> bytes:
    """The bytes of a message."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(body)) + body


class Messages:
    """Puts messages together from bytes that arrive in parts of any size."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def take(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with these bytes."""
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._bytes)
            end = _HEAD.size + size
            if len(self._bytes) < end:
                return
            message = pickle.loads(memoryview(self._bytes)[_HEAD.size : end])
            del self._bytes[:end]
            yield message


class Channel:
    """The blocking end. Any thread may send, one may receive.

    Args:
        connected: to the other end; closed with this.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._messages = Messages()
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Sends a message; waits while the other end does not read.

        Raises:
            OSError: the other end is gone.
        """
        data = packed(message)
        with self._sending:
            self.socket.sendall(data)

    def arrived(self) -> list[Any]:
        """Waits for bytes, and returns the messages that are complete with them, if any: one call
        of the interpreter for all of them.

        Raises:
            EOFError: the other end is gone.
        """
        try:
            data = self.socket.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        return list(self._messages.take(data))

    def receive(self) -> Any:
        """Receives the first message; no other follows before this end has sent one.

        Raises:
            EOFError: the other end is gone.
        """
        while not (messages := self.arrived()):
            pass
        (first,) = messages
        return first

    def close(self) -> None:
        """Closes it; the other end notices."""
        self.socket.close()


class AsyncChannel(asyncio.Protocol):
    """The end in an event loop, made in any thread and opened in the loop's.

    Args:
        connected: to the other end; shut down with this.
        on_message: called in the loop with each message.
        on_end: called in the loop once, when the other end is gone.
    """

    def __init__(
        self,
        connected: socket.socket,
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:
        self._socket, self._on_message, self._on_end = connected, on_message, on_end
        self._messages = Messages()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.Transport | None = None
        self._thread = 0
        self._can_write = asyncio.Event()

    async def open(self) -> None:
        """Sends and receives from now on, in the running loop; asked again it does nothing, since
        asyncio closes the socket of a transport that another has taken the place of."""
        if self._loop is not None:
            return
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._can_write.set()
        await self._loop.create_unix_connection(lambda: self, sock=self._socket)

    def send(self, message: Any) -> None:
        """Sends a message, or buffers it. From any thread.

        Raises:
            OSError: the other end is gone, or the loop has ended.
        """
        assert self._loop is not None, "open was called"
        data = packed(message)
        if threading.get_ident() == self._thread:
            self._write(data)
            return
        try:
            self._loop.call_soon_threadsafe(self._write, data)
        except RuntimeError as error:
            raise OSError("the event loop has ended") from error

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def ready(self) -> None:
        """Waits while the other end has much left to read."""
        await self._can_write.wait()

    def close(self) -> None:
        """Ends the connection, in the loop or after its end; the other end notices."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already
        if self._transport is None:
            self._socket.close()

    # --- called by the event loop --------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._messages.take(data):
            self._on_message(message)

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._can_write.set()
        self._on_end()
