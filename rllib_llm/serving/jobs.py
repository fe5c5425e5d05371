"""One request in the engine: what is asked, its completions, and how it ends.

    fields of a request ── make_job ──▶ Job ──▶ rows of the engine
    engine's thread ── on_tokens ──▶ Mailbox ── one wake-up for a step ──▶ event loop ──▶ RunningJob
    RunningJob ──▶ pieces of each completion

What comes in the event loop itself, as of an engine in another process, is there at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import anyio
from transformers import PreTrainedTokenizerBase

from rllib_llm.data.decoding import TextStream
from rllib_llm.engines.engine_loop import settle
from rllib_llm.engines.hot_swap import VersionGoneError
from rllib_llm.engines.params import LOWEST_TEMPERATURE, SamplingParams
from rllib_llm.engines.protocol import Ended, GuideError, Noise, Row, Tokens
from rllib_llm.engines.torch_engine import Scores
from rllib_llm.serving.schemas import ApiError, SamplingFields
from rllib_llm.serving.streams import Choice, Piece
from rllib_llm.serving.weights import Weights

if TYPE_CHECKING:
    from rllib_llm.serving.engine_host import EngineHost
    from rllib_llm.serving.metrics import Metrics
    from rllib_llm.serving.settings import ServeSettings
    from rllib_llm.serving.weights import LiveWeights

logger = logging.getLogger(__name__)

ENGINE_ENDED = "The server's engine has ended with an error, which its log shows."
_CHARS_PER_TOKEN = 16


@dataclass(frozen=True)
class Job:
    """Completions of some prompts, `n` of each, under the same settings."""

    prompts: list[list[int]]
    params: SamplingParams
    """Of the longest: `max_tokens` has each prompt's own."""
    max_tokens: list[int]
    n: int = 1
    seed: int = 0
    noise_row: int = 0
    """Of the first completion: with seed and turn it names the randomness (`protocol.Noise`)."""
    noise_turn: int = 0
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    version: int | None = None
    """Serial number of the weights; None: the newest."""
    continues_text: bool = False
    """Whether completions go on with the text of their prompts."""
    grammar: str | None = None
    grammar_field: str = ""
    """That the completions keep to."""
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens are told at each place of the prompts; None: none is."""
    samples: bool = True
    """Whether anything is sampled; else the prompts are only scored."""
    eos_token_ids: tuple[int, ...] = ()
    conversation: Hashable | None = None
    """Whose KV cache is kept for its next turn; see `protocol.Row`."""

    @property
    def num_rows(self) -> int:
        """Places that it takes: of completions, and of texts that are scored."""
        sampled = len(self.prompts) * self.n if self.samples else 0
        return sampled + (0 if self.prompt_logprobs is None else len(self.prompts))

    def rows(self) -> list[Row]:
        """Its completions as rows of the engine."""
        rows = []
        for i, prompt in enumerate(self.prompts if self.samples else ()):
            params = replace(self.params, max_new_tokens=self.max_tokens[i])
            group = object() if self.n > 1 else None
            for k in range(self.n):
                noise = Noise(self.seed, self.noise_row + i * self.n + k, self.noise_turn)
                rows.append(
                    Row(None, prompt, params, 0, noise, group, self.version, None,
                        self.conversation)
                )  # fmt: skip
        return rows


@dataclass(frozen=True)
class Limits:
    """Limits of the model and of the server's settings."""

    max_model_len: int
    vocab_size: int
    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    default_max_tokens: int | None
    max_prompt_chars: int | None = None

    def check_chars(self, text: str, field: str) -> None:
        """Raises ApiError for a text that is longer than any prompt, before it is tokenised."""
        most = self.max_prompt_chars or _CHARS_PER_TOKEN * self.max_model_len
        if len(text) > most:
            raise ApiError(
                400, f"{field} must have at most {most} characters, the server's limit: it has "
                f"{len(text)}. Shorten it.", param=field, code="context_length_exceeded",
            )  # fmt: skip


