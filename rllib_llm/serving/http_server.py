"""The server in this process, without Ray Serve: uvicorn, a socket, and its end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rllib_llm.serving.app import make_app
from rllib_llm.serving.clients import Clients
from rllib_llm.serving.service import Service


class HttpServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, or `should_exit`. Then it first says that it is not ready,
    waits for the answers under way within `drain_s`, and closes.

    Args:
        service: that answers.
        clients: who may ask; None: as the service's settings say.
        given: an open socket to listen on; None: one of the settings' host and port.
    """

    def __init__(
        self, service: Service, clients: Clients | None = None, given: socket.socket | None = None
    ) -> None:
        settings = service.settings
        super().__init__(
            uvicorn.Config(
                make_app(service, clients), host=settings.host, port=settings.port,
                http=timed_protocol(settings.slow_request_s), access_log=False,
                log_level="warning", timeout_graceful_shutdown=5, server_header=False,
            )
        )  # fmt: skip
        self._service = service
        self._given = given
        self.on_start: Callable[[], Any] = lambda: None
        """Called when it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        await super().startup(sockets)
        if self.started:
            self.on_start()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """As uvicorn's; from the signal on the server is not ready."""
        self._service.is_draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, behind the drain."""
        await self._service.drain(self._service.settings.drain_s)
        await super().shutdown(sockets)

    def serve_here(self) -> None:
        """Serves in this thread until the end."""
        self.run(None if self._given is None else [self._given])

    @property
    def port(self) -> int:
        """That it listens on."""
        return int(self.servers[0].sockets[0].getsockname()[1])


@contextmanager
def in_thread(service: Service, clients: Clients | None = None) -> Iterator[str]:
    """The server's address on the loopback device, while it runs in a thread of this process.

    Raises:
        RuntimeError: it does not start.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(service, clients, listening)
    thread = threading.Thread(target=server.serve_here, name="http-server", daemon=True)
    started = threading.Event()
    server.on_start = started.set
    thread.start()
    try:
        while not started.wait(0.5):
            if not thread.is_alive():
                raise RuntimeError("The server in this process did not start; its log says why.")
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def timed_protocol(seconds: float) -> type:
    """uvicorn's protocol, which closes connections that take longer to send a request's head."""

    class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # chosen at run time
        _timer: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            if self._timer is None and not self._has_request():
                self._wait_for_head()
            super().data_received(data)
            if self._has_request():
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _has_request(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait_for_head(self) -> None:
            self._timer = self.loop.call_later(seconds, self._too_slow)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self._timer = None
            if not self._has_request():
                self.transport.close()

    return TimedProtocol
