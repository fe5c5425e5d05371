"""Python in a subprocess with limits of time, memory, files and output.

The limits keep a program from harming the run by accident: they are no sandbox. Whoever lets a
policy run programs should do so in a container without network and without secrets.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

# The child limits itself before it becomes the program: a function run between fork and exec could
# deadlock in a process with threads.
_PROGRAM = """
import resource, sys
for name, limit in zip(("CPU", "AS", "FSIZE", "NOFILE", "CORE"), map(int, sys.argv[1:6])):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
code = sys.argv[6]
sys.argv = ["program"]
exec(compile(code, "program", "exec"), {"__name__": "__main__"})
"""
_DESCRIPTION = "Runs a Python program and returns what it prints."


class PythonTool:
    """A tool `python(code)`.

    Args:
        timeout_s: of the program.
        memory_mb: of its address space.
        max_output: bytes of what it prints that are read.
        name: of the tool.
    """

    def __init__(
        self, *, timeout_s: float = 5.0, memory_mb: int = 512, max_output: int = 20_000,
        name: str = "python",
    ) -> None:  # fmt: skip
        self.timeout_s, self.memory_mb, self.max_output = timeout_s, memory_mb, max_output
        self.name = name
        code = {"type": "string", "description": "the program; print() what you want to see"}
        self.schema = {
            "type": "function",
            "function": {
                "name": name,
                "description": _DESCRIPTION,
                "parameters": {
                    "type": "object", "properties": {"code": code}, "required": ["code"],
                },
            },
        }  # fmt: skip

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """What the program prints, errors included.

        Raises:
            TimeoutError: it did not end in time; it and what it started are killed.
        """
        with tempfile.TemporaryDirectory() as folder:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-c", _PROGRAM, *self._limits(), str(arguments["code"]),
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder}, start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                printed = await asyncio.wait_for(self._read(process), self.timeout_s)
            finally:
                _kill(process.pid)  # its whole session: what it started is to end with it
                await process.wait()
        text = printed.decode("utf-8", errors="replace")
        if process.returncode:
            return f"{text}\n[exit code {process.returncode}]".strip()
        return text.strip() or "[no output]"

    async def _read(self, process: asyncio.subprocess.Process) -> bytes:
        """What it prints until it ends; behind `max_output` bytes it is killed."""
        assert process.stdout is not None
        read = bytearray()
        while len(read) < self.max_output and (part := await process.stdout.read(8192)):
            read += part
        if len(read) >= self.max_output:
            _kill(process.pid)
        await process.wait()
        return bytes(read[: self.max_output])

    def _limits(self) -> list[str]:
        """CPU seconds, bytes of memory, bytes of a file, open files, bytes of a core dump."""
        limits = (int(self.timeout_s) + 1, self.memory_mb * 2**20, 16 * 2**20, 64, 0)
        return [str(limit) for limit in limits]


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended
        return
