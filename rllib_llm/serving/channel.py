"""Messages between two processes over a socket, each its size and a pickle."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

_HEAD = struct.Struct("!Q")  # bytes of the message behind it
_READ_BYTES = 2**20


class Messages:
    """The messages in bytes that come as they please."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def take(self, data: bytes) -> Iterator[Any]:
        """Those that are whole with these bytes."""
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._bytes)
            end = _HEAD.size + size
            if len(self._bytes) < end:
                return
            message = pickle.loads(self._bytes[_HEAD.size : end])
            del self._bytes[:end]
            yield message


class Channel:
    """One end of a socket. Any thread may send, and one receive.

    Args:
        connected: to the other end; closed with this.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._messages = Messages()
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Waits where the other end does not keep up.

        Raises:
            OSError: the other end is gone.
        """
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self.socket.sendall(_HEAD.pack(len(packed)) + packed)

    def arrived(self, *, waits: bool) -> list[Any]:
        """The messages that have come, as many as there are: whoever receives one at a time has to
        get hold of the interpreter for each, beside a thread that hardly lets go of it.

        Args:
            waits: for some bytes at least. A message may still be incomplete then.

        Raises:
            EOFError: the other end is gone.
            BlockingIOError: nothing has come.
        """
        try:
            data = self.socket.recv(_READ_BYTES, 0 if waits else socket.MSG_DONTWAIT)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        return list(self._messages.take(data))

    def receive(self) -> Any:
        """The first message of all.

        Raises:
            EOFError: the other end is gone.
        """
        while not (messages := self.arrived(waits=True)):
            pass
        (first,) = messages
        return first

    def close(self) -> None:
        """Closes it."""
        self.socket.close()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed here."""
        return self.socket.fileno() == -1
