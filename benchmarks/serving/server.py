"""What the server adds to its engine: time to first token, tokens per second, at some connections.

    python -m benchmarks.serving.server --modes direct uvicorn ray haproxy --connections 1 16 32
    python -m benchmarks.serving.server --modes uvicorn vllm --vllm-python .venv-vllm/bin/python \\
        --model 135m_full --dtype bfloat16 --prompt-tokens 64 --tokens 32 --connections 1 8 32
    python -m benchmarks.serving.server --load --replicas 1 2 --connections 1 8 64 256 512 \\
        [--plot FILE.png]

All modes sample the same random model with one thread (`--threads 0`: as many as each takes by
default) and the same prompts, in processes of their own, one mode after the other in each round;
the client is this process. `direct` asks the
engine's loop without HTTP; `uvicorn` is `rllib serve --local`, and `thread` the same with the
engine in HTTP's own process; `ray` is Ray Serve with its Python
proxy and `haproxy` with HAProxy; `vllm` is vLLM's own server, out of the Python that
`--vllm-python` names, with its defaults but for the threads. Each line is one JSON object: medians
over all requests, CPU time of the server's processes for a token, which holds on a loaded machine,
and what each mode adds to `direct`. The last line is `batch_over_single`: tokens per second at each
number of connections over those of the same mode at one.

`--load` asks `rllib serve --local` (one replica) or Ray Serve behind HAProxy (several) over more
and more connections, each of which comes again after a 429's Retry-After. A line is a point: what
was answered and refused, and the longest lag of the event loop that /metrics told.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import psutil

MODES = ("direct", "thread", "uvicorn", "ray", "haproxy", "vllm")
KEY, NAME = "benchmark", "m"
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
VLLM_THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # as many as OMP_NUM_THREADS says
START_SECONDS = 600.0
_LEAST_REQUESTS = 40  # of a measurement: the median of fewer is what the first ones make of it


def make_model(folder: Path, case_name: str) -> None:
    """Saves the model, with a tokenizer of as many words."""
    import torch
    from generation_cases import CASES, build_model
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    case = CASES[case_name]
    words = {f" w{i}": i for i in range(case.vocab)}
    backend = Tokenizer(models.WordLevel(words, unk_token=" w1"))
    backend.pre_tokenizer = pre_tokenizers.Split(" w", "merged_with_next")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=" w1", pad_token=" w0", eos_token=" w2"
    )
    build_model(case, "cpu", torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- the processes that are measured -----------------------------------------------------------


def serve(
    mode: str, folder: str, port: int, dtype: str, threads: int | None, replicas: int
) -> None:
    """Serves until it is killed; says "ready"."""
    from rllib_llm.serving import deployment
    from rllib_llm.serving.http_server import HttpServer, open_service
    from rllib_llm.serving.settings import ServeSettings
    from rllib_llm.shared.process import forget_startup

    settings = ServeSettings(
        model=folder, name=NAME, port=port, num_threads=threads, api_keys=KEY,
        haproxy=mode == "haproxy", engine_process=mode != "thread", dtype=dtype, replicas=replicas,
    )  # fmt: skip
    if mode in ("uvicorn", "thread"):
        server = HttpServer(open_service(settings))
        server.on_start = lambda: print("ready", flush=True)
        forget_startup()  # as `rllib serve` does
        server.serve_here()
        return
    deployment.start(settings)
    print("ready", flush=True)
    time.sleep(86_400)


def vllm_command(python: str, folder: str, port: int, dtype: str) -> list[str]:
    """vLLM's server for the same model."""
    return [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port),
        "--served-model-name", NAME, "--api-key", KEY, "--dtype", dtype, "--max-model-len",
        "2048", "--disable-log-stats", "--disable-uvicorn-access-log",
    ]  # fmt: skip


