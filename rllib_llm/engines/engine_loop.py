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
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

import torch

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended, Engine, InFlight, Noise, Row

OnToken = Callable[[int], None]


@dataclass
class _Request:
    """A completion that somebody waits for."""

    row: Row
    future: Future[Ended]
    on_token: OnToken | None
    num_streamed: int = 0


class EngineLoop:
    """Client of an engine that runs in a thread of its own. All methods are thread-safe.

    Args:
        engine: is used by nobody else from now on, and closed with this.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._requests: dict[Hashable, _Request] = {}  # in the engine; of the thread alone
        self._turn = threading.Condition()
        self._todo: list[Callable[[], None]] = []  # what the thread does before its next step
        self._waiting: set[Future] = set()
        self._is_closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._thread.start()

    # --- for other threads -------------------------------------------------------------------

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        row: int = 0,
        turn: int = 0,
        num_sampled: int = 0,
        on_token: OnToken | None = None,
    ) -> Future[Ended]:
        """Starts a completion. Cancelling the future takes it out of the engine.

        Args:
            token_ids: the prompt, and behind it `num_sampled` tokens that were sampled before.
            params: what to sample.
            seed, row, turn: name the randomness, as `protocol.Noise`.
            num_sampled: see `protocol.Row`.
            on_token: called for every token, in the engine's thread: it must be quick. What it
                raises ends the completion.

        Raises:
            RuntimeError: the loop is closed, or has ended with an error.
        """
        noise = Noise(seed, row, turn)
        return self._submit([(token_ids, params, noise, num_sampled, None)], on_token)[0]

    def submit_group(
        self, token_ids: Sequence[int], params: SamplingParams, noises: Sequence[Noise]
    ) -> list[Future[Ended]]:
        """Starts one completion of the same prompt for each noise; they share its KV cache."""
        group = object()
        return self._submit([(token_ids, params, noise, 0, group) for noise in noises], None)

    def complete(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        row: int = 0,
        turn: int = 0,
        on_token: OnToken | None = None,
    ) -> Ended:
        """As `submit`, and waits for the completion."""
        asked = {"seed": seed, "row": row, "turn": turn}
        return self.submit(token_ids, params, on_token=on_token, **asked).result()

    async def complete_async(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        row: int = 0,
        turn: int = 0,
        on_token: OnToken | None = None,
    ) -> Ended:
        """As `complete`, for an event loop, in which `on_token` is called, too. Cancelled, it takes
        the completion out of the engine."""
        events = asyncio.get_running_loop()

        def in_events(token: int) -> None:
            assert on_token is not None
            events.call_soon_threadsafe(on_token, token)

        called = None if on_token is None else in_events
        started = self.submit(token_ids, params, seed=seed, row=row, turn=turn, on_token=called)
        return await asyncio.wrap_future(started)

    def abort(self, future: Future[Ended]) -> None:
        """Takes a completion out of the engine; its future then has what there is of it, with
        finish="aborted", unless it ended before."""
        self._post(
            lambda: self._abort([i for i, r in self._requests.items() if r.future is future])
        )

    def load(
        self, weights: dict[str, torch.Tensor], version: int, in_flight: InFlight = "finish"
    ) -> None:
        """As `Engine.load`, and waits until the engine has taken them.

        Raises:
            ValueError: they are those of another model; the engine goes on with its own.
        """
        taken: Future[None] = Future()

        def take() -> None:
            try:
                self._engine.load(weights, version, in_flight)
            except ValueError as error:
                taken.set_exception(error)
            else:
                taken.set_result(None)

        taken.add_done_callback(self._forget)
        self._post(take, taken)
        taken.result()

    def close(self) -> None:
        """Ends the thread and closes the engine; completions under way get a RuntimeError."""
        with self._turn:
            self._is_closing = True
            self._turn.notify()
        self._thread.join()

    # --- handing over ------------------------------------------------------------------------

    def _submit(self, asked: list[tuple], on_token: OnToken | None) -> list[Future[Ended]]:
        requests = []
        for token_ids, params, noise, num_sampled, group in asked:
            row = Row(next(self._ids), list(token_ids), params, num_sampled, noise, group)
            requests.append(_Request(row, Future(), on_token))
        futures = [request.future for request in requests]
        for request in requests:
            forget = functools.partial(self._forget, row_id=request.row.id)
            request.future.add_done_callback(forget)
        self._post(lambda: self._add(requests), *futures)
        return futures

    def _forget(self, future: Future, row_id: Hashable = None) -> None:
        with self._turn:
            self._waiting.discard(future)
        if future.cancelled():
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the row with it
                self._post(lambda: self._abort([row_id]))

    def _post(self, task: Callable[[], None], *futures: Future) -> None:
        """Has the thread do something before its next step; if it ends first, the futures get the
        error."""
        with self._turn:
            if self._is_closing:
                raise RuntimeError(
                    "EngineLoop must be open: it was closed, or its engine raised an error. Make a "
                    "new engine."
                ) from self._error
            self._waiting.update(futures)
            self._todo.append(task)
            self._turn.notify()

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException = RuntimeError("EngineLoop was closed before the completion ended.")
        try:
            while self._handed_over():
                for ended in self._engine.step():
                    self._end(ended)
                self._stream()
        except BaseException as raised:  # noqa: BLE001  (the thread's border: others wait for it)
            self._error = error = raised
        with self._turn:
            self._is_closing = True
            left, self._waiting, self._todo = list(self._waiting), set(), []
        for future in left:
            with contextlib.suppress(InvalidStateError):  # it was cancelled meanwhile
                future.set_exception(error)
        self._engine.close()

    def _handed_over(self) -> bool:
        """Does what was asked for, waiting for it while there are no rows; False at the end."""
        while True:
            with self._turn:
                self._turn.wait_for(
                    lambda: self._is_closing or self._todo or self._engine.num_running
                )
                if self._is_closing:
                    return False
                tasks, self._todo = self._todo, []
            for task in tasks:
                task()
            if self._engine.num_running:
                return True

    def _add(self, requests: list[_Request]) -> None:
        wanted = [request for request in requests if not request.future.cancelled()]
        try:
            self._engine.add([request.row for request in wanted])
        except ValueError as error:  # of the request: others go on
            for request in wanted:
                _settle(request.future, error)
            return
        self._requests.update({request.row.id: request for request in wanted})

    def _abort(self, ids: list[Hashable]) -> None:
        for ended in self._engine.abort([i for i in ids if i in self._requests]):
            self._end(ended)

    def _stream(self) -> None:
        """Hands on tokens that were just sampled."""
        streams = [r for r in self._requests.values() if r.on_token is not None]
        running = [r for r in streams if not r.future.done()]
        if not running:
            return
        for request, tokens in zip(
            running, self._engine.sampled([r.row.id for r in running]), strict=True
        ):
            self._hand_on(request, tokens)

    def _hand_on(self, request: _Request, token_ids: list[int]) -> bool:
        """Calls `on_token` for tokens that are new; whether it raised nothing."""
        new, request.num_streamed = token_ids[request.num_streamed :], len(token_ids)
        try:
            for token in new:
                assert request.on_token is not None
                request.on_token(token)
        except Exception as error:  # noqa: BLE001  (of the caller, who gets it)
            request.on_token = None
            _settle(request.future, error)
            self._abort([request.row.id])
            return False
        return True

    def _end(self, ended: Ended) -> None:
        request = self._requests.pop(ended.id, None)
        if request is None:
            return
        if request.on_token is None or self._hand_on(request, ended.token_ids):
            _settle(request.future, ended)


def _settle(future: Future[Ended], result: Ended | Exception) -> None:
    """Gives a future its result, unless it was cancelled or has one."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
