"""The engine in a process of its own: what HTTP takes of Python does not hold up its steps.

In one process both would want the same interpreter, and hand it to and fro with every operation of
the engine and every message to a client: at a few milliseconds a step that is a third of the time.

    server ── submit, abort, load ... ──▶ EngineProcess ─── socket ──▶ EngineWorker ─▶ ThreadHost
    rows   ◀── tokens, ends, results ──── event loop    ◀── socket ── one message a step

The server's event loop reads the socket itself: a thread for it would wait for the interpreter, and
the loop for the thread, at every step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rllib_llm.engines.completions import Tokens
from rllib_llm.engines.engine_loop import Wanted
from rllib_llm.engines.protocol import Ended
from rllib_llm.engines.scoring import Scores
from rllib_llm.serving.channel import Channel
from rllib_llm.serving.engine_host import Counts, ModelFacts
from rllib_llm.serving.guides import LlGuide
from rllib_llm.serving.settings import ServeSettings

_ENDED = (
    "The engine's process must be alive: it has ended, and its log says why. Start the server anew."
)
WORKER = "rllib_llm.serving.engine_worker"
_STOP_SECONDS = 10.0
_MEMORY = Path("/dev/shm")  # where files need no disk
_SPARE = 1.2  # of the room that weights take there

# (id, what comes of it) of completions and calls: Tokens, then the end, a result or an error.
Events = list[tuple[int, Any]]


class Sent:
    """A completion that is asked for, as it goes through the socket."""

    def __init__(self, number: int, wanted: Wanted) -> None:
        guide = wanted.guide
        assert guide is None or isinstance(guide, LlGuide), "others are made of no text"
        self.number, self.streams = number, wanted.on_tokens is not None
        self.grammar = None if guide is None else guide.grammar
        self.wanted = replace(wanted, guide=None, on_tokens=None)


class EngineProcess:
    """See `EngineHost`. What comes of it comes in the event loop that `listen` is called in.

    Args:
        settings: of the server.
        source: of the model, as `load_causal_lm` takes it.

    Raises:
        Exception: what loading the model raises.
    """

    def __init__(self, settings: ServeSettings, source: str) -> None:
        self._ids = itertools.count()
        self._futures: dict[int, Future] = {}
        self._on_tokens: dict[int, Callable[[Tokens], None]] = {}
        self._lock = threading.Lock()  # of what is waited for
        self._is_closed = self.is_paused = False
        self._events: asyncio.AbstractEventLoop | None = None
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))  # it finds what this process does
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip
        self._channel = Channel(ours)
        keyless = settings.model_copy(update={"api_keys": None, "admin_key": None})
        try:
            self._channel.send((keyless, source))
            facts = self._channel.receive()
        except (EOFError, OSError):
            raise RuntimeError(_ENDED) from None
        if isinstance(facts, Exception):
            self._process.wait()
            raise facts
        self.facts: ModelFacts = facts

    def listen(self) -> None:
        """As of all hosts."""
        self._events = asyncio.get_running_loop()
        self._events.add_reader(self._channel.socket.fileno(), self._read)

    # --- completions -------------------------------------------------------------------------

    def submit_all(self, wanted: Sequence[Wanted]) -> list[Future[Ended]]:
        """As of all hosts."""
        futures: list[Future[Ended]] = [Future() for _ in wanted]
        sent = []
        for each, future in zip(wanted, futures, strict=True):
            number = self._await(future)
            if each.on_tokens is not None:
                self._on_tokens[number] = each.on_tokens
            sent.append(Sent(number, each))
            future.add_done_callback(partial(self._forget, number))
        self._send("submit", sent)
        return futures

    def _await(self, future: Future) -> int:
        number = next(self._ids)
        with self._lock:
            self.check_open()
            self._futures[number] = future
        return number

    def _forget(self, number: int, future: Future) -> None:
        with self._lock:
            self._futures.pop(number, None)
        self._on_tokens.pop(number, None)
        if future.cancelled():
            with contextlib.suppress(RuntimeError):  # the process has ended, and the row with it
                self._send("cancel", number)

    def abort(self, future: Future[Ended]) -> None:
        """As of all hosts."""
        with self._lock:
            found = [number for number, each in self._futures.items() if each is future]
        for number in found:
            self._send("abort", number)

    # --- calls -------------------------------------------------------------------------------

    def score(self, token_ids: list[int], top: int, version: int | None) -> Future[Scores]:
        """As of all hosts."""
        return self._call("score", token_ids, top, version)

    def count(self) -> Future[Counts]:
        """As of all hosts."""
        return self._call("count")

    def load(self, weights: Mapping[str, torch.Tensor], serial: int) -> list[int]:
        """As of all hosts. The weights are handed over in a file."""
        with tempfile.TemporaryDirectory(prefix="weights-", dir=_room_for(weights)) as folder:
            file = str(Path(folder) / "weights")
            torch.save(dict(weights), file)
            return self._call("load", file, serial).result()

    def pause(self) -> None:
        """As of all hosts."""
        self.is_paused = True
        self._send("pause")

    def resume(self) -> None:
        """As of all hosts."""
        self.is_paused = False
        self._send("resume")

    def _call(self, name: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        number = self._await(future)
        future.add_done_callback(lambda _: self._futures.pop(number, None))
        self._send("call", number, name, *arguments)
        return future

    def check_open(self) -> None:
        """As of all hosts."""
        if self._is_closed:
            raise RuntimeError(_ENDED)

    def close(self) -> None:
        """As of all hosts, in the event loop or behind its end."""
        if self._channel.is_closed:
            return
        with contextlib.suppress(RuntimeError):
            self._send("close")
        self._channel.socket.settimeout(_STOP_SECONDS)
        try:
            while not self._is_closed:
                self._read(waits=True)
            self._process.wait(_STOP_SECONDS)
        except (TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._end()
        self._channel.close()

    # --- the socket --------------------------------------------------------------------------

    def _send(self, *message: Any) -> None:
        self.check_open()
        try:
            self._channel.send(message)
        except OSError as error:
            raise RuntimeError(_ENDED) from error

    def _read(self, waits: bool = False) -> None:
        """Takes what has come."""
        try:
            for events in self._channel.arrived(waits=waits):
                self._take(events)
        except BlockingIOError:
            return
        except EOFError:
            self._end()

    def _end(self) -> None:
        """Nothing comes any more: the process has ended."""
        with self._lock:
            self._is_closed = True
            left = list(self._futures.values())
        if self._events is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._events.remove_reader(self._channel.socket.fileno())
            self._events = None
        for future in left:
            _settle(future, RuntimeError(_ENDED))

    def _take(self, events: Events) -> None:
        """Hands on what has come of a step."""
        for number, what in events:
            self._hand_on(number, what)

    def _hand_on(self, number: int, what: Any) -> None:
        if isinstance(what, Tokens):
            on_tokens = self._on_tokens.get(number)
            if on_tokens is not None:  # else nobody waits for them any more
                on_tokens(what)
            return
        future = self._futures.get(number)
        if future is not None:
            _settle(future, what)


def _settle(future: Future, result: Any) -> None:
    """Gives a future its result, unless it was cancelled or has one."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _room_for(weights: Mapping[str, torch.Tensor]) -> str | None:
    """A folder in memory with room for the weights; None: none of them has."""
    if not _MEMORY.is_dir():
        return None
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in weights.values()}  # fmt: skip
    free = os.statvfs(_MEMORY)
    return str(_MEMORY) if free.f_bavail * free.f_frsize > _SPARE * sum(held.values()) else None
