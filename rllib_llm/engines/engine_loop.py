"""One thread that owns an engine, and a client for everyone else.

Conversations and servers ask for completions from many threads, or from one event loop; the engine
samples all of them together. What is asked is handed over between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import (
    Ended,
    Engine,
    EngineEndedError,
    GuideError,
    InFlight,
    Noise,
    OnTokens,
    Row,
    Tokens,
)

_CLOSED = (
    "EngineLoop must be open: it was closed, or its engine raised an error. Make a new engine."
)
# Conversations whose tools answer at about the same time, and clients whose completions have just
# ended, are waited for while an engine is idle: as long as another one comes within the first, and
# no longer than the second, seconds. Prompts that are prefilled one by one take thrice as long.
_GATHERED_WITHIN, _GATHERED_FOR = 0.002, 0.03
Result = TypeVar("Result")


@dataclass
class _Request:
    """A completion that was asked for."""

    row: Row
    future: Future[Ended]
    streams: bool
    num_streamed: int = 0


class EngineLoop:
    """Thread-safe client of an engine that runs in its own thread.

    Args:
        engine: is owned by this from now on, and closed with it.
        after_step: called in the thread when all that has come of a step, or of what was asked
            between two, was handed on.
    """

    def __init__(self, engine: Engine, after_step: Callable[[], None] | None = None) -> None:
        self._engine, self._after_step = engine, after_step or (lambda: None)
        self._ids = itertools.count()
        self._requests: dict[Hashable, _Request] = {}  # in the engine; of the thread alone
        self._turn = threading.Condition()
        self._todo: list[Callable[[], None]] = []  # what the thread does before its next step
        self._waiting: set[Future] = set()
        self._num_left = 0  # completions that have ended since others came for the last time
        self._is_closing = self.is_paused = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._thread.start()

    # --- for other threads -------------------------------------------------------------------

    def submit(
        self, token_ids: Sequence[int], params: SamplingParams, *, seed: int = 0, row: int = 0,
        turn: int = 0, num_sampled: int = 0, conversation: Hashable | None = None,
        on_tokens: OnTokens | None = None, **shown: Any,
    ) -> Future[Ended]:  # fmt: skip
        """Starts a completion. Cancelling the future takes it out of the engine.

        Args:
            token_ids: the prompt, then `num_sampled` tokens that were sampled before.
            seed, row, turn: name the randomness, as `protocol.Noise`.
            shown: `images` and `num_shown` of the row.

        Raises:
            EngineEndedError: the loop is closed, or has ended with an error.
        """
        asked = Row(
            None, token_ids, params, num_sampled, Noise(seed, row, turn),
            conversation=conversation, on_tokens=on_tokens, **shown,
        )  # fmt: skip
        return self.submit_all([asked])[0]

    def submit_all(self, rows: Sequence[Row]) -> list[Future[Ended]]:
        """Starts completions together: in the order of `submit`, without a step between them."""
        requests = []
        for each in rows:
            row = replace(each, id=next(self._ids), token_ids=list(each.token_ids))
            requests.append(_Request(row, Future(), row.on_tokens is not None))
        futures = [request.future for request in requests]
        for request in requests:
            forget = functools.partial(self._forget, row_id=request.row.id)
            request.future.add_done_callback(forget)
        self._post(lambda: self._add(requests), *futures)
        return futures

    def do(self, task: Callable[[], Result]) -> Future[Result]:
        """Runs `task` in the engine's thread between two steps; returns or raises what it does."""
        done: Future[Result] = Future()

        def call() -> None:
            try:
                result = task()
            except ValueError as error:
                settle(done, error)
            else:
                settle(done, result)

        done.add_done_callback(self._forget)
        self._post(call, done)
        return done

    def complete(self, token_ids: Sequence[int], params: SamplingParams, **asked: Any) -> Ended:
        """Calls `submit` and waits for the completion."""
        return self.submit(token_ids, params, **asked).result()

    async def complete_async(
        self, token_ids: Sequence[int], params: SamplingParams, *,
        on_tokens: OnTokens | None = None, **asked: Any,
    ) -> Ended:  # fmt: skip
        """As `complete`, for an event loop, in which `on_tokens` is called, too. Cancelled, it
        takes the completion out of the engine."""
        if on_tokens is not None:
            call: Any = asyncio.get_running_loop().call_soon_threadsafe
            on_tokens = functools.partial(call, on_tokens)
        future = self.submit(token_ids, params, on_tokens=on_tokens, **asked)
        return await asyncio.wrap_future(future)

    def abort(self, future: Future[Ended]) -> None:
        """Takes a completion out of the engine; its future then has the partial output, with
        finish="aborted", unless it ended before."""
        self._post(
            lambda: self._abort([i for i, r in self._requests.items() if r.future is future])
        )

    def load(
        self, weights: dict[str, torch.Tensor], version: int, in_flight: InFlight = "finish"
    ) -> None:
        """Calls `Engine.load` in the thread, and waits until it has returned.

        Raises:
            ValueError: they are those of another model; the engine keeps its own.
        """
        self.do(lambda: self._engine.load(weights, version, in_flight)).result()

    def check_open(self) -> None:
        """Raises EngineEndedError if it is closed, or has ended with an error."""
        if self._is_closing:
            raise EngineEndedError(_CLOSED) from self._error

    def pause(self) -> None:
        """Pauses sampling; requests are queued.

        Raises:
            EngineEndedError: see `check_open`.
        """
        self.check_open()
        self.is_paused = True

    def resume(self) -> None:
        """Resumes sampling.

        Raises:
            EngineEndedError: see `check_open`.
        """
        self.check_open()
        with self._turn:
            self.is_paused = False
            self._turn.notify()

    def close(self) -> None:
        """Ends the thread and closes the engine; completions under way get an EngineEndedError."""
        with self._turn:
            self._is_closing = True
            self._turn.notify()
        self._thread.join()

    # --- handing over ------------------------------------------------------------------------

    def _forget(self, future: Future, row_id: Hashable = None) -> None:
        with self._turn:
            self._waiting.discard(future)
        if future.cancelled():
            with contextlib.suppress(EngineEndedError):  # the loop has ended, and the row with it
                self._post(lambda: self._abort([row_id]))

    def _post(self, task: Callable[[], None], *futures: Future) -> None:
        """Queues a task for the thread's next step; if the thread ends first, the futures get its
        error."""
        with self._turn:
            self.check_open()
            self._waiting.update(futures)
            self._todo.append(task)
            self._turn.notify()

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException = EngineEndedError("EngineLoop was closed before this had ended.")
        try:
            while self._handed_over():
                ended = self._engine.step()
                self._num_left += len(ended)
                for each in ended:
                    self._end(each)
                self._stream()
                self._after_step()
        except BaseException as raised:  # noqa: BLE001  (the thread's border: others wait for it)
            self._error = error = raised
        with self._turn:
            self._is_closing = True
            left, self._waiting, self._todo = list(self._waiting), set(), []
        for future in left:
            settle(future, error)
        self._after_step()
        self._engine.close()

    def _handed_over(self) -> bool:
        """Processes the queue, waiting for requests if there are no rows; False when closed."""
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._is_closing or self._todo or self._may_step())
                if self._is_closing:
                    return False
                tasks, self._todo = self._todo, []
            was_idle = not self._engine.num_running
            for task in tasks:
                task()
            may_gather = was_idle and (
                self._num_left > 0
                or any(r.row.conversation is not None for r in self._requests.values())
            )
            if self._may_step() and not (may_gather and self._gathers()):
                return True
            self._after_step()

    def _gathers(self) -> bool:
        """Waits briefly for more prompts, so that they are prefilled together; returns whether the
        queue has entries. Late requests do not extend the wait."""
        self._num_left = 0
        deadline = time.monotonic() + _GATHERED_FOR
        with self._turn:
            while not self._is_closing and time.monotonic() < deadline:
                count = len(self._todo)
                self._turn.wait(_GATHERED_WITHIN)
                if len(self._todo) == count:
                    break
            return bool(self._todo)

    def _may_step(self) -> bool:
        return bool(self._engine.num_running) and not self.is_paused

    def _add(self, requests: list[_Request]) -> None:
        wanted = [request for request in requests if not request.future.cancelled()]
        self._num_left = max(0, self._num_left - len(wanted))
        try:
            self._engine.add([request.row for request in wanted])
        except ValueError as error:  # of the request: others are not affected
            for request in wanted:
                settle(request.future, error)
            return
        self._requests.update({request.row.id: request for request in wanted})

    def _abort(self, ids: list[Hashable]) -> None:
        for ended in self._engine.abort([i for i in ids if i in self._requests]):
            self._end(ended)

    def _stream(self) -> None:
        """Hands on tokens that were just sampled."""
        running = [r for r in self._requests.values() if r.streams and not r.future.done()]
        if not running:
            return
        ids, starts = [r.row.id for r in running], [r.num_streamed for r in running]
        for request, new in zip(running, self._engine.sampled(ids, starts), strict=True):
            self._hand_on(request, new)

    def _hand_on(self, request: _Request, new: Tokens) -> bool:
        """Calls `on_tokens` with tokens that are new, if any; whether it raised nothing."""
        request.num_streamed += len(new.token_ids)
        try:
            if new.token_ids and request.row.on_tokens is not None:
                request.row.on_tokens(new)
        except Exception as error:  # noqa: BLE001  (of the caller, who gets it)
            request.streams = False
            settle(request.future, error)
            self._abort([request.row.id])
            return False
        return True

    def _end(self, ended: Ended) -> None:
        request = self._requests.pop(ended.id, None)
        if request is None:
            return
        rest = ended.tokens.since(request.num_streamed)
        if request.streams and not self._hand_on(request, rest):
            return
        problem = request.row.guide.problem if request.row.guide is not None else ""
        settle(request.future, GuideError(problem) if problem else ended)


def settle(future: Future[Result], result: Result | BaseException) -> None:
    """Sets a future's result or exception, unless it was cancelled or has one."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
