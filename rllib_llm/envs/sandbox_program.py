"""The program inside a sandbox. It is run as a file and imports nothing of this package.

Its first line of input says what it is to do; a worker's further lines are calls.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Does what the first line says."""
    order = json.loads(sys.stdin.readline())
    for name, value in order["limits"].items():
        if value is not None:
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
    _MODES[order["mode"]](order)


def _run_program(order: dict[str, Any]) -> None:
    """Runs a file as a Python program, in its own folder."""
    for name, text in order["files"].items():
        with open(name, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    with open(order["program"], encoding="utf-8") as file:
        code = file.read()
    sys.argv = ["program"]
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    try:
        exec(compile(code, "program", "exec"), vars(module))
    except Exception as error:  # noqa: BLE001  (said as Python says it, without our own frames)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


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


def _answer_calls(order: dict[str, Any]) -> None:
    """Signals that it is ready, then answers each line with a line: a call, or whether one that is
    to come runs a model's words."""
    sys.path[:] = order["path"] or sys.path
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints is no answer
    try:
        function = find(order["function"])
        said: dict[str, Any] = {"ready": True}
    except Exception as error:  # noqa: BLE001  (the process's border: the parent reads it)
        said = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(said), file=answers, flush=True)
    for line in sys.stdin:
        word, _, line = line.partition(" ")  # which only an answer to this line can name
        try:
            ((kind, call),) = json.loads(line).items()
            if kind == "call":
                value = function(**call)
            else:
                value = bool(getattr(function, "prepare", lambda **_: True)(**call))
            text = json.dumps({"value": value})
        except Exception as error:  # noqa: BLE001  (as above)
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        print(word, text, file=answers, flush=True)


_MODES = {"program": _run_program, "calls": _answer_calls}


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
