"""The policy behind a server: its engine in a thread, its weights, and the requests for them.

requests ─▶ RunningJob ─▶ EngineHost ─▶ tokens ─▶ Mailbox ─▶ Choice ─▶ pieces
weights  ─▶ load ─▶ EngineHost ─▶ LiveWeights

The engine's thread puts tokens into the mailbox, which wakes the event loop once for a step. Tokens
that arrive in the event loop itself, such as those of an engine in another process, need no
wake-up.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import anyio
import torch
from fastapi import Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic_core import to_json

from rllib_llm.data.decoding import TextStream, TokenTexts
from rllib_llm.engines.engine_loop import settle
from rllib_llm.engines.hot_swap import VersionGoneError
from rllib_llm.engines.protocol import Ended, EngineEndedError, GuideError, Tokens
from rllib_llm.modules.text_scores import TextScores
from rllib_llm.serving.chat import Chats, ImageReader
from rllib_llm.serving.engine_host import Counts, fingerprint
from rllib_llm.serving.engine_process import EngineHost
from rllib_llm.serving.guides import BusyError, no_good
from rllib_llm.serving.jobs import Choice, Job, Piece
from rllib_llm.serving.schemas import MAX_TOLD, ApiError, refuse
from rllib_llm.serving.security import Client
from rllib_llm.serving.sessions import Sessions
from rllib_llm.serving.settings import ServeSettings

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

LARGE_TOKENS = 2**10  # of an answer whose JSON is made beside the event loop
_THREADS = 2  # that read large requests, and write large answers
_SMALL_BYTES = 2**14  # of a request that is read in the event loop
_ALIVE_SECONDS = 10.0  # a step with long prompts may take some
_GRAMMAR_SECONDS = 10.0
_MOST_RETRY_SECONDS = 30
JsonResponse = partial(Response, media_type="application/json")  # of JSON that is made already
MODEL_GONE = "model_not_found"
_MAX_REMEMBERED = 10_000  # versions
SHUTTING_DOWN = "The server is about to stop and takes no more requests."


@dataclass(frozen=True)
class ServedWeights:
    """Weights that were loaded.

    `serial` counts loads, and is what the engine stamps on tokens; `epoch` and `version` are the
    publisher's: after a restore a lower version of a later epoch is another one. `num_bytes` came
    from the run in `transfer_seconds`; 0 of a folder.
    """

    serial: int
    epoch: int
    version: int
    fingerprint: str
    source: str
    num_bytes: int = 0
    transfer_seconds: float = 0.0
    load_seconds: float = 0.0
    loaded_at: float = field(default_factory=time.time)

    @property
    def label(self) -> str:
        """EPOCH.VERSION"""
        return f"{self.epoch}.{self.version}"


class LiveWeights:
    """The versions that can be asked for, in `live`: the newest, and the one before it as long as
    requests may ask for it. Of the event loop alone, but for `remember` and `of`.

    Args:
        first: that it is served with until others come.
    """

    def __init__(self, name: str, first: ServedWeights) -> None:
        self.name = name
        self._known, self.live = {first.serial: first}, [first]
        self._changed = asyncio.Event()

    @property
    def newest(self) -> ServedWeights:
        """The version used by requests that name none."""
        return self.live[0]

    def remember(self, weights: ServedWeights) -> None:
        """Registers weights that may sample from now on. Thread-safe."""
        self._known[weights.serial] = weights
        while len(self._known) > _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]

    def set_live(self, live: list[ServedWeights]) -> None:
        """Sets the versions that the engine holds now."""
        self.live = live
        self._changed.set()
        self._changed = asyncio.Event()

    def of(self, serial: int) -> ServedWeights:
        """The weights that have sampled a token."""
        return self._known[serial]

    def id_of(self, weights: ServedWeights) -> str:
        """NAME@EPOCH.VERSION"""
        return f"{self.name}@{weights.label}"

    def named(self, model: str | None) -> ServedWeights | None:
        """The weights that a request's `model` asks for, None: the newest; 404 where they are not
        live."""
        if model is None or model == self.name:
            return None
        for weights in self.live:
            if model == self.id_of(weights):
                return weights
        raise self.gone(model)

    def gone(self, model: str) -> ApiError:
        """The answer where a model's weights are not here."""
        live = [self.name, *(self.id_of(weights) for weights in self.live)]
        message = f"model={model[:MAX_TOLD]!r} must be one of {live}; the first is the newest."
        return ApiError(404, message, "model", MODEL_GONE)

    async def wait_for(self, wanted: str | None, seconds: float) -> None:
        """Waits until the newest version is at least that of the header X-Min-Weight-Version,
        VERSION or EPOCH.VERSION; 400 for another value, 409 where it does not come in time."""
        if wanted is None:
            return
        header, parts = "X-Min-Weight-Version", wanted.split(".")
        is_number = all(part.isdecimal() and len(part) < 20 for part in parts)
        refuse(len(parts) > 2 or not is_number,
               f"{header}={wanted[:40]!r} must be VERSION or EPOCH.VERSION, whole numbers.", header)
        least = [*map(int, parts)]
        try:
            with anyio.fail_after(seconds):
                while [self.newest.epoch, self.newest.version][-len(least) :] < least:
                    await self._changed.wait()
        except TimeoutError:
            message = f"{header}={wanted!r} must be at most {self.newest.label}, the newest."
            raise ApiError(409, message, header, "weight_version_not_available") from None


