"""One request in the engine: its completions, and how it ends.

    engine's thread ── on_tokens ──▶ Mailbox ── one wake-up for a step ──▶ event loop ──▶ RowEvents
    RowEvents ──▶ RunningJob ──▶ pieces of each completion

What comes in the event loop itself, as of an engine in another process, is there at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from typing import Any

import anyio

from rllib_llm.engines.completions import Tokens
from rllib_llm.engines.hot_swap import VersionGoneError
from rllib_llm.engines.protocol import Ended, GuideError, Row
from rllib_llm.engines.torch_engine import Scores
from rllib_llm.serving.engine_host import EngineHost
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.job import Job
from rllib_llm.serving.metrics import JobWatch
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.serving.streams import Choice, Piece, TextStream
from rllib_llm.serving.versions import LiveWeights, Weights


class Mailbox:
    """Calls from any thread, made in an event loop in their order. Made in that loop.

    Args:
        events: the loop.
    """

    def __init__(self, events: asyncio.AbstractEventLoop) -> None:
        self._events = events
        self._thread = threading.get_ident()
        self._calls: deque[tuple[Callable[..., None], tuple]] = deque()
        self._is_woken = False

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Schedules `call` in the loop; runs it at once in the loop's own thread, unless others are
        queued."""
        if threading.get_ident() == self._thread and not self._calls:
            call(*arguments)
            return
        self._calls.append((call, arguments))
        if not self._is_woken:
            self._is_woken = True
            self._events.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        while self._calls:
            call, arguments = self._calls.popleft()
            call(*arguments)


class RowEvents:
    """The events of some rows, in order.

    async for i, event in rows:      # Tokens, then Ended or an exception, of row i
        ...
    rows.close()                     # whatever has not ended leaves the engine

    Args:
        host: of the engine.
        mailbox: of the event loop that waits.
        rows: what is asked for.
        grammar: that all of them keep to.
    """

    def __init__(
        self,
        host: EngineHost,
        mailbox: Mailbox,
        rows: Sequence[Row],
        grammar: str | None = None,
    ) -> None:
        self._events: deque[tuple[int, Tokens | Ended | BaseException]] = deque()
        self._reader: asyncio.Future[None] | None = None  # that waits for an event
        self._host, self._mailbox = host, mailbox
        self._num_left = len(rows)
        self._futures = host.submit_all(
            [replace(each, on_tokens=self._teller(i)) for i, each in enumerate(rows)], grammar
        )
        for i, future in enumerate(self._futures):
            future.add_done_callback(self._ender(i))

    def _teller(self, i: int) -> Callable[[Tokens], None]:
        return lambda tokens: self._mailbox.post(self._put, i, tokens)

    def _ender(self, i: int) -> Callable[[Future], None]:
        def tell(future: Future) -> None:
            if not future.cancelled():
                self._mailbox.post(self._put, i, future.exception() or future.result())

        return tell

    def _put(self, i: int, event: Tokens | Ended | BaseException) -> None:
        self._events.append((i, event))
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def fail(self, error: Exception) -> None:
        """Raises an error, such as a timeout, in the waiting request."""
        self._put(-1, error)

    def __aiter__(self) -> RowEvents:
        return self

    async def __anext__(self) -> tuple[int, Tokens | Ended]:
        while not self._events:
            if not self._num_left:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        i, event = self._events.popleft()
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Ended):
            self._num_left -= 1
            return i, event
        return i, self._with_later(i, event)

    def _with_later(self, i: int, tokens: Tokens) -> Tokens:
        """Tokens of a row with those that came behind them: a reader that is slower than the engine
        is given more at a time."""
        later = [tokens]
        while self._events and self._events[0][0] == i:
            event = self._events[0][1]
            if not isinstance(event, Tokens):
                break
            later.append(event)
            self._events.popleft()
        if len(later) == 1:
            return tokens
        return Tokens(
            list(chain.from_iterable(each.token_ids for each in later)),
            list(chain.from_iterable(each.logprobs for each in later)),
            list(chain.from_iterable(each.versions for each in later)),
            list(chain.from_iterable(each.likeliest for each in later)),
            later[-1].finish,
        )

    def leave(self, i: int) -> None:
        """Removes a row from the engine; it yields no more events."""
        if self._futures[i].cancel():
            self._num_left -= 1
            self._wake_reader()

    def abort(self) -> None:
        """Aborts all rows, which end with their partial output."""
        for future in self._futures:
            self._host.abort(future)

    def close(self) -> None:
        """Removes all rows from the engine."""
        for future in self._futures:
            future.cancel()


logger = logging.getLogger(__name__)

ENGINE_ENDED = "The server's engine has ended with an error, which its log shows."


def deadline_passed(seconds: float) -> ApiError:
    """The answer to a request that takes too long."""
    return ApiError(
        504, f"The request took longer than {seconds:g} s, the server's limit.",
        code="deadline_exceeded",
    )  # fmt: skip


