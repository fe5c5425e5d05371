"""The engine's own process, which `EngineProcess` starts:

python -m rllib_llm.serving.engine_worker SOCKET
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rllib_llm.engines.completions import Tokens
from rllib_llm.engines.engine_loop import Wanted
from rllib_llm.engines.protocol import Ended
from rllib_llm.engines.scoring import Scores
from rllib_llm.garbage import forget_startup
from rllib_llm.modules.pretrained import load_tokenizer
from rllib_llm.serving.channel import Channel
from rllib_llm.serving.engine_host import Counts, open_thread
from rllib_llm.serving.engine_process import Events, Sent
from rllib_llm.serving.guides import Guides
from rllib_llm.serving.settings import ServeSettings


class EngineWorker:
    """Runs an engine for a server in another process.

    Args:
        channel: to the server.
        settings: of the server.
        source: of the model.
    """

    def __init__(self, channel: Channel, settings: ServeSettings, source: str) -> None:
        self._channel, self._lock = channel, threading.Lock()
        self._events: deque[tuple[int, Any]] = deque()
        self._futures: dict[int, Future[Ended]] = {}
        self._is_closed = False
        self._calls = ThreadPoolExecutor(4, thread_name_prefix="engine-calls")
        self._host = open_thread(settings, source, self._flush)
        ends = self._host.facts.eos_token_ids
        self._guides = Guides(load_tokenizer(source), ends[0] if ends else None)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the server has ended, which `run` sees
            self._channel.send(message)

    def run(self) -> None:
        """Tells the server what the model is, then does what it is told until that ends."""
        self._send(self._host.facts)
        with contextlib.suppress(EOFError):
            while not self._is_closed:
                for name, *arguments in self._channel.arrived(waits=True):
                    getattr(self, name)(*arguments)
        self._host.close()
        self._calls.shutdown(cancel_futures=True)

    # --- what it is told ---------------------------------------------------------------------

    def close(self) -> None:
        self._is_closed = True

    def submit(self, sent: list[Sent]) -> None:
        try:
            futures = self._host.submit_all([self._wanted(each) for each in sent])
        except (ValueError, RuntimeError) as error:
            self._send([(each.number, error) for each in sent])
            return
        for each, future in zip(sent, futures, strict=True):
            self._futures[each.number] = future
            future.add_done_callback(partial(self._note_end, each.number))
        self._flush()  # what had ended before it was looked after

    def _wanted(self, sent: Sent) -> Wanted:
        guide = None if sent.grammar is None else self._guides.guide(sent.grammar)
        on_tokens = partial(self._note, sent.number) if sent.streams else None
        return replace(sent.wanted, guide=guide, on_tokens=on_tokens)

    def _note(self, number: int, tokens: Tokens) -> None:
        self._events.append((number, tokens))

    def _note_end(self, number: int, future: Future[Ended]) -> None:
        self._futures.pop(number, None)
        if not future.cancelled():
            self._events.append((number, future.exception() or future.result()))

    def _flush(self) -> None:
        """Sends what has come, in its order. Of any thread."""
        with self._lock:
            events: Events = [self._events.popleft() for _ in range(len(self._events))]
            if events:
                self._send(events)

    def cancel(self, number: int) -> None:
        future = self._futures.get(number)
        if future is not None:  # it has not ended meanwhile
            future.cancel()

    def abort(self, number: int) -> None:
        future = self._futures.get(number)
        if future is not None:
            self._host.abort(future)

    def pause(self) -> None:
        self._host.pause()

    def resume(self) -> None:
        self._host.resume()

    def call(self, number: int, name: str, *arguments: Any) -> None:
        self._calls.submit(self._answer, number, name, arguments)

    def _answer(self, number: int, name: str, arguments: Sequence[Any]) -> None:
        try:
            result = getattr(self, f"_{name}")(*arguments)
        except (ValueError, RuntimeError) as error:
            result = error
        self._send([(number, result)])

    def _score(self, *arguments: Any) -> Scores:
        return self._host.score(*arguments).result()

    def _count(self) -> Counts:
        return self._host.count().result()

    def _load(self, file: str, serial: int) -> list[int]:
        return self._host.load(torch.load(file, mmap=True), serial)


def main() -> None:
    """Runs the engine of the server whose socket is named."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server drains, and then ends this
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    settings, source = channel.receive()
    try:
        worker = EngineWorker(channel, settings, source)
    except Exception as error:  # noqa: BLE001  (the border of the process: the server raises it)
        channel.send(error)
        return
    forget_startup()
    worker.run()


if __name__ == "__main__":
    main()