class RequestContext:
    """A request, apart from its body. version: serial number of the weights that it asks for, None:
    the newest."""

    def __init__(self, request: Request) -> None:
        self.request, state = request, request.scope["state"]
        self.service: Service = request.app.state.service
        self.request_id: str = state["request_id"]
        self.client: Client = state["client"]
        self._size: int = state["size"]  # of its body, bytes
        self._digest: str | None = state.get("digest")  # where the client gave it no id
        self.version: int | None = None

    def answer_id(self, seed: int | None) -> str:
        """The request's id; where it has a `seed` and its client gave it none, a hash of its body:
        the same request has the same answer, id included."""
        return f"seed-{self._digest}" if self._digest and seed is not None else self.request_id

    async def begin(self, model: str | None) -> None:
        """Waits for the weights that it asks for, `model` by name, among others; see
        `LiveWeights.wait_for` and `named`. Refuses it where none can be taken."""
        service = self.service
        service.check_open()
        wanted = self.request.headers.get("x-min-weight-version")
        await service.weights.wait_for(wanted, service.settings.weights_wait_s)
        weights = service.weights.named(model)
        self.version = None if weights is None else weights.serial

    async def beside_loop(
        self, work: Callable[..., Result], *arguments: Any, is_large: bool = False
    ) -> Result:
        """Returns the result of `work`, run in a thread if the request, or the work, is large."""
        is_large = is_large or self._size > _SMALL_BYTES
        return await self.service.beside_loop(is_large, work, *arguments)


Event = dict[str, Any] | bytes
"""Of an answer: what is sent as JSON, or that JSON."""


def encoded(event: Any) -> bytes:
    """The event as JSON, in which numbers that are too large are null."""
    return event if isinstance(event, bytes) else to_json(event, inf_nan_mode="null")


_LEVELS = 5  # from an answer to the likeliest tokens at a place of one of its texts


def encoded_in_parts(event: Any, levels: int = _LEVELS) -> bytes:
    """As `encoded`, for a thread: other threads may run in between, which one call for all of a
    large answer would not let. Keys are texts."""
    if levels and isinstance(event, dict):
        pairs = (
            to_json(str(name)) + b":" + encoded_in_parts(value, levels - 1)
            for name, value in event.items()
        )
        return b"{" + b",".join(pairs) + b"}"
    if levels and isinstance(event, list):
        return b"[" + b",".join(encoded_in_parts(each, levels - 1) for each in event) + b"]"
    return encoded(event)


class Mailbox:
    """Runs calls from any thread in an event loop, in their order. Create it in that loop."""

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


def engine_ended() -> ApiError:
    """The answer where the engine is gone."""
    return ApiError(503, "The server's engine has ended; its log says how.", None, "engine_ended")


def deadline_passed(seconds: float) -> ApiError:
    """The answer to a request that takes too long."""
    message = f"The request took longer than {seconds:g} s, the server's limit."
    return ApiError(504, message, None, "deadline_exceeded")


