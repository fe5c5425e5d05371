"""The program of a worker process: calls one function for each line that it reads.

It is run as a file and imports nothing of this package, so that a worker starts as fast as what it
runs. Each call has an alarm: a worker whose parent has died does not outlive its call.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any


def find(path: str) -> Callable[..., Any]:
    """The function that "module:name" or "file.py:name" names."""
    module, _, name = path.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location("worker_function", module)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


def main() -> None:
    """Reads what to do, says that it is ready, and answers line for line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints is no answer
    order = json.loads(sys.stdin.readline())
    sys.path[:] = order["path"]
    if order["memory_mb"] is not None:
        limit = order["memory_mb"] * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        function = find(order["function"])
        said: dict[str, Any] = {"ready": True}
    except Exception as error:  # noqa: BLE001  (the process's border: the parent is told)
        said = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(said), file=answers, flush=True)
    for line in sys.stdin:
        signal.alarm(order["alarm_s"])
        try:
            said = {"value": function(**json.loads(line))}
            text = json.dumps(said)
        except Exception as error:  # noqa: BLE001  (as above)
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        signal.alarm(0)
        print(text, file=answers, flush=True)


if __name__ == "__main__":
    main()