def read_params(
    fields: SamplingFields,
    limits: Limits,
    *,
    stop_token_ids: Sequence[int] = (),
    top_logprobs: int = 0,
) -> SamplingParams:
    """The settings of sampling, its longest length aside.

    Args:
        fields: of the request.
        limits: of the server.
        stop_token_ids: further ones, which the chat format ends a turn with.
        top_logprobs: how many of the likeliest tokens the answer tells.

    Raises:
        ApiError: 400, naming the field.
    """
    eos = () if fields.ignore_eos else (*limits.eos_token_ids, *stop_token_ids)
    stops = tuple(dict.fromkeys((*eos, *(fields.stop_token_ids or ()))))
    check_tokens(fields.stop_token_ids or (), limits, "stop_token_ids")
    bias = {int(token): value for token, value in (fields.logit_bias or {}).items()}
    check_tokens(tuple(bias), limits, "logit_bias")
    temperature = 1.0 if fields.temperature is None else fields.temperature
    greedy = temperature < LOWEST_TEMPERATURE  # the limit of temperature 0
    try:
        return SamplingParams(
            pad_token_id=limits.pad_token_id,
            stop_token_ids=stops,
            max_new_tokens=max(1, fields.min_tokens or 0),
            min_new_tokens=fields.min_tokens or 0,
            temperature=1.0 if greedy else temperature,
            top_k=max(0, fields.top_k or 0),
            top_p=1.0 if fields.top_p is None else fields.top_p,
            greedy=greedy,
            top_logprobs=top_logprobs,
            min_p=fields.min_p or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            presence_penalty=fields.presence_penalty or 0.0,
            repetition_penalty=fields.repetition_penalty or 1.0,
            logit_bias=tuple(bias.items()),
        )
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def check_tokens(token_ids: Sequence[int], limits: Limits, field: str) -> None:
    """Raises ApiError for ids that the model has no embedding for. Of a large request it is called
    beside the event loop."""
    for least_or_most in (min, max):
        token = least_or_most(token_ids, default=0)
        if not 0 <= token < limits.vocab_size:
            raise ApiError(
                400, f"{field}={token} must be at least 0 and below {limits.vocab_size}: the model "
                "has so many tokens.", param=field,
            )  # fmt: skip


def read_lengths(
    prompts: Sequence[Sequence[int]],
    asked: int | None,
    limits: Limits,
    *,
    default: int | None,
    field: str,
    prompt_field: str,
    least: int = 1,
) -> list[int]:
    """How many tokens may follow each prompt.

    Args:
        prompts: token ids of each.
        asked: by the request.
        limits: of the server.
        default: where the request asks for nothing; None: all that there is room for.
        field: that `asked` came from.
        prompt_field: that the prompts came from.
        least: that may be asked for.

    Raises:
        ApiError: 400, there is no room.
    """
    if asked is not None and asked < least:
        raise ApiError(400, f"{field}={asked} must be at least {least}.", param=field)
    found = []
    for prompt in prompts:
        room = limits.max_model_len - len(prompt)
        if room < (1 if asked is None else min(asked, 1)):
            raise ApiError(
                400,
                f"{prompt_field} must have fewer than {limits.max_model_len} tokens, which is the "
                f"model's context: it has {len(prompt)}. Shorten it.",
                param=prompt_field,
                code="context_length_exceeded",
            )
        if asked is not None and asked > room:
            raise ApiError(
                400,
                f"{field}={asked} must be at most {room}: the prompt has {len(prompt)} tokens, and "
                f"the model's context {limits.max_model_len}. Lower it.",
                param=field,
                code="context_length_exceeded",
            )
        wanted = default if asked is None else asked
        found.append(room if wanted is None else min(wanted, room))
    return found


def check_whole(stream: bool | None, prompt_logprobs: int | None) -> None:
    """Raises ApiError for scores of a prompt in a stream, whose chunks have no place for them."""
    if stream and prompt_logprobs is not None:
        raise ApiError(
            400, "prompt_logprobs must come without stream=true: they are part of a whole answer. "
            "Leave stream out.", param="prompt_logprobs", code="unsupported_value",
        )  # fmt: skip


