"""How long new weights hold up the answers of a server: swaps under load.

    python benchmarks/serving_swaps.py --swaps 100 --connections 32

A server in a process of its own (bare uvicorn, the random 5 M model, one thread) answers so many
streams, from this process, while it is given new weights again and again. Compared are the times
between what comes of two decode steps, but for those in which prompts were read: while weights are
loaded, and while not. `pause_ms` is the longest interval while weights were loaded, less the median
of the others: what a swap adds to the wait for a token. Steps that take long by themselves are
among both: `pause_p99_ms` and `other_p99_ms` tell how much. One JSON object is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from serving import KEY, NAME, make_model, prompt_of


def serve(folder: str, port: int, swaps: int) -> None:
    """Serves, swaps as often and prints what was timed."""
    import torch

    from rllib_llm.modules.pretrained import load_causal_lm, load_tokenizer
    from rllib_llm.serving.engine_process import EngineProcess, Events
    from rllib_llm.serving.http_server import HttpServer
    from rllib_llm.serving.service import Service
    from rllib_llm.serving.settings import ServeSettings

    class TimedEngine(EngineProcess):
        """Notes when what has come of a step is here."""

        def __init__(self, *arguments: Any) -> None:
            self.intervals: list[tuple[float, float, bool]] = []
            """(start, end, whether a prompt was read in it)"""
            self._end, self._newest = time.perf_counter(), -1
            super().__init__(*arguments)

        def _take(self, events: Events) -> None:
            start, self._end = self._end, time.perf_counter()
            newest = max(number for number, _ in events)
            self.intervals.append((start, self._end, newest > self._newest))
            self._newest = max(newest, self._newest)
            super()._take(events)

    settings = ServeSettings(model=folder, name=NAME, port=port, num_threads=1, api_keys=KEY)
    host = TimedEngine(settings, folder)
    service = Service(host, load_tokenizer(folder), settings, source=folder)
    server = HttpServer(service)
    first = load_causal_lm(folder).state_dict()
    second = {name: tensor + 1e-4 * torch.randn_like(tensor) for name, tensor in first.items()}
    windows: list[tuple[float, float]] = []

    def swap() -> None:
        for version in range(1, swaps + 1):
            time.sleep(0.2)
            start = time.perf_counter()
            weights = second if version % 2 else first
            service.load(weights, epoch=0, version=version, source="benchmark")
            windows.append((start, time.perf_counter()))
        print(json.dumps(summary(host.intervals, windows)), flush=True)

    def started() -> None:
        print("ready", flush=True)
        threading.Thread(target=swap, daemon=True).start()

    server.on_start = started
    server.serve_here()


def summary(
    intervals: list[tuple[float, float, bool]], windows: list[tuple[float, float]]
) -> dict[str, Any]:
    """What swaps add to the time between two steps, milliseconds."""
    during, other = [], []
    for start, end, has_prefill in intervals:
        if not has_prefill:
            is_during = any(start < until and end > since for since, until in windows)
            (during if is_during else other).append(1000 * (end - start))
    step = statistics.median(other)

    def added(values: list[float], share: float) -> float:
        return round(sorted(values)[int(share * (len(values) - 1))] - step, 2)

    return {
        "swaps": len(windows),
        "step_ms": round(step, 2),
        "pause_ms": added(during, 1.0), "pause_p99_ms": added(during, 0.99),
        "pause_p50_ms": added(during, 0.5),
        "other_max_ms": added(other, 1.0), "other_p99_ms": added(other, 0.99),
        "load_ms": round(1000 * statistics.median(end - start for start, end in windows), 1),
    }  # fmt: skip


async def ask_until_told(port: int, connections: int, told: asyncio.Future) -> dict[str, Any]:
    """Streams until the server has swapped as often as it was to."""
    answers, failures, versions = 0, [], set()

    async def connection(number: int) -> None:
        nonlocal answers
        while not told.done():
            number += connections
            whole = await ask(port, number)
            if isinstance(whole, str):
                failures.append(whole)
                continue
            answers += 1
            versions.add(",".join(whole))

    await asyncio.gather(*(connection(i) for i in range(connections)))
    mixed = [each for each in versions if "," in each]
    return {
        "answers": answers, "failed": len(failures), "mixed": len(mixed), "versions": len(versions),
        "first_failure": failures[:1],
    }  # fmt: skip


async def ask(port: int, number: int) -> list[str] | str:
    """The versions that have sampled a stream, or what went wrong with it."""
    body = json.dumps(
        {"model": NAME, "prompt": prompt_of(number), "max_tokens": 32 + number % 64,
         "stream": True, "ignore_eos": True}
    )  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write((head + body).encode())
        lines = [line async for line in reader]
    finally:
        writer.close()
    events = [line[6:] for line in lines if line.startswith(b"data: ")]
    if not events or events[-1].strip() != b"[DONE]":
        return b"".join(lines).decode()[:300]
    return json.loads(events[-2])["metadata"]["weight_versions"].split(",")


async def run(folder: str, swaps: int, connections: int) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, __file__, "--swaps", str(swaps), "--folder", folder, "--port", str(port)],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "ready", "the server has ended"
        told = asyncio.ensure_future(asyncio.to_thread(process.stdout.readline))
        asked = await ask_until_told(port, connections, told)
        return {"connections": connections, **json.loads(await told), **asked}
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        serve(args.folder, args.port, args.swaps)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        print(json.dumps(asyncio.run(run(folder, args.swaps, args.connections))))


if __name__ == "__main__":
    main()