def direct(folder: str, plan: dict[str, Any], dtype: str) -> None:
    """Asks the engine's loop from an event loop; prints what `ask_all` gives."""
    import torch

    from rllib_llm.engines.engine_loop import EngineLoop
    from rllib_llm.engines.params import SamplingParams
    from rllib_llm.engines.torch_engine import TorchEngine
    from rllib_llm.modules.pretrained import load_causal_lm

    if plan["threads"]:
        torch.set_num_threads(plan["threads"])
    loop = EngineLoop(TorchEngine(load_causal_lm(folder, dtype=dtype), version=0, max_rows=64))
    params = SamplingParams(0, (), max_new_tokens=plan["tokens"])

    async def one(number: int) -> tuple[float, float, int]:
        start, first = time.perf_counter(), []
        ended = await loop.complete_async(
            prompt_of(number, plan), params, seed=number,
            on_tokens=lambda tokens: first.append(time.perf_counter()),
        )  # fmt: skip
        return first[0] - start, time.perf_counter() - start, ended.num_tokens

    print(json.dumps(asyncio.run(ask_all(one, plan, time.process_time))))
    loop.close()


# --- the client --------------------------------------------------------------------------------


def prompt_of(number: int, plan: dict[str, Any]) -> list[int]:
    """So many tokens, of which the first differ."""
    return [3 + number % 2000, *range(10, 9 + plan["prompt_tokens"])]


def cpu_seconds(pid: int) -> float:
    """That a process and its descendants have used so far."""
    parent = psutil.Process(pid)
    seconds = 0.0
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


async def ask_all(one: Any, plan: dict[str, Any], cpu: Callable[[], float]) -> dict[str, Any]:
    """Requests over so many connections, each its next when it has an answer.

    Args:
        one: asks a request, by its number; (seconds to the first token, in all, tokens).
        plan: how many.
        cpu: seconds of CPU that the measured processes have used so far.
    """
    taken = iter(range(plan["warm_up"] + plan["requests"]))
    results: list[tuple[float, float, int]] = []
    started = used = 0.0

    async def connection() -> None:
        nonlocal started, used
        for number in taken:
            if number == plan["warm_up"]:
                used, started = cpu(), time.perf_counter()
            result = await one(number)
            if number >= plan["warm_up"]:
                results.append(result)

    await asyncio.gather(*(connection() for _ in range(plan["connections"])))
    seconds, used = time.perf_counter() - started, cpu() - used
    firsts = sorted(first for first, _, _ in results)
    num_tokens = sum(count for _, _, count in results)
    return {
        "first_token_ms": round(1000 * statistics.median(firsts), 2),
        "first_token_p95_ms": round(1000 * firsts[int(0.95 * (len(firsts) - 1))], 2),
        "tokens_per_s": round(num_tokens / seconds, 1),
        "cpu_us_per_token": round(1e6 * used / num_tokens, 1),
    }


class Connection(asyncio.Protocol):
    """An HTTP connection that stays open. What comes is kept as it is, and read when the clock has
    stopped: the client shares the cores with the server."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    async def ask(self, request: bytes) -> None:
        """Sends a request and waits for the end of its answer."""
        self.parts: list[bytes] = []
        self.first = 0.0
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self._done

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        if not self.first and b"data: {" in data:
            self.first = time.perf_counter()
        # The chunk that says: no more. A head may end in 0, too.
        is_whole = b"".join(self.parts[-2:]).endswith(b"\r\n0\r\n\r\n")
        if is_whole or (self.parts[0].startswith(b"HTTP/1.1 429 ") and data.endswith(b"}")):
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("the server has closed the connection"))


async def over_http(port: int, plan: dict[str, Any], cpu: Callable[[], float]) -> dict[str, Any]:
    """As `ask_all`, streamed over connections that stay open; what is refused comes again."""
    idle: list[Connection] = []
    num_refused = 0

    async def one(number: int) -> tuple[float, float, int]:
        nonlocal num_refused
        while idle and idle[-1].transport.is_closing():  # the server ends idle ones
            idle.pop()
        if not idle:
            events = asyncio.get_running_loop()
            _, made = await events.create_connection(Connection, "127.0.0.1", port)
            idle.append(made)
        connection = idle.pop()
        body = json.dumps(
            {"model": NAME, "prompt": prompt_of(number, plan), "max_tokens": plan["tokens"],
             "stream": True, "ignore_eos": True, "seed": number, "temperature": 1.0}
        )  # fmt: skip
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        start = time.perf_counter()
        try:
            await connection.ask((head + body).encode())
        except ConnectionError:  # HAProxy closes idle ones when it has read its settings anew
            if connection.parts:
                raise
            return await one(number)
        end = time.perf_counter()
        answer = b"".join(connection.parts)
        if plan["may_refuse"] and answer.startswith(b"HTTP/1.1 429 "):
            num_refused += 1
            idle.append(connection)
            (seconds,) = re.findall(rb"(?i)\r\nretry-after: (\d+)", answer)
            await asyncio.sleep(int(seconds))
            return await one(number)
        assert answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in answer, answer[:500]
        idle.append(connection)
        return connection.first - start, end - start, answer.count(b" w")

    return await ask_all(one, plan, cpu) | {"refused": num_refused}


@contextlib.contextmanager
def watched_lag(port: int) -> Iterator[list[float]]:
    """The lags of the server's event loop during the block, in seconds, as /metrics tells them."""
    lags, stop = [0.0], threading.Event()
    ask = build_opener(ProxyHandler({})).open
    line = re.compile(r"^rllib_llm_event_loop_lag_seconds (\S+)", re.MULTILINE)

    def watch() -> None:
        while not stop.wait(0.4):
            with contextlib.suppress(OSError), ask(f"http://127.0.0.1:{port}/metrics") as answer:
                lags.extend(map(float, line.findall(answer.read().decode())))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lags
    finally:
        stop.set()
        thread.join()


