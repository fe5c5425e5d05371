"""A tiny policy behind a server, in this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import torch

from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.serving.engine_host import ThreadHost
from rllib_llm.serving.http_server import HttpServer, make_app
from rllib_llm.serving.security import Clients
from rllib_llm.serving.service import Service
from rllib_llm.serving.settings import ServeSettings
from tests import tiny_models

NAME = "tiny"
EOS = 2
TEMPLATE = (
    "{% if tools %}[tools]<tool_call>{{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
DEADLINE_S = 240  # of processes that import and load, beside whatever else runs


def tokenizer(template: str | None = TEMPLATE):
    made = tiny_models.byte_tokenizer()
    made.chat_template = template
    return made


def model(seed: int = 0, **changes):
    return tiny_models.llama(seed, **{"max_position_embeddings": 1024, **changes})


def build():
    return model(), tokenizer()


def settings(**changes) -> ServeSettings:
    return ServeSettings(**{"model": "tests.serving.tiny_server.build", "name": NAME, **changes})


def service(the_model=None, the_tokenizer=None, clock=time.monotonic, **changes) -> Service:
    made = settings(**changes)
    the_model = the_model or load_causal_lm("tests.serving.tiny_server.build")
    the_tokenizer = the_tokenizer or tokenizer()
    host = ThreadHost(the_model, made, (EOS,), the_tokenizer)
    return Service(host, the_tokenizer, made, source="here", clock=clock)


@asynccontextmanager
async def asgi_client(made: Service, clients: Clients | None = None, **client: Any):
    """An asynchronous client of the application itself, without a network."""
    await made.start()
    transport = httpx.ASGITransport(make_app(made, clients), raise_app_exceptions=False)
    base = {"base_url": "http://tiny", "timeout": DEADLINE_S, **client}
    async with httpx.AsyncClient(transport=transport, **base) as http:
        try:
            yield http
        finally:
            made.close()


@contextmanager
def running(made: Service, clients: Clients | None = None) -> Iterator[str]:
    """The server's address while it runs in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(made, clients, listening)
    thread = threading.Thread(target=server.serve_here, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        listening.close()


def until(is_so, seconds: float = DEADLINE_S) -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.002)


def plain_logprobs(the_model, prompt: list[int], completion: list[int]) -> list[float]:
    """Log-probs of a completion by one forward pass."""
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        logprobs = the_model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(completion)[:, None]).squeeze(1).tolist()
