"""Python in a sandbox: limits of time, memory, files and output, and no network."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from rllib_llm.envs.event_loop import call
from rllib_llm.envs.sandbox import Contained, Sandbox, missing_layers
from rllib_llm.envs.tools.toolbox import text_parameter, tool_schema


class PythonTool:
    """A tool `python(code)`.

    Args:
        timeout_s: of the program, from when it is started; a program that waits for a place among
            `max_processes` is not late.
        memory_mb: of its address space.
        max_output: bytes of what it prints that are read.
        name: of the tool.
        max_processes: that run at the same time in this process; None: as many as there are cores.
        sandbox: further fields of `Sandbox`.
    """

    def __init__(
        self, *, timeout_s: float = 5.0, memory_mb: int = 512, max_output: int = 20_000,
        name: str = "python", max_processes: int | None = None, **sandbox: Any,
    ) -> None:  # fmt: skip
        self.timeout_s, self.max_output, self.name = timeout_s, max_output, name
        limits = {"num_files": 64, "file_mb": 16, "num_processes": 64, **sandbox}
        self._sandbox = Sandbox(memory_mb=memory_mb, cpu_s=math.ceil(timeout_s) + 1, **limits)
        self._places = threading.BoundedSemaphore(max_processes or os.cpu_count() or 1)
        code = text_parameter("code", "the program; print() what you want to see")
        description = "Runs a Python program and returns what it prints."
        self.schema = tool_schema(name, description, code)

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """The program's output, including errors.

        Raises:
            TimeoutError: it did not end in time; it and what it started are ended.
        """
        return str(await call(self._run, str(arguments["code"])))

    def _run(self, code: str) -> str:
        missing_layers()
        order, files = {"mode": "program", "program": "program.py"}, {"program.py": code}
        with self._places, Contained(self._sandbox, order, files=files) as program:
            try:
                until = time.monotonic() + self.timeout_s
                printed = program.read(until, most=self.max_output)
            except TimeoutError:
                raise TimeoutError(f"the program did not end within {self.timeout_s:g} s") from None
            exit_code = program.end()
        text = printed.decode("utf-8", errors="replace")
        if len(printed) == self.max_output:
            return f"{text}\n[only the first {self.max_output} bytes]"
        if exit_code:
            return f"{text}\n[exit code {exit_code}]".strip()
        return text.strip() or "[no output]"
