"""Completions as each route asks for them and shows them: what the engine is to do, and the JSON
of what it did, whole or in chunks.

body ─▶ View.job ─▶ Job ─▶ engine ─▶ pieces ─▶ View.choice ─▶ chunks, or one whole answer
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import anyio
from fastapi import Response
from starlette.types import Message, Receive, Scope, Send
from torch import Tensor

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.modules.text_scores import TextScores
from rllib_llm.serving import chat
from rllib_llm.serving.guides import check_length, grammar_of
from rllib_llm.serving.jobs import Job, Piece
from rllib_llm.serving.schemas import FAILED, ApiError, ChatMessage, StreamOptions, refuse
from rllib_llm.serving.service import (
    LARGE_TOKENS,
    MODEL_GONE,
    Event,
    JsonResponse,
    RequestContext,
    Result,
    RunningJob,
    encoded,
)
from rllib_llm.serving.sessions import Session
from rllib_llm.serving.tool_grammars import behind_thoughts, call_grammar, forced_syntax

_LOWEST = -9999.0  # JSON has no -inf


def finite(logprob: float) -> float | None:
    """A log-prob as JSON takes it; None where it is unknown, as of a text's first token."""
    return None if math.isnan(logprob) else max(_LOWEST, logprob)


GONE = 499  # nobody reads it; nginx's number in logs
PING_SECONDS = 15.0


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def while_there(
    receive: Receive,
    work: Callable[[], Awaitable[Result]],
    beside: Callable[[], Awaitable[None]] | None = None,
) -> Result:
    """Returns or raises what `work` does; ClientGoneError, and it is cancelled, where the client
    disconnects or `beside`, which runs meanwhile, returns. receive: ASGI's, behind the body."""
    done: list[Result] = []
    failed: Exception | None = None
    async with anyio.create_task_group() as group:

        async def leaves() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        async def watch(ends: Callable[[], Awaitable[None]]) -> None:
            await ends()
            group.cancel_scope.cancel()

        for ends in filter(None, (leaves, beside)):
            group.start_soon(watch, ends)
        try:
            done.append(await work())
        except Exception as error:  # noqa: BLE001  (raised below, as it is and not in a group)
            failed = error
        group.cancel_scope.cancel()
    if failed is not None:
        raise failed
    if not done:
        raise ClientGoneError
    return done[0]


class EventStream(Response):
    """A streamed response. It starts with the first event, so that an earlier error has its own
    status code; a later one is sent as an event. Comments keep the connection alive while nothing
    is sent.

    Args:
        events: each is sent as JSON, which it may be already; closed when the client goes away or
            reads nothing for long.
        slow_reader_s: seconds that the client may read nothing.
        names: whether each is named by its "type".
        ends: what is sent behind the last event.
    """

    def __init__(
        self, events: AsyncGenerator[Event, None], slow_reader_s: float, *, names: bool = False,
        ends: bytes = b"data: [DONE]\n\n",
    ) -> None:  # fmt: skip
        super().__init__()
        self._events, self._slow_reader_s = events, slow_reader_s
        self._names, self._ends = names, ends
        self._is_sending = False
        self._since = 0.0  # when sending, or being idle, began
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._since = send, anyio.current_time()
        with suppress(ClientGoneError):
            await while_there(receive, self._send_all, self._look_after)

    async def _look_after(self) -> None:
        """Pings; returns when the client reads nothing for long."""
        while True:
            await anyio.sleep(min(PING_SECONDS, self._slow_reader_s) / 4)
            seconds = anyio.current_time() - self._since
            if self._is_sending and seconds >= self._slow_reader_s:
                return
            if not self._is_sending and self._num_sent and seconds >= PING_SECONDS:
                await self._body(b": ping\n\n")

    async def _send_all(self) -> None:
        try:
            async for event in self._events:
                await self._data(event)
        except ApiError as error:
            if not self._num_sent:
                raise
            await self._data(self._told(error))
        except Exception:
            if self._num_sent:
                await self._data(self._told(ApiError(500, FAILED)))
            raise
        finally:
            await self._events.aclose()
        await self._body(self._ends, more=False)

    async def _data(self, event: Event) -> None:
        if not self._num_sent:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"),
            ]  # fmt: skip
            await self._out({"type": "http.response.start", "status": 200, "headers": headers})
        self._num_sent += 1
        name = b""
        if self._names and isinstance(event, dict):
            name = b"event: " + str(event["type"]).encode() + b"\n"
        await self._body(name + b"data: " + encoded(event) + b"\n\n")

    def _told(self, error: ApiError) -> dict[str, Any]:
        body = error.body()
        if self._names:  # flat, as OpenAI documents it, and nested, which its clients raise
            body |= {**body["error"], "type": "error", "sequence_number": self._num_sent}
        return body

    async def _body(self, body: bytes, more: bool = True) -> None:
        await self._out({"type": "http.response.body", "body": body, "more_body": more})

    async def _out(self, message: Message) -> None:
        self._is_sending, self._since = True, anyio.current_time()
        await self._send(message)
        self._is_sending, self._since = False, anyio.current_time()