def make_job(
    fields: SamplingFields,
    limits: Limits,
    prompts: list[list[int]],
    lengths: list[int],
    *,
    turn_ends: Sequence[int] = (),
    top_logprobs: int = 0,
    prompt_logprobs: int | None = None,
    **further: Any,
) -> Job:
    """Converts a request into a job for the engine.

    Args:
        fields: of the request.
        limits: of the server.
        prompts: token ids of each.
        lengths: how many tokens may follow each prompt.
        turn_ends: tokens that the chat format ends a turn with.
        top_logprobs: how many of the likeliest tokens the answer tells.
        prompt_logprobs: the same of the prompts; None: they are not scored.
        further: of `Job`.

    Raises:
        ApiError: 400, naming the field.
    """
    if fields.min_tokens and fields.min_tokens > min(lengths):
        raise ApiError(
            400,
            f"min_tokens={fields.min_tokens} must be at most {min(lengths)}, the most.",
            param="min_tokens",
        )
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    return Job(
        prompts=prompts,
        params=read_params(fields, limits, stop_token_ids=turn_ends, top_logprobs=top_logprobs),
        max_tokens=lengths,
        n=fields.n or 1,
        seed=secrets.randbits(63) if fields.seed is None else fields.seed % 2**64,
        noise_row=fields.noise_row or 0,
        noise_turn=fields.noise_turn or 0,
        stops=tuple(filter(None, stops)),
        keeps_stop=bool(fields.include_stop_str_in_output),
        eos_token_ids=(*limits.eos_token_ids, *turn_ends),
        prompt_logprobs=prompt_logprobs,
        **further,
    )


# --- what the engine tells -----------------------------------------------------------------------


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


# --- the request in the engine -------------------------------------------------------------------


def deadline_passed(seconds: float) -> ApiError:
    """The answer to a request that takes too long."""
    return ApiError(
        504, f"The request took longer than {seconds:g} s, the server's limit.",
        code="deadline_exceeded",
    )  # fmt: skip


class SamplesJobs(Protocol):
    """A server whose engine samples jobs: `service.Service`."""

    host: EngineHost
    mailbox: Mailbox
    weights: LiveWeights
    tokenizer: PreTrainedTokenizerBase
    settings: ServeSettings
    metrics: Metrics


