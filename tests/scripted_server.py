"""A server with OpenAI's interface in a thread of this process, that answers what it is told to."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# From the path and the decoded body of a request to (status, body as JSON or bytes, headers).
Answer = Callable[[str, dict[str, Any]], tuple[int, Any, dict[str, str]]]


class ScriptedServer(ThreadingHTTPServer):
    """`troubles` are answered first, one per request, in the order of arrival: a status, bytes (a
    malformed answer), or a number of seconds (float) to keep silent. Then `answer` decides."""

    daemon_threads = True

    def __init__(self, answer: Answer, troubles: tuple[Any, ...] = ()):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.troubles = list(troubles)
        self.lock = threading.Lock()
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.num_now = self.most_at_once = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(raw)
        server = self.server
        with server.lock:
            server.requests.append((self.path, body, dict(self.headers)))
            server.num_now += 1
            server.most_at_once = max(server.most_at_once, server.num_now)
            trouble = server.troubles.pop(0) if server.troubles else None
        status, content, headers = self._content(trouble, body)
        with server.lock:
            server.num_now -= 1
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it gave up waiting
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    def _content(self, trouble: Any, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if isinstance(trouble, float):
            time.sleep(trouble)
            return 200, {}, {}
        if isinstance(trouble, bytes):
            return 200, trouble, {}
        if isinstance(trouble, int):
            return trouble, {"error": {"message": "as scripted"}}, {"Retry-After": "0"}
        return self.server.answer(self.path, body)

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(answer: Answer, *troubles: Any) -> Iterator[ScriptedServer]:
    """A `ScriptedServer` that runs inside the context."""
    server = ScriptedServer(answer, troubles)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
