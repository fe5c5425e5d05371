"""How long new weights hold up the answers of a server: swaps under load.

    python -m benchmarks.serving.swaps --swaps 100 --connections 32

A server in a process of its own (bare uvicorn, the random 5 M model, one thread) answers so many
streams, from this process, while it is given new weights again and again. Compared are the times
between what comes of two decode steps, but for those in which prompts were read: while weights are
loaded, and while not. `pause_ms` is the longest interval while weights were loaded, less the median
of the others: what a swap adds to the wait for a token. Steps that take long by themselves are
among both: `pause_p99_ms` and `other_p99_ms` tell how much. `longest_ms` are the five longest, each
with the number of its swap and the milliseconds from the swap's beginning to its own. One JSON
object is printed.

Of the answers so many as `--checked` are compared with a plain forward pass of the model: `mixed`
are those that name several versions, or have a log-prob that is not, to 1e-4, that of the version
that they name; `least_difference` is by how much the log-probs of the other weights differ.
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

from benchmarks.serving.server import KEY, NAME, Connection, make_model, prompt_of

TOLERANCE = 1e-4
REST_S = 2.0  # between swaps, about as long as one takes: both kinds of intervals are as many


def two_weights(folder: str) -> list[dict[str, Any]]:
    """Those of the even versions and of the odd ones."""
    import torch

    from rllib_llm.modules.pretrained import load_causal_lm

    first = load_causal_lm(folder).state_dict()
    generator = torch.Generator().manual_seed(1)
    second = {
        name: tensor + 1e-2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in first.items()
    }
    return [first, second]


def serve(folder: str, port: int, swaps: int) -> None:
    """Serves, swaps as often and prints what was timed."""
    from rllib_llm.engines.protocol import Ended, Tokens
    from rllib_llm.modules.tokenizer import load_tokenizer
    from rllib_llm.serving.engine_process import EngineProcess, Events
    from rllib_llm.serving.http_server import HttpServer
    from rllib_llm.serving.service import Service
    from rllib_llm.serving.settings import ServeSettings
    from rllib_llm.shared.process import forget_startup

    class TimedEngine(EngineProcess):
        """Notes when what has come of a step is here."""

        def __init__(self, *arguments: Any) -> None:
            self.intervals: list[tuple[float, float, bool]] = []
            """(start, end, whether a prompt was read in it)"""
            self._end, self._newest = time.perf_counter(), -1
            super().__init__(*arguments)

        def _take(self, events: Events) -> None:
            rows = [number for number, what in events if isinstance(what, (Tokens, Ended))]
            if rows:  # else it is the result of a call
                start, self._end = self._end, time.perf_counter()
                self.intervals.append((start, self._end, max(rows) > self._newest))
                self._newest = max(*rows, self._newest)
            super()._take(events)

    settings = ServeSettings(model=folder, name=NAME, port=port, num_threads=1, api_keys=KEY)
    host = TimedEngine(settings, folder)
    service = Service(host, load_tokenizer(folder), settings, source=folder)
    server = HttpServer(service)
    weights = two_weights(folder)
    windows: list[tuple[float, float]] = []

    def swap() -> None:
        for version in range(1, swaps + 1):
            time.sleep(REST_S)
            start = time.perf_counter()
            service.load(weights[version % 2], epoch=0, version=version, source="benchmark")
            windows.append((start, time.perf_counter()))
        print(json.dumps(summary(host.intervals, windows)), flush=True)

    def started() -> None:
        print("ready", flush=True)
        threading.Thread(target=swap, daemon=True).start()

    server.on_start = started
    forget_startup()  # as `rllib serve` does
    server.serve_here()


def summary(
    intervals: list[tuple[float, float, bool]], windows: list[tuple[float, float]]
) -> dict[str, Any]:
    """What swaps add to the time between two steps, milliseconds."""
    during, other, longest = [], [], []
    for start, end, has_prefill in intervals:
        if has_prefill:
            continue
        seconds = 1000 * (end - start)
        swap = next((i for i, (a, b) in enumerate(windows) if start < b and end > a), None)
        (other if swap is None else during).append(seconds)
        if swap is not None:
            longest.append((round(seconds, 1), swap, round(1000 * (start - windows[swap][0]))))
    step = statistics.median(other)

    def added(values: list[float], share: float) -> float:
        return round(sorted(values)[int(share * (len(values) - 1))] - step, 2)

    return {
        "swaps": len(windows), "during": len(during), "others": len(other),
        "step_ms": round(step, 2),
        "pause_ms": added(during, 1.0), "pause_p99_ms": added(during, 0.99),
        "pause_p50_ms": added(during, 0.5),
        "other_max_ms": added(other, 1.0), "other_p99_ms": added(other, 0.99),
        "longest_ms": sorted(longest, reverse=True)[:5],
        "load_ms": round(1000 * statistics.median(end - start for start, end in windows), 1),
    }  # fmt: skip


Answer = dict[str, Any]  # prompt, token_ids, logprobs and the versions it names


async def ask_until_told(port: int, connections: int, told: asyncio.Future) -> list[Answer | str]:
    """The streams until the server has swapped as often as it was to; texts are failures."""
    answers: list[Answer | str] = []

    async def connection(number: int) -> None:
        events = asyncio.get_running_loop()
        _, made = await events.create_connection(Connection, "127.0.0.1", port)
        while not told.done():
            number += connections
            answers.append(await ask(made, number))

    await asyncio.gather(*(connection(i) for i in range(connections)))
    return answers


async def ask(connection: Connection, number: int) -> Answer | str:
    """A stream, or what went wrong with it."""
    body = json.dumps(
        {"model": NAME, "prompt": prompt_of(number), "max_tokens": 32 + number % 64, "logprobs": 0,
         "stream": True, "ignore_eos": True, "return_token_ids": True}
    )  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    await connection.ask((head + body).encode())
    lines = b"".join(connection.parts).splitlines()
    events = [line[6:] for line in lines if line.startswith(b"data: ")]
    if not events or events.pop() != b"[DONE]":
        return b"".join(connection.parts).decode()[:300]
    read = [json.loads(event) for event in events]
    choices = [event["choices"][0] for event in read]
    return {
        "prompt": prompt_of(number),
        "token_ids": [token for choice in choices for token in choice["token_ids"]],
        "logprobs": [value for choice in choices for value in choice["logprobs"]["token_logprobs"]],
        "versions": read[-1]["metadata"]["weight_versions"].split(","),
    }


def check(folder: str, given: list[Answer | str], checked: int) -> dict[str, Any]:
    """How many failed, and how many are not of one version."""
    from rllib_llm.modules.pretrained import load_causal_lm

    failed = [each for each in given if isinstance(each, str)]
    answers = [each for each in given if not isinstance(each, str)]
    mixed = [each for each in answers if len(each["versions"]) != 1]
    sample = [each for each in answers if len(each["versions"]) == 1]
    sample = sample[:: max(1, len(sample) // checked)] if checked else []
    model, weights = load_causal_lm(folder), two_weights(folder)
    others = []
    for odd in (0, 1):
        model.load_state_dict(weights[odd])
        for answer in sample:
            is_its = int(answer["versions"][0].split(".")[1]) % 2 == odd
            difference = largest_difference(model, answer)
            if not is_its:
                others.append(difference)
            elif difference > TOLERANCE:
                mixed.append(answer)
    return {
        "answers": len(answers), "failed": len(failed), "first_failure": failed[:1],
        "versions": len({each["versions"][0] for each in answers}), "mixed": len(mixed),
        "checked": len(sample), "least_difference": round(min(others, default=0.0), 5),
    }  # fmt: skip


def largest_difference(model: Any, answer: Answer) -> float:
    """Between the log-probs of an answer and the model's own."""
    import torch

    prompt, sampled = answer["prompt"], torch.tensor(answer["token_ids"])
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer["token_ids"]]])).logits[0]
    own = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, sampled[:, None]).squeeze(1)
    return float((own - torch.tensor(answer["logprobs"])).abs().max())


async def run(folder: str, swaps: int, connections: int, checked: int) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving.swaps", "--swaps", str(swaps),
         "--folder", folder, "--port", str(port)],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "ready", "the server has ended"
        told = asyncio.ensure_future(asyncio.to_thread(process.stdout.readline))
        asked = await ask_until_told(port, connections, told)
        timed = json.loads(await told)
    finally:
        process.terminate()
        process.wait()
    return {"connections": connections, **timed, **check(folder, asked, checked)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--checked", type=int, default=300, help="answers whose log-probs are")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        serve(args.folder, args.port, args.swaps)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        print(json.dumps(asyncio.run(run(folder, args.swaps, args.connections, args.checked))))


if __name__ == "__main__":
    main()