class View:
    """A request for completions as one route reads and shows it.

    `fields`: names of our fields as the client's request calls them. `framing`: see `EventStream`.
    `names`: of the answer, such as its id. `has_large_answer`: whether its JSON is made beside the
    event loop. Of the request in the engine are `running`, the pieces of each completion that have
    come so far, put together, in `whole`, and, where they are asked for, the `scores` of its
    prompts.
    """

    fields: Mapping[str, str] = {}
    framing: Mapping[str, Any] = {}
    running: RunningJob
    scores: Sequence[TextScores] = ()

    def __init__(self, context: RequestContext, body: Any, **names: Any) -> None:
        self.context, self.service, self.body, self.names = context, context.service, body, names
        self.options = getattr(body, "stream_options", None) or StreamOptions()
        self.model: str | None = body.model
        self.whole: list[Piece] = []
        self.has_large_answer = False

    async def answer(self) -> Response:
        """The events as a stream, or the only one; what makes them ends when the client goes."""
        await self.context.begin(self.model)
        events = self.events()
        if self.body.stream:
            return EventStream(events, self.service.settings.slow_reader_s, **self.framing)

        async def body() -> bytes:
            async with aclosing(events):
                event = await anext(events)
            return await self.service.encoded(self.has_large_answer, event)

        try:
            return JsonResponse(await while_there(self.context.request.receive, body))
        except ClientGoneError:
            return Response(status_code=GONE)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields the chunks of a stream, or the whole answer. Where prompts are scored, one version
        of the weights does that and samples; a request that names none begins again if that version
        goes before it has begun."""
        has_begun = False
        try:
            job = pinned = await self.job()
            while True:
                if job.prompt_logprobs is not None and job.version is None:
                    pinned = replace(job, version=self.service.weights.newest.serial)
                try:
                    async with self.service.run(self.context, pinned) as self.running:
                        async for event in self._answered():
                            has_begun = True
                            yield event
                    return
                except ApiError as error:
                    if has_begun or pinned is job or error.code != MODEL_GONE:
                        raise
        except ApiError as error:
            raise error.named(self.fields) from None

    async def _answered(self) -> AsyncGenerator[Event, None]:
        running, is_large = self.running, False
        self.whole = running.whole
        if running.job.prompt_logprobs is not None:
            self.scores = await running.scores()
            is_large = running.job.prompt_tokens > LARGE_TOKENS
        if self.body.stream:
            for choice in await self.service.beside_loop(is_large, self.before):
                for event in self.chunk(choice):
                    yield await self.service.encoded(is_large, event)
        async for i, piece in running:
            if self.body.stream:
                for event in self.chunks(i, piece):
                    yield event
        if self.body.stream:
            for event in self.behind():
                yield event
        else:
            is_large = is_large or running.num_completion_tokens > LARGE_TOKENS
            self.has_large_answer = is_large
            choices, further = await self.service.beside_loop(
                is_large, lambda: (self.choices(), self.further())
            )
            yield self.holding(choices, usage=self.usage, **further)

    async def job(self) -> Job:
        """The job of the engine."""
        raise NotImplementedError

    async def guided(self, job: Job) -> Job:
        """The job with the grammar of the body's `response_format`, if it has one."""
        wanted = self.body.response_format
        if wanted is None or wanted.type == "text":
            return job
        found = await self.context.beside_loop(grammar_of, wanted)
        return self.guided_by(job, "response_format", *found)

    def guided_by(self, job: Job, field: str, part: str, grammar: str) -> Job:
        """The job with a grammar that a field, or a part of it, asks for."""
        ends = self.service.limits.eos_token_ids
        refuse(not ends or ends[0] not in job.params.stop_token_ids,
               f"{field} must come without ignore_eos: the model's EOS token ends the answer.",
               field, "unsupported_value")  # fmt: skip
        refuse(job.params.min_new_tokens,
               f"min_tokens must be left out with {field}, which says when the answer ends.",
               "min_tokens", "unsupported_value")  # fmt: skip
        return replace(job, grammar=grammar, grammar_field=part)

    # --- the answer --------------------------------------------------------------------------

    def holding(self, choices: list[dict[str, Any]], **further: Any) -> dict[str, Any]:
        """An answer, or a chunk of it, with these choices."""
        weights = self.running.weights
        return {
            **self.names,
            "model": self.service.weights.id_of(weights[-1]),
            "system_fingerprint": f"fp_{weights[-1].fingerprint}",
            "choices": choices,
            "metadata": {  # the last that has sampled, and all of them: texts, as OpenAI's are
                "weight_version": weights[-1].label,
                "weight_versions": ",".join(each.label for each in weights),
            },
            **further,
        }

    @property
    def usage(self) -> dict[str, int]:
        """The tokens of the request."""
        prompt_tokens = self.running.job.prompt_tokens
        completion_tokens = self.running.num_completion_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def further(self) -> dict[str, Any]:
        """Fields of a whole answer besides its choices."""
        return {}

    def choices(self) -> list[dict[str, Any]]:
        """The choices of a whole answer."""
        return [self.choice(i, piece) for i, piece in enumerate(self.whole)]

    def choice(self, i: int, piece: Piece) -> dict[str, Any]:
        """Choice `i` in a whole answer, or a chunk of it with a piece of the completion."""
        raise NotImplementedError

    def before(self) -> list[dict[str, Any]]:
        """Choices of the chunks of a stream that come before anything is sampled."""
        return []

    def chunks(self, i: int, piece: Piece) -> list[Event]:
        """The events of a stream for a piece of choice `i`; none where it would tell nothing."""
        has_logprobs = self.body.logprobs is not None and self.body.logprobs is not False
        told = piece.token_ids and (has_logprobs or self.body.return_token_ids)
        is_empty = not (piece.text or piece.finish_reason or told)
        return [] if is_empty else self.chunk(self.choice(i, piece))

    def chunk(self, choice: dict[str, Any]) -> list[Event]:
        """The events of a stream for a choice."""
        if self.options.continuous_usage_stats:
            return [self.holding([choice], usage=self.usage)]
        return [self.holding([choice], **({"usage": None} if self.options.include_usage else {}))]

    def behind(self) -> list[Event]:
        """The events of a stream when all is sampled."""
        return [self.holding([], usage=self.usage)] if self.options.include_usage else []

    # --- its parts ---------------------------------------------------------------------------

    def ended(
        self, piece: Piece, finish: str | None, logprobs: Any, prompt: list[int]
    ) -> dict[str, Any]:
        """The end of a choice."""
        told: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            told["stop_reason"] = piece.stop_reason
        if self.body.return_token_ids:
            told |= {"token_ids": piece.token_ids, "prompt_token_ids": prompt}
        return told

    def prompt_logprobs(self, at: int) -> list[dict[str, dict[str, Any]] | None]:
        """vLLM's `prompt_logprobs`: at each place of prompt `at` its token and the likeliest, by
        number; nothing at the first."""

        def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
            text = self.service.texts.of(token)[0]
            return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

        told: list[dict[str, dict[str, Any]] | None] = [None]
        scores = self.scores[at]
        for token, logprob, rank, likeliest in zip(
            self.running.job.prompts[at][1:], scores.logprobs, scores.ranks, scores.likeliest,
            strict=True,
        ):  # fmt: skip
            place = {str(token): entry(token, logprob, rank)}
            for i, (other, value) in enumerate(likeliest, start=1):
                place.setdefault(str(other), entry(other, value, i))
            told.append(place)
        return told


