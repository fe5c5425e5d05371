"""A server's memory stays as it is, however many requests come."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests import tiny_models
from tests.ports import free_port
from tests.serving.test_deployment import command, until_ready
from tests.serving.tiny_server import DEADLINE_S, NAME, model, tokenizer

pytestmark = pytest.mark.slow
CONNECTIONS, WARM_UP, REQUESTS = 16, 3000, 10_000
MOST_GROWTH = 1024  # bytes for each request; a request's own objects are several times that
TEXT = {"model": NAME, "prompt": "Once", "max_tokens": 4}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def resident(pid: int) -> int:
    """Bytes of memory that a process and those that it started hold."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return pages * 4096 + sum(resident(int(child)) for child in children)


async def ask(http: httpx.AsyncClient, number: int) -> None:
    """One of the kinds of requests that come: whole, streamed, refused, left, of a session."""
    kind = number % 8
    if kind == 0:
        await http.post("/v1/completions", json=TEXT | {"n": 2, "logprobs": 1})
    elif kind == 1:
        await http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    elif kind == 2:
        guided = {"response_format": {"type": "regex", "regex": f"[ab]{{{1 + number % 3}}}"}}
        await http.post("/v1/chat/completions", json=CHAT | guided)
    elif kind == 3:
        refused = await http.post("/v1/completions", json=TEXT | {"colour": number})
        assert refused.status_code == 400
    elif kind == 4:
        asked = TEXT | {"stream": True, "max_tokens": 200, "ignore_eos": True}
        async with http.stream("POST", "/v1/completions", json=asked) as answer:
            await anext(answer.aiter_lines())  # and goes away
    elif kind == 5:
        session = f"/sessions/s{number}"
        await http.post(f"{session}/v1/chat/completions", json=CHAT)
        await http.delete(session)
    elif kind == 6:
        await http.post("/inference/v1/generate", json={
            "token_ids": [1, number % 200], "sampling_params": {"max_tokens": 4, "logprobs": 0},
            "request_id": f"r{number}"})  # fmt: skip
    else:
        function = {"name": f"f{number % 100}", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        await http.post("/v1/chat/completions", json=CHAT | {"tools": tools})


async def ask_every_size(url: str) -> None:
    """Prompts of all numbers that may be read in at once. A product of matrices keeps what it found
    for a size (10 MB of all sizes of this model), which no later request adds to."""
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
        for length in (2, 128):
            for count in range(1, 2 * CONNECTIONS + 1):
                prompts = [[1 + i, *[1 + count + length] * (length - 1)] for i in range(count)]
                asked = {"model": NAME, "prompt": prompts, "max_tokens": 4}
                (await http.post("/v1/completions", json=asked)).raise_for_status()


async def ask_many(url: str, numbers: range) -> None:
    left = iter(numbers)

    async def connection() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
            for number in left:
                await ask(http, number)

    await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))


def test_ten_thousand_requests_leave_no_memory_behind(tmp_path):
    folder = tiny_models.save(tmp_path / "tiny", model(), tokenizer())
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("w") as log:
        process = command(folder, "--local", "--port", str(port), stderr=log)
        try:
            until_ready(process, url)
            asyncio.run(ask_every_size(url))
            asyncio.run(ask_many(url, range(WARM_UP)))
            before = resident(process.pid)
            asyncio.run(ask_many(url, range(WARM_UP, WARM_UP + REQUESTS)))
            after = resident(process.pid)
        finally:
            process.kill()
    print(
        f"resident: {before / 2**20:.1f} MiB after {WARM_UP} requests, "
        f"{after / 2**20:.1f} MiB after {REQUESTS} more"
    )
    assert (after - before) / REQUESTS < MOST_GROWTH