class RunningJob:
    """A job in the engine. `async for i, piece in job` yields the pieces of completion i, whose
    prompt is number i // n; the last piece of each has a finish_reason."""

    def __init__(self, service: Service, request_id: str, job: Job) -> None:
        self.request_id, self.job = request_id, job
        self._service, self._settings = service, service.settings
        self._start, self._last_token = time.perf_counter(), 0.0
        self._first_tokens: dict[int, float] = {}  # when each completion's first has come
        service.metrics.prompt_tokens.inc(job.prompt_tokens)
        rows, least = job.rows(), job.params.min_new_tokens
        self.num_left = job.num_rows
        befores = [prompt[-8:] if job.continues_text else () for prompt in job.prompts]
        self._choices = [
            Choice(TextStream(service.tokenizer, before, job.stops, job.keeps_stop, least),
                   job.params.stop_token_ids, job.eos_token_ids)
            for before in befores for _ in range(job.n)
        ]  # fmt: skip
        finish = None if job.samples else "length"
        self.whole = [Piece(finish_reason=finish) for _ in self._choices]
        self._serials: dict[int, None] = {}  # of the weights that have sampled, in their order
        self._events: deque[tuple[int, Tokens | Ended | BaseException]] = deque()
        self._arrived = asyncio.Event()
        self._rows_left = len(rows)
        self._futures = service.host.submit_all(
            [replace(each, on_tokens=partial(self._post, i)) for i, each in enumerate(rows)],
            job.grammar,
        )
        for i, future in enumerate(self._futures):
            future.add_done_callback(partial(self._post_end, i))
        self._scoring: Future[list[TextScores]] | None = None
        if job.prompt_logprobs is not None:
            self._scoring = service.host.score(job.prompts, job.prompt_logprobs, job.version)
        seconds = self._settings.deadline_s
        self._timer = asyncio.get_running_loop().call_later(
            seconds, self._fail, deadline_passed(seconds)
        )

    def _post(self, i: int, event: Tokens | Ended | BaseException) -> None:
        self._service.mailbox.post(self._put, i, event)

    def _post_end(self, i: int, future: Future) -> None:
        if not future.cancelled():
            self._post(i, future.exception() or future.result())

    def _put(self, i: int, event: Tokens | Ended | BaseException) -> None:
        self._events.append((i, event))
        self._arrived.set()

    def _fail(self, error: ApiError) -> None:
        self._put(-1, error)
        if self._scoring is not None:
            settle(self._scoring, error)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        events = self._events
        while events or self._rows_left:
            if not events:
                self._arrived.clear()
                await self._arrived.wait()
            i, event = events.popleft()
            if isinstance(event, BaseException):
                raise event if isinstance(event, ApiError) else self._refusal(event)
            self._rows_left -= isinstance(event, Ended)
            choice, whole = self._choices[i], self.whole[i]
            if choice.is_done:
                continue
            piece = choice.end(event) if isinstance(event, Ended) else choice.tokens(event)
            # A reader that is slower than the engine takes several at once.
            while not choice.is_done and events and events[0][0] == i:
                if not isinstance(more := events[0][1], Tokens):
                    break
                events.popleft()
                piece.add(choice.tokens(more))
            whole.add(piece)
            self._serials |= dict.fromkeys(piece.versions)
            now, metrics, count = time.perf_counter(), self._service.metrics, len(whole.token_ids)
            if piece.token_ids:
                self._last_token = now
                if not self._first_tokens:
                    metrics.first_token.observe(now - self._start)
                self._first_tokens.setdefault(i, now)
            if choice.is_done:
                self._rows_left -= self._futures[i].cancel()
                self.num_left -= 1
                metrics.generation_tokens.inc(count)
                metrics.success.labels(whole.finish_reason or "").inc()
                metrics.end_to_end.observe(now - self._start)
                if count > 1:
                    metrics.per_token.observe((now - self._first_tokens[i]) / (count - 1))
            yield i, piece

    async def scores(self) -> list[TextScores]:
        """The scores of each prompt."""
        assert self._scoring is not None
        try:
            found = await asyncio.wrap_future(self._scoring)
        except (ValueError, RuntimeError) as error:
            raise self._refusal(error) from error
        self.num_left -= len(found)
        return found

    def _refusal(self, error: BaseException) -> ApiError:
        """The answer where the engine refuses a row, or has ended."""
        if isinstance(error, VersionGoneError):  # it went between the request and the step
            return self._service.weights.gone("the version that was asked for")
        if isinstance(error, GuideError):
            message = f"response_format must be one that can be followed to the end: {error}."
            return ApiError(400, message, "response_format", "grammar_failed")
        return ApiError(400, str(error)) if isinstance(error, ValueError) else engine_ended()

    @property
    def weights(self) -> list[ServedWeights]:
        """Those that have sampled, in their order; where nothing was sampled yet, those that were
        asked for, or the newest."""
        weights, version = self._service.weights, self.job.version
        asked = () if version is None else (version,)
        return [weights.of(each) for each in (*self._serials,) or asked] or [weights.newest]

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that were sampled and belong to the answer."""
        return sum(len(each.token_ids) for each in self.whole)

    def abort(self) -> None:
        """Ends the job with the partial output; without scores of its prompts it has no answer."""
        for future in self._futures:
            self._service.host.abort(future)
        if self._scoring is not None:
            message = "The request was aborted before its prompts were scored. Send it again."
            settle(self._scoring, ApiError(503, message, None, "aborted"))

    def close(self) -> None:
        """Aborts its rows in the engine."""
        self._timer.cancel()
        for future in self._futures:
            future.cancel()
        if self._scoring is not None:
            self._scoring.cancel()
        if self._settings.log_prompts:
            decode = self._service.tokenizer.decode
            texts = {i: each.text for i, each in enumerate(self.whole) if each.token_ids}
            told = {"prompts": [decode(ids) for ids in self.job.prompts], "texts": texts}
            logger.info(json.dumps({"request_id": self.request_id, **told}))
        if self._last_token:  # the answer is with the network, or nobody waits for it any more
            self._service.metrics.framework.observe(time.perf_counter() - self._last_token)
        self.num_left = 0


_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"namespace": "rllib_llm", "registry": self.registry}
        histogram: Any = partial(Histogram, buckets=_SECONDS, **shared)
        counter: Any = partial(Counter, **shared)
        gauge: Any = partial(Gauge, **shared)
        self.first_token = histogram("time_to_first_token_seconds", "From request to first token.")
        self.per_token = histogram("time_per_output_token_seconds", "Between two tokens of a row.")
        self.end_to_end = histogram("e2e_request_latency_seconds", "From request to last token.")
        self.framework = histogram(
            "framework_seconds", "From an answer's last token until it was handed to the network."
        )
        self.swap = histogram("weights_load_seconds", "Of a swap of weights; rows go on meanwhile.")
        self.transfer = histogram("weights_transfer_seconds", "Of weights, from a run to here.")
        self.transferred = counter("weights_transferred_bytes", "Of weights, from a run to here.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = counter("generation_tokens", "Tokens that were sampled.")
        self.success = counter("request_success", "Completions that ended.", ["finished_reason"])
        self.refusals = counter("requests_refused", "Requests that were not taken.", ["reason"])
        self.swaps = counter("weights_swaps", "Versions that were loaded.")
        self.running = gauge("num_requests_running", "Completions in the engine's batch.")
        self.waiting = gauge("num_requests_waiting", "Completions that wait for a place in it.")
        self.version = gauge("weights_version", "Of the newest weights.")
        self.epoch = gauge("weights_epoch", "Of the newest weights.")
        self.age = gauge("weights_age_seconds", "Since the newest weights came into use.")
        by_version = "Completions by the version that samples."
        self.lane_rows = gauge("lane_rows", by_version, ["version"])
        self.lag = gauge("event_loop_lag_seconds", "By how much the last timer was late.")

    def swapped(self, weights: ServedWeights) -> None:
        """Counts a swap."""
        self.swap.observe(weights.load_seconds)
        self.swaps.inc()
        if weights.num_bytes:
            self.transfer.observe(weights.transfer_seconds)
            self.transferred.inc(weights.num_bytes)
        self.version.set(weights.version)
        self.epoch.set(weights.epoch)

    def text(self, weights: LiveWeights, counts: Counts | None) -> bytes:
        """All of it, in Prometheus' format. counts: None where the engine does not tell them."""
        self.age.set(time.time() - weights.newest.loaded_at)
        if counts is not None:
            self.running.set(counts.sampling)
            self.waiting.set(counts.waiting)
            self.lane_rows.clear()
            for serial, rows in counts.by_version.items():
                self.lane_rows.labels(weights.of(serial).label).set(rows)
            self.version.set(weights.newest.version)
            self.epoch.set(weights.newest.epoch)
        return generate_latest(self.registry)