def entries(
    piece: Piece, top: int, entry: Callable[[int, float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """An entry for each token of a piece, in which the likeliest stand."""
    found = []
    for i, (token, logprob) in enumerate(zip(piece.token_ids, piece.logprobs, strict=True)):
        likeliest = piece.likeliest[i][:top] if top else []
        found.append({**entry(token, logprob), "top_logprobs": [entry(*one) for one in likeliest]})
    return found


# --- chats ---------------------------------------------------------------------------------------


class ChatView(View):
    """A chat's completions as OpenAI shows them. With tools a turn is shown when it is whole:
    before, nobody knows what is a call."""

    format: ChatFormat
    prompts: list[list[int]]
    prompt: list[int]
    """Of the choice that is shown."""
    images: Sequence[Mapping[str, Tensor]] = ()
    """What each chat shows, as the model takes it."""
    conversation: Hashable | None = None
    """Whose KV cache is kept for its next turn."""

    def __init__(self, context: RequestContext, body: Any) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        name = f"chatcmpl-{context.answer_id(body.seed)}"
        super().__init__(context, body, id=name, object=kind, created=int(time.time()))
        # Nine letters and digits, as Mistral's templates want them, and not made from the request's
        # id, which a client may repeat throughout a conversation.
        self._call_ids: defaultdict[tuple[int, int], str] = defaultdict(
            lambda: secrets.token_hex(5)[:9]
        )
        self._begun: set[int] = set()

    async def job(self) -> Job:
        await self.read()
        body, limits = self.body, self.service.limits
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        job = limits.job(
            body, self.prompts, getattr(body, field), default=limits.default_max_tokens,
            field=field, prompt_field="messages", turn_ends=self.format.stop_token_ids,
            top_logprobs=body.top_logprobs or 0, prompt_logprobs=body.prompt_logprobs,
            version=self.context.version, conversation=self.conversation, images=self.images,
        )  # fmt: skip
        if self.is_forced:
            forced = await self.context.beside_loop(self._forced_call)
            job = self.guided_by(job, "tool_choice", "tool_choice", forced)
        else:
            job = await self.guided(job)
        closes = self.format.thoughts_end(self.prompt) if job.grammar and self.has_tools else ""
        if job.grammar and closes:
            job = replace(job, grammar=behind_thoughts(job.grammar, closes, self.format))
        return job

    async def read(self) -> None:
        """Sets the chat format and the prompt of each chat."""
        self.prompts = await self.encode({"messages": self.body.messages})
        (self.prompt,) = self.prompts

    async def encode(self, chats: Mapping[str, Sequence[ChatMessage]]) -> list[list[int]]:
        """Sets the chat format and what chats, by the names of their fields, show; returns their
        prompts."""

        def encode() -> list[list[int]]:
            service, self.format = self.service, self.service.chats.of(self.body)
            read = [
                chat.read_prompt(self.format, messages, service.limits, service.images, field=field)
                for field, messages in chats.items()
            ]
            self.images = [seen for _, seen in read]
            return [ids for ids, _ in read]

        urls = [url for messages in chats.values() for url in chat.image_urls(messages)]
        refuse(urls and self.body.prompt_logprobs is not None, "prompt_logprobs must be left out "
               "for a chat with images.", "prompt_logprobs", "unsupported_value")  # fmt: skip
        self.service.images.check_number(urls)
        return await self.context.beside_loop(encode, is_large=bool(urls))

    @property
    def is_forced(self) -> bool:
        """Whether a tool has to be called."""
        return self.body.tool_choice not in (None, "none", "auto")

    @property
    def has_tools(self) -> bool:
        """Whether one may be called."""
        return bool(self.body.tools) and self.body.tool_choice != "none"

    def _forced_call(self) -> str:
        """The grammar of the calls that have to be made; `response_format` is of answers without a
        call, as with OpenAI."""
        choice, tools = self.body.tool_choice, self.body.tools or ()
        one_call = choice != "required" or self.body.parallel_tool_calls is False
        with chat.refused_by_template("tools"):
            grammar = call_grammar(self.format, tools, choice, one_call)
        check_length(grammar, "tools")
        return grammar

    def further(self) -> dict[str, Any]:
        return {"prompt_logprobs": self.prompt_logprobs(0)} if self.scores else {}

    def choice(self, i: int, piece: Piece) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text, raw = self.service.texts.of(token)
            return {"token": text, "logprob": finite(logprob), "bytes": raw}

        (message, finish), logprobs = self.message(i, piece), None
        if self.body.logprobs:
            content = entries(piece, self.body.top_logprobs or 0, entry)
            logprobs = {"content": content, "refusal": None}
        end = self.ended(piece, finish, logprobs, self.prompt)
        if not self.body.stream:
            return {"index": i, "message": {**message, "refusal": None}, **end}
        if "tool_calls" in message:
            message["tool_calls"] = [
                {"index": k, **call} for k, call in enumerate(message["tool_calls"])
            ]
        if i in self._begun:
            del message["role"]
        self._begun.add(i)
        return {"index": i, "delta": message, **end}

    def message(self, i: int, piece: Piece) -> tuple[dict[str, Any], str | None]:
        """The message of choice `i`, and why it ended: a call that is cut off, or that cannot be
        read, is text and not a call."""
        finish = piece.finish_reason
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if not self.has_tools or isinstance(piece.stop_reason, str):
            return message, finish
        syntax = forced_syntax(self.format) if self.is_forced else None
        reply = self.format.parse(
            piece.token_ids, finish=finish or "length", prompt_ids=self.prompt, syntax=syntax
        )
        message, most = reply.as_message(), 1 if self.body.parallel_tool_calls is False else None
        functions = [call["function"] for call in message.pop("tool_calls", ())][:most]
        if not functions:
            return message, finish
        message["content"] = message["content"] or None
        message["tool_calls"] = []
        for k, called in enumerate(functions):
            arguments = json.dumps(called["arguments"], ensure_ascii=False)
            function = {"name": called["name"], "arguments": arguments}
            told = {"id": self._call_ids[i, k], "type": "function", "function": function}
            message["tool_calls"].append(told)
        return message, "tool_calls" if finish == "stop" else finish

    def chunks(self, i: int, piece: Piece) -> list[Event]:
        if not self.has_tools:
            return super().chunks(i, piece)
        return self.chunk(self.choice(i, self.whole[i])) if piece.finish_reason else []


class ChatBatchView(ChatView):
    """One answer to each of several chats; choice i is that of chat i."""

    async def read(self) -> None:
        chats = self.body.messages
        self.prompts = await self.encode({f"messages.{i}": each for i, each in enumerate(chats)})

    def choice(self, i: int, piece: Piece) -> dict[str, Any]:
        self.prompt = self.prompts[i]
        return super().choice(i, piece)


class SessionView(ChatView):
    """A turn of a session, which keeps what was sampled."""

    def __init__(self, context: RequestContext, body: Any, session: Session) -> None:
        settings = session.rules.template_settings if session.rules else {}
        settings = {**settings, **(body.chat_template_kwargs or {})}
        body = body.model_copy(update={"chat_template_kwargs": settings or None})
        super().__init__(context, body)
        self._session = session
        if session.rules:  # an agent that is trained asks for whatever model it was written for
            self.model = None
        self._turn: Conversation | None = None  # once it has begun

    async def events(self) -> AsyncGenerator[Event, None]:
        session = self._session
        # Waiting would occupy a connection; agents of a run wait as often as their rules allow. The
        # lock is taken at once: nothing waits in between.
        if session.rules is None and session.lock.locked():
            message = "A turn of this session is under way. Wait for its answer."
            raise ApiError(409, message, None, "session_busy", {"Retry-After": "1"})
        async with session.lock:
            # One that is too large already holds no further message.
            self.service.sessions.hold(session)
            try:
                async with aclosing(super().events()) as events:
                    async for event in events:
                        yield event
            finally:
                if self._turn is not None:
                    self._keep(self._turn)

    async def read(self) -> None:
        session = self._session
        shown = next(iter(chat.image_urls(self.body.messages)), "")
        refuse(shown, f"{shown} must be left out: sessions are texts.", shown, "unsupported_value")

        def begin() -> None:
            self.format = self.service.chats.of(self.body)
            self._turn = session.begin_turn(self.format, chat.as_messages(self.body.messages))
            session.measure()

        await self.context.beside_loop(begin)
        self.service.sessions.hold(session)
        assert self._turn is not None, "it has begun"
        self.prompt, self.prompts = self._turn.token_ids, [self._turn.token_ids]
        self.body = session.governed(self.body, len(self.prompt))
        self.conversation = self._turn if session.rules else None

    def _keep(self, turn: Conversation) -> None:
        piece = self.whole[0] if self.whole else Piece()
        if piece.finish_reason in (None, "abort"):
            self._session.end_turn(turn, None, [], {})
            return
        versions = [self.service.weights.of(serial).version for serial in piece.versions]
        self._session.end_turn(turn, piece, versions, self.message(0, piece)[0])