class RunningJob:
    """A job in the engine. `async for i, piece in job` yields the pieces of completion i, whose
    prompt is number i // n; the last piece of each has a finish_reason.

    Args:
        service: that samples it.
        request_id: of the request, to be told.
        job: what is asked.
    """

    def __init__(self, service: SamplesJobs, request_id: str, job: Job) -> None:
        self.request_id, self.job = request_id, job
        self._host, self._mailbox = service.host, service.mailbox
        self._weights, self._tokenizer = service.weights, service.tokenizer
        self._settings = service.settings
        self._watch = service.metrics.watch(sum(map(len, job.prompts)))
        rows = job.rows()
        self.num_left = job.num_rows
        num_choices = len(job.prompts) * job.n
        self.choices = [self._choice(job.prompts[i // job.n]) for i in range(num_choices)]
        self.on_piece: Callable[[Piece], None] | None = None
        self._serials: dict[int, None] = {}  # of the weights that have sampled, in their order
        self._texts: dict[int, str] = {}  # for the log, if it is to have them
        self._events: deque[tuple[int, Tokens | Ended | BaseException]] = deque()
        self._arrived = asyncio.Event()
        self._rows_left = len(rows)
        self._futures = self._host.submit_all(
            [replace(each, on_tokens=self._teller(i)) for i, each in enumerate(rows)], job.grammar
        )
        for i, future in enumerate(self._futures):
            future.add_done_callback(self._ender(i))
        self._scoring: Future[list[Scores]] | None = None
        if job.prompt_logprobs is not None:
            self._scoring = self._host.score(job.prompts, job.prompt_logprobs, job.version)
        seconds = self._settings.deadline_s
        self._deadline = anyio.current_time() + seconds
        self._timer = asyncio.get_running_loop().call_later(
            seconds, self._put, -1, deadline_passed(seconds)
        )

    def _teller(self, i: int) -> Callable[[Tokens], None]:
        return lambda tokens: self._mailbox.post(self._put, i, tokens)

    def _ender(self, i: int) -> Callable[[Future], None]:
        def tell(future: Future) -> None:
            if not future.cancelled():
                self._mailbox.post(self._put, i, future.exception() or future.result())

        return tell

    def _put(self, i: int, event: Tokens | Ended | BaseException) -> None:
        self._events.append((i, event))
        self._arrived.set()

    async def _next_event(self) -> tuple[int, Tokens | Ended]:
        while not self._events:
            if not self._rows_left:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        i, event = self._events.popleft()
        if isinstance(event, BaseException):
            raise event
        self._rows_left -= isinstance(event, Ended)
        return i, event

    def _more(self, i: int) -> Tokens | None:
        """Tokens of row `i` that have come behind the event before, if any: a reader that is slower
        than the engine takes more at a time."""
        of_row, event = self._events[0] if self._events else (None, None)
        if of_row != i or not isinstance(event, Tokens):
            return None
        self._events.popleft()
        return event

    def _choice(self, prompt: list[int]) -> Choice:
        job = self.job
        before = prompt[-8:] if job.continues_text else ()
        least = job.params.min_new_tokens
        text = TextStream(self._tokenizer, before, job.stops, job.keeps_stop, least)
        return Choice(text, job.params.stop_token_ids, job.eos_token_ids)

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
        except (ValueError, RuntimeError) as error:
            raise self._refusal(error) from error
        self.num_left -= len(found)
        return found

    def __aiter__(self) -> RunningJob:
        return self

    async def __anext__(self) -> tuple[int, Piece]:
        while True:
            try:
                i, event = await self._next_event()
            except (ValueError, RuntimeError) as error:
                raise self._refusal(error) from error
            choice = self.choices[i]
            if choice.is_done:
                continue
            piece = choice.end(event) if isinstance(event, Ended) else choice.tokens(event)
            while not choice.is_done and (more := self._more(i)) is not None:
                piece.add(choice.tokens(more))
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
        if self._futures[i].cancel():
            self._rows_left -= 1
        self.num_left -= 1
        self._watch.finished(i, piece.finish_reason or "")

    def _refusal(self, error: ValueError | RuntimeError) -> ApiError:
        """The answer where the engine refuses a row, or has ended."""
        if isinstance(error, VersionGoneError):  # it went between the request and the step
            return self._weights.gone("the version that was asked for")
        if isinstance(error, GuideError):
            return ApiError(
                400, "response_format must be one that can be followed to the end: what was "
                f"sampled could not be ({error}). Simplify it, or ask a model whose tokens can "
                "write it.", param="response_format",
                code="grammar_failed",
            )  # fmt: skip
        if isinstance(error, RuntimeError):
            return ApiError(503, ENGINE_ENDED, code="engine_ended")
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
    def num_completion_tokens(self) -> int:
        """Tokens that were sampled and belong to the answer."""
        return sum(choice.num_tokens for choice in self.choices)

    def abort(self) -> None:
        """Ends it with what there is; without scores of its prompts there is no answer."""
        for future in self._futures:
            self._host.abort(future)
        if self._scoring is not None:
            message = "The request was aborted before its prompts were scored. Send it again."
            settle(self._scoring, ApiError(503, message, code="aborted"))

    def close(self) -> None:
        """Aborts its rows in the engine."""
        self._timer.cancel()
        for future in self._futures:
            future.cancel()
        if self._scoring is not None:
            self._scoring.cancel()
        if self._settings.log_prompts:
            decode = self._tokenizer.decode
            told = {"prompts": [decode(ids) for ids in self.job.prompts], "texts": self._texts}
            logger.info(json.dumps({"request_id": self.request_id, **told}))
        self._watch.close()
        self.num_left = 0