class Service:
    """Samples for requests. Made in any thread; `start` and all that follows are for the event
    loop's, but `load`.

    Args:
        host: the engine; closed with this.
        source: where the first weights come from, to be told.
        serial: of the first weights, as the engine stamps them on tokens.
        clock: seconds.
    """

    def __init__(
        self, host: EngineHost, tokenizer: Any, settings: ServeSettings, *, source: str,
        serial: int = 0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.host, self.tokenizer, self.settings = host, tokenizer, settings
        self.texts = TokenTexts(tokenizer)
        self.metrics = Metrics()
        self.limits = host.limits
        first = ServedWeights(serial, 0, serial, host.fingerprint, source)
        self.weights = LiveWeights(settings.served_name, first)
        self._serials = itertools.count(serial + 1)
        self._load_lock = threading.Lock()
        self.jobs: dict[object, RunningJob] = {}
        self.images = ImageReader(settings, source, tokenizer)
        self.chats, self.sessions = Chats(tokenizer, settings.template_settings or {}), Sessions()
        self.updating = asyncio.Lock()
        self._pins = itertools.count()  # of grammars
        self._clock = clock
        self._full_since: float | None = None  # the engine has no free place since then
        self._num_ended = 0  # completions, since then
        self.is_ready, self.is_draining = False, False
        self.why_not_ready = "The server is starting."
        self._has_started = False

    async def start(self) -> None:
        """Makes it ready, in the event loop that requests come to."""
        if self._has_started:
            return
        self._has_started = True
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self.threads = anyio.CapacityLimiter(_THREADS)
        await self.host.listen()
        self.is_ready = True

    async def drain(self, seconds: float) -> bool:
        """Takes no more requests and waits until those under way have ended, so long at most;
        whether they have."""
        self.is_draining = True
        deadline = time.monotonic() + seconds
        while self.jobs and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self.jobs

    def abort(self, request_ids: Sequence[str] | None = None) -> list[str]:
        """Aborts requests, None: all, which are answered with their partial output; returns those
        that were under way."""
        aborted = []
        for job in list(self.jobs.values()):
            if request_ids is None or job.request_id in request_ids:
                aborted.append(job.request_id)
                with suppress(EngineEndedError):  # it has ended them
                    job.abort()
        return aborted

    def close(self) -> None:
        """Ends the engine, and requests that are under way with it."""
        self.is_ready = False
        self.host.close()

    # --- weights -----------------------------------------------------------------------------

    def load(
        self, weights: Mapping[str, torch.Tensor], *, epoch: int, version: int, source: str,
        **transfer: Any,
    ) -> ServedWeights:  # fmt: skip
        """Loads weights for new requests. Thread-safe, except in the event loop's own thread; waits
        until rows of the version before the newest have ended. ValueError: of another model.

        Args:
            weights: under the names of the policy's state, or of the model's.
            epoch, version: the publisher's. A lower version of a later epoch is welcome.
            transfer: `num_bytes` and `transfer_seconds` of `ServedWeights`, where they are known.
        """
        with self._load_lock:
            start = time.perf_counter()
            tensors = dict(weights)
            serial = next(self._serials)
            # Told before a token can be sampled by them.
            loaded = ServedWeights(serial, epoch, version, fingerprint(tensors), source, **transfer)
            self.weights.remember(loaded)
            serials = self.host.swap(tensors, serial)
            loaded = replace(loaded, load_seconds=time.perf_counter() - start)
            self.weights.remember(loaded)
            live = [self.weights.of(each) for each in serials]
        self.metrics.swapped(loaded)
        self.mailbox.post(self.weights.set_live, live)
        logger.info(
            "weights %s of %s in use after %.3f s", loaded.label, source, loaded.load_seconds
        )
        return loaded

    async def check_takes_weights(self) -> None:
        """Refuses weights, 409, where `load` would wait for completions that a pause holds up."""
        if not self.host.is_paused or self.settings.in_flight != "finish":
            return
        newest = self.weights.newest
        for serial, number in (await self.counts()).by_version.items():
            refuse(number and serial != newest.serial, f"Weights {newest.label} must be the last "
                   f"that are loaded while the server is paused: {number} completions of "
                   f"{self.weights.of(serial).label} have to end first. POST /resume, or "
                   "/abort_requests.", None, "paused", 409)  # fmt: skip

    # --- requests ----------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuses requests, 503, where none can be taken now."""
        message = SHUTTING_DOWN if self.is_draining else self.why_not_ready
        refuse(not self.is_ready or self.is_draining, message, None, "unavailable", 503)
        self.host.check_open()

    async def encoded(self, is_large: bool, event: Event) -> bytes:
        """Returns the event as JSON, made in a thread and in parts if it is large."""
        return await self.beside_loop(is_large, encoded_in_parts if is_large else encoded, event)

    async def beside_loop(
        self, is_large: bool, work: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Returns the result of `work`, run in a thread if it is large."""
        if not is_large:
            return work(*arguments)
        return await anyio.to_thread.run_sync(work, *arguments, limiter=self.threads)

    async def counts(self) -> Counts:
        """Returns the completions in the engine; 503 where it does not answer, or has ended."""
        try:
            with anyio.fail_after(_ALIVE_SECONDS):
                return await asyncio.wrap_future(self.host.count())
        except TimeoutError:
            message = f"The server's engine has not answered in {_ALIVE_SECONDS:g} s."
            raise ApiError(503, message, None, "engine_silent") from None
        except Exception as error:  # whatever its step has raised
            raise engine_ended() from error

    def _admit(self, job: Job) -> None:
        """Refuses a job for which there is no place: 429, or 400 where there never is."""
        most = self.settings.max_rows + self.settings.max_waiting
        refuse(job.num_rows > most, f"n={job.n} completions of {len(job.prompts)} prompts must be "
               f"at most {most} together, the server's places.", "n", "too_many_completions")
        if self.num_rows + job.num_rows > most:
            self.metrics.refusals.labels("queue").inc()
            # Until half of the queue has begun, at the rate at which completions have ended since
            # the engine is full. Clients that all come back each second take a third of the
            # server's time.
            seconds = 1
            if self._full_since is not None and self._num_ended:
                interval = (self._clock() - self._full_since) / self._num_ended
                seconds = max(1, math.ceil(interval * self.settings.max_waiting / 2))
            raise ApiError(
                429, f"The server is full: {self.num_rows} completions are under way or wait, and "
                f"{job.num_rows} more would be above {most}.", None, "server_overloaded",
                {"Retry-After": str(min(seconds, _MOST_RETRY_SECONDS))},
            )  # fmt: skip

    def _count_ended(self, num_rows: int) -> None:
        """Counts completions that have ended while others wait for their places: without a queue
        their rate would be that of the requests."""
        if self.num_rows < self.settings.max_rows:
            self._full_since, self._num_ended = None, 0
        elif self._full_since is None:
            self._full_since = self._clock()
        else:
            self._num_ended += num_rows

    async def _compile(self, grammar: str, pin: int, field: str) -> None:
        """Waits for a grammar; 400 where it is no good, 429 where too many wait, 503 where it takes
        too long."""
        try:
            with anyio.fail_after(_GRAMMAR_SECONDS):
                await asyncio.wrap_future(self.host.compile(grammar, pin))
        except TimeoutError:
            message = f"{field} was not compiled in {_GRAMMAR_SECONDS:g} s. Make it smaller."
            raise ApiError(503, message, field, "grammar_timeout") from None
        except ValueError as error:
            raise no_good(field, str(error)) from error
        except BusyError as error:
            self.metrics.refusals.labels("queue").inc()
            message = f"{field} cannot be compiled now: {error}."
            raise ApiError(429, message, field, "server_overloaded") from error

    @asynccontextmanager
    async def run(self, context: RequestContext, job: Job) -> AsyncIterator[RunningJob]:
        """Starts a job, when its grammar is compiled; what of it has not ended at the end of the
        block leaves the engine. The client's tokens are booked as if it took the most, and
        corrected at the end. 504 where the engine does not take it in."""
        client, pin = context.client, next(self._pins)
        try:
            if job.grammar is not None:
                await self._compile(job.grammar, pin, job.grammar_field)
            self.check_open()
            self._admit(job)
            try:
                with anyio.fail_after(self.settings.deadline_s):
                    await self.host.ready()
            except TimeoutError:
                raise deadline_passed(self.settings.deadline_s) from None
            self.check_open()
            self._admit(job)  # others may have come meanwhile
            client.book(client.tokens, job.most_tokens)  # nothing waits between this and the job
            running = RunningJob(self, context.request_id, job)
            key = object()  # clients choose ids, and may do so twice
            self.jobs[key] = running
            self._count_ended(0)
            try:
                yield running
            finally:
                running.close()
                del self.jobs[key]
                self._count_ended(job.num_rows)
                used = job.prompt_tokens + running.num_completion_tokens
                client.tokens.use(used - job.most_tokens)
        finally:
            if job.grammar is not None:
                self.host.release(pin)

    @property
    def num_rows(self) -> int:
        """Completions that are under way or wait, and texts that are scored."""
        return sum(job.num_left for job in self.jobs.values())