class RunningJob:
    """A job in the engine. `async for i, piece in job` yields the pieces of completion i, whose
    prompt is number i // n; the last piece of each has a finish_reason.

    Args:
        request_id: of the request, to be told.
        job: what is asked.
        rows: its completions in the engine.
        scoring: of its prompts; None: they are not scored.
        watch: its clock.
        weights: of the server.
        tokenizer: of the model.
        settings: of the server.
    """

    def __init__(
        self,
        request_id: str,
        job: Job,
        rows: RowEvents,
        scoring: Future[list[Scores]] | None,
        watch: JobWatch,
        weights: LiveWeights,
        tokenizer: Any,
        settings: ServeSettings,
    ) -> None:
        self.request_id, self.job = request_id, job
        self._rows, self._scoring, self._watch, self._weights = rows, scoring, watch, weights
        self._tokenizer, self._settings = tokenizer, settings
        self.num_left = job.num_rows
        num_choices = len(job.prompts) * job.n
        self.choices = [self._choice(job.prompts[i // job.n]) for i in range(num_choices)]
        self.on_piece: Callable[[Piece], None] | None = None
        self._serials: dict[int, None] = {}  # of the weights that have sampled, in their order
        self._texts: dict[int, str] = {}  # for the log, if it is to have them
        self._deadline = anyio.current_time() + settings.deadline_s
        self._timer = asyncio.get_running_loop().call_later(settings.deadline_s, self._expire)

    def _choice(self, prompt: list[int]) -> Choice:
        job = self.job
        before = prompt[-8:] if job.continues_text else ()
        text = TextStream(self._tokenizer, before, job.stops, job.keeps_stop)
        return Choice(text, job.params.stop_token_ids, job.eos_token_ids)

    def _expire(self) -> None:
        self._rows.fail(deadline_passed(self._settings.deadline_s))

    async def scores(self) -> list[Scores]:
        """The scores of each prompt.

        Raises:
            ApiError: the deadline has passed, or the engine refuses or has ended.
        """
        assert self._scoring is not None, "they were not asked for"
        try:
            with anyio.fail_after(self._deadline - anyio.current_time()):
                found = await asyncio.wrap_future(self._scoring)
        except TimeoutError:
            raise deadline_passed(self._settings.deadline_s) from None
        except ValueError as error:
            raise self._refusal(error) from error
        except RuntimeError as error:
            raise ApiError(503, ENGINE_ENDED, code="engine_ended") from error
        self.num_left -= len(found)
        return found

    def __aiter__(self) -> RunningJob:
        return self

    async def __anext__(self) -> tuple[int, Piece]:
        while True:
            try:
                i, event = await self._rows.__anext__()
            except ValueError as error:  # the engine refuses the row
                raise self._refusal(error) from error
            except RuntimeError as error:
                raise ApiError(503, ENGINE_ENDED, code="engine_ended") from error
            choice = self.choices[i]
            if choice.is_done:
                continue
            piece = choice.end(event) if isinstance(event, Ended) else choice.tokens(event)
            self._watch.tokens(i, len(piece.token_ids))
            for serial in piece.versions:
                self._serials.setdefault(serial)
            if self.on_piece is not None:
                self.on_piece(piece)
            if self._settings.log_prompts:
                self._texts[i] = self._texts.get(i, "") + piece.text
            if choice.is_done:
                self._leave(i, piece)
            return i, piece

    def _leave(self, i: int, piece: Piece) -> None:
        self._rows.leave(i)
        self.num_left -= 1
        self._watch.finished(i, piece.finish_reason or "")

    def _refusal(self, error: ValueError) -> ApiError:
        if isinstance(error, VersionGoneError):  # it went between the request and the step
            return self._weights.gone("the version that was asked for")
        if isinstance(error, GuideError):
            return ApiError(
                400, "response_format must be one that can be followed to the end: what was "
                f"sampled could not be ({error}). Simplify it.", param="response_format",
                code="grammar_failed",
            )  # fmt: skip
        return ApiError(400, str(error))

    async def collect(self) -> list[Piece]:
        """All of each completion."""
        finish = None if self.job.samples else "length"
        whole = [Piece(finish_reason=finish) for _ in self.choices]
        async for i, piece in self:
            whole[i].add(piece)
        return whole

    @property
    def weights(self) -> list[Weights]:
        """Those that have sampled, in their order; where nothing was sampled yet, those that were
        asked for, or the newest."""
        found = [self._weights.of(serial) for serial in self._serials]
        if not found and self.job.version is not None:
            return [self._weights.of(self.job.version)]
        return found or [self._weights.newest]

    @property
    def num_weights(self) -> int:
        """How many versions of them have sampled."""
        return len(self._serials)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that were sampled and belong to the answer."""
        return sum(choice.num_tokens for choice in self.choices)

    def abort(self) -> None:
        """Ends it with what there is."""
        self._rows.abort()

    def close(self) -> None:
        """Aborts its rows in the engine."""
        self._timer.cancel()
        self._rows.close()
        if self._scoring is not None:
            self._scoring.cancel()
        if self._settings.log_prompts:
            decode = self._tokenizer.decode
            told = {"prompts": [decode(ids) for ids in self.job.prompts], "texts": self._texts}
            logger.info(json.dumps({"request_id": self.request_id, **told}))
        self._watch.close()
        self.num_left = 0