def wait_until_ready(process: subprocess.Popen, mode: str, port: int) -> None:
    """Returns when the server answers."""
    if mode != "vllm":
        assert process.stdout is not None
        while process.stdout.readline().strip() != "ready":
            assert process.poll() is None, "the server has ended"
        return
    deadline = time.monotonic() + START_SECONDS
    ask = build_opener(ProxyHandler({})).open  # past the environment's proxies
    while time.monotonic() < deadline:
        assert process.poll() is None, "vLLM's server has ended"
        with contextlib.suppress(OSError), ask(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.5)
    raise TimeoutError(f"vLLM's server did not answer within {START_SECONDS:g} s")


def measure(
    mode: str, folder: str, plan: dict[str, Any], args: argparse.Namespace, replicas: int = 1
) -> dict[str, Any]:
    """One mode at one number of connections."""
    command = [
        sys.executable, "-m", "benchmarks.serving.server", "--folder", folder,
        "--plan", json.dumps(plan), "--dtype", args.dtype,
        "--threads", str(args.threads), "--replicas", str(replicas),
    ]  # fmt: skip
    environment = dict(os.environ)
    environment.pop("OMP_NUM_THREADS", None)
    if args.threads:
        environment["OMP_NUM_THREADS"] = str(args.threads)
    if mode == "direct":
        done = subprocess.run(
            [*command, "--run", mode], stdout=subprocess.PIPE, text=True, check=True,
            env=environment,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command += ["--run", mode, "--port", str(port)]
    if mode == "vllm":
        command, environment = (
            vllm_command(args.vllm_python, folder, port, args.dtype),
            environment | VLLM_ENVIRONMENT | (VLLM_THREADS if args.threads else {}),
        )
        environment.pop("PYTHONPATH", None)  # of this package's environment
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        wait_until_ready(process, mode, port)
        watched = watched_lag(port) if plan["may_refuse"] else contextlib.nullcontext([0.0])
        with watched as lags:
            found = asyncio.run(over_http(port, plan, lambda: cpu_seconds(process.pid)))
        return found | {"lag_ms": round(1000 * max(lags), 1)}
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["direct", "uvicorn"])
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 16, 32])
    parser.add_argument(
        "--requests", type=int, default=320,
        help="of each measurement; an eighth at one connection, and 40 at least",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="of each prompt")
    parser.add_argument("--threads", type=int, default=1, help="0: as many as each has by default")
    parser.add_argument("--load", action="store_true", help="more and more connections, and 429s")
    parser.add_argument("--replicas", nargs="+", type=int, default=[1], help="with --load")
    parser.add_argument("--plot", type=Path, help="with --load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="5m_full", help="one of `generation_cases.CASES`")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--vllm-python", help="of an environment with vLLM, for the mode vllm")
    parser.add_argument("--run", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "vllm" in args.modes and args.vllm_python is None:
        parser.error("--modes vllm needs --vllm-python: vLLM has an environment of its own")
    if args.run == "direct":
        direct(args.folder, args.plan, args.dtype)
        return
    if args.run is not None:
        (replicas,) = args.replicas
        serve(args.run, args.folder, args.port, args.dtype, args.threads or None, replicas)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.model)
        if args.load:
            points = []
            for replicas in args.replicas:
                for connections in args.connections:
                    points.append(load(args, folder, connections, replicas))
                    print(json.dumps(points[-1]), flush=True)
            if args.plot:
                draw(points, args.plot)
            return
        lines = []
        for connections in args.connections:
            lines.append(compare(args, folder, connections))
            print(json.dumps(lines[-1]), flush=True)
        if 1 in args.connections:
            print(json.dumps({"batch_over_single": batch_over_single(args.modes, lines)}))


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Time to the first token and refusals over connections, a line for each number of replicas."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    names = {
        "first_token_ms": "ms to the first token",
        "tokens_per_s": "tokens per second",
        "refused": "429s",
    }
    for one, (name, label) in zip(axes, names.items(), strict=True):
        for replicas in dict.fromkeys(point["replicas"] for point in points):
            chosen = [point for point in points if point["replicas"] == replicas]
            numbers = [point["connections"] for point in chosen]
            one.plot(
                numbers,
                [p[name] for p in chosen],
                "o-",
                label=f"{replicas} replica{'s' * (replicas > 1)}",
            )
        one.set(xscale="log", xlabel="connections", ylabel=label, ylim=0)
    axes[0].legend()
    figure.savefig(path, dpi=150)


