"""Ports for servers that cannot choose one themselves."""

from __future__ import annotations

import itertools
import os
import socket

# Below the ports that the system hands out to whoever asks for any (from 32768), and above Ray's
# (to 19999): of the former, one that is free now is another's a moment later.
FIRST, EACH = 20000, 1000
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_next = itertools.count(os.getpid())


def free_port() -> int:
    """A port that nobody listens at, and that hardly any other process takes meanwhile."""
    for count in itertools.islice(_next, EACH):
        port = FIRST + EACH * (_worker % 12) + count % EACH
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise OSError(f"none of {EACH} ports is free")