def batch_over_single(modes: list[str], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times the tokens per second at one connection each number of them gives, by mode."""
    (single,) = (line for line in lines if line["connections"] == 1)
    return {
        mode: {
            line["connections"]: round(line[mode]["tokens_per_s"] / single[mode]["tokens_per_s"], 2)
            for line in lines
            if line is not single
        }
        for mode in modes
    }


def plan_of(args: argparse.Namespace, connections: int) -> dict[str, Any]:
    """What is asked over so many connections."""
    least = max(_LEAST_REQUESTS, connections)
    return {
        "connections": connections, "tokens": args.tokens, "warm_up": max(8, 2 * connections),
        "requests": max(least, args.requests if connections > 1 else args.requests // 8),
        "prompt_tokens": args.prompt_tokens, "threads": args.threads, "may_refuse": args.load,
    }  # fmt: skip


def load(args: argparse.Namespace, folder: str, connections: int, replicas: int) -> dict[str, Any]:
    """How the server, or so many of it behind HAProxy, takes so many connections."""
    mode = "uvicorn" if replicas == 1 else "haproxy"
    found = measure(mode, folder, plan_of(args, connections), args, replicas)
    return {"replicas": replicas, "connections": connections, **found}


def compare(args: argparse.Namespace, folder: str, connections: int) -> dict[str, Any]:
    """The modes at a number of connections, medians over rounds."""
    plan = plan_of(args, connections)
    rounds = [
        {mode: measure(mode, folder, plan, args) for mode in args.modes} for _ in range(args.rounds)
    ]
    line: dict[str, Any] = {"connections": connections, "rounds": args.rounds}
    for mode in args.modes:
        line[mode] = {
            name: statistics.median(each[mode][name] for each in rounds) for name in rounds[0][mode]
        }
    if "direct" in line:
        for mode in args.modes:
            if mode != "direct":
                added = line[mode]["first_token_ms"] - line["direct"]["first_token_ms"]
                share = line[mode]["tokens_per_s"] / line["direct"]["tokens_per_s"]
                line[f"{mode}_adds_ms"] = round(added, 2)
                line[f"{mode}_share_of_tokens_per_s"] = round(share, 3)
    return line


if __name__ == "__main__":
    main()
