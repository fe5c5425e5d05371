"""OpenAI's endpoints: models, chat completions, completions, and `/v1/responses` in its plain form,
whose responses are chat completions in another format; none is stored or retrievable."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Hashable, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.data.encoding import encode_text
from rllib_llm.serving import chat
from rllib_llm.serving.guides import check_length, grammar_of
from rllib_llm.serving.jobs import Job, check_tokens, make_job, read_lengths
from rllib_llm.serving.schemas import (
    ApiError,
    CallItem,
    CallOutputItem,
    ChatRequest,
    CompletionRequest,
    DecodingFields,
    MessageItem,
    ResponsePart,
    ResponseRequest,
    ResponseToolName,
    StreamOptions,
    documented,
    field_error,
    fields_named,
    refuse,
)
from rllib_llm.serving.security import OF_CLIENTS, Guards, JsonRoute
from rllib_llm.serving.service import RequestContext, Service
from rllib_llm.serving.streams import Event
from rllib_llm.serving.tool_grammars import behind_thoughts, call_grammar
from rllib_llm.serving.views import ChatView, TextView, View
from rllib_llm.serving.weights import MODEL_GONE, ServedWeights

_COMPLETION_TOKENS = 16  # OpenAI's default
_SMALL_TOKENS = 2**10  # of an answer whose JSON is made in the event loop
# Of routes that take `stream`.
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}},
    **documented(404, 409, 503, 504),
}


def openai_router(service: Service, completer: RequestCompleter, guards: Guards) -> APIRouter:
    """The routes."""
    router = APIRouter(
        route_class=JsonRoute, prefix="/v1", dependencies=[guards.client], responses=OF_CLIENTS
    )

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": model_cards(service)}

    @router.get("/models/{model:path}", responses=documented(404))
    async def model(model: str) -> dict[str, Any]:
        service.weights.named(model)
        return next(card for card in model_cards(service) if card["id"] == model)

    @router.post("/chat/completions", response_model=None, responses=STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        context = await service.context_of(request, body.model)
        return await context.answer(completer.chat(body, context), body.stream)

    @router.post("/completions", response_model=None, responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        context = await service.context_of(request, body.model)
        return await context.answer(completer.text(body, context), body.stream)

    @router.post("/responses", response_model=None, responses=STREAMED)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        context = await service.context_of(request, body.model)
        asked = await context.beside_loop(chat_request, body)
        chunks = with_fields_named(completer.chat(asked, context), _FIELDS)
        events = _response_events(body, context, chunks)
        if not body.stream:
            events = _last_response(events)
        return await context.answer(events, body.stream, names=True, ends=b"")

    return router


def model_cards(service: Service) -> list[dict[str, Any]]:
    """The newest weights under the model's name, and each live version under its own."""
    weights = service.weights

    def card(id: str, of: ServedWeights, **further: Any) -> dict[str, Any]:
        return {
            "id": id, "object": "model", "owned_by": "rllib_llm", "created": int(of.loaded_at),
            "max_model_len": service.limits.max_model_len, "root": of.source, **further,
        }  # fmt: skip

    versions = [card(weights.id_of(each), each, parent=weights.name) for each in weights.live]
    return [card(weights.name, weights.newest), *versions]


class RequestCompleter:
    """Answers both completion endpoints: events, of which a whole answer is the only one."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._chats = chat.Chats(service.tokenizer, service.settings.template_settings or {})

    async def run(
        self, job: Job, context: RequestContext, view: View, stream: bool | None,
        options: StreamOptions | None = None,
    ) -> AsyncIterator[Event]:  # fmt: skip
        """Events of a job. Where its prompts are scored, one version of the weights does that and
        samples; a request that names none begins again if that version goes before it has begun."""
        has_begun = False
        async with self._service.guided(job):
            while True:
                pinned = job
                if job.prompt_logprobs is not None and job.version is None:
                    pinned = dataclasses.replace(job, version=self._service.weights.newest.serial)
                try:
                    async with self._service.run(
                        context.request_id, pinned, context.client
                    ) as view.running:
                        async for event in _answered(context, view, stream, options):
                            has_begun = True
                            yield event
                    return
                except ApiError as error:
                    if has_begun or pinned is job or error.code != MODEL_GONE:
                        raise

    # --- chats -------------------------------------------------------------------------------

    def format_of(self, body: ChatRequest) -> ChatFormat:
        """How a chat is written."""
        tools = None if body.tool_choice == "none" else body.tools
        return self._chats.format(tools, body.chat_template_kwargs)

    async def chat(self, body: ChatRequest, context: RequestContext) -> AsyncIterator[Event]:
        """Events of a chat completion."""

        def encoded_chat() -> tuple[ChatFormat, list[int]]:
            chat_format = self.format_of(body)
            return chat_format, chat.prompt_ids(chat_format, body.messages, self._service.limits)

        told = await context.beside_loop(encoded_chat)
        view = ChatView(self._service, body, context.request_id, *told)
        async for event in self.answer_chat(view, context):
            yield event

    async def answer_chat(
        self, view: ChatView, context: RequestContext, conversation: Hashable | None = None
    ) -> AsyncIterator[Event]:
        """Events of a chat completion. conversation: whose KV cache is kept for its next turn."""
        body, service = view.body, self._service
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        lengths = read_lengths(
            [view.prompt], getattr(body, field), service.limits,
            default=service.limits.default_max_tokens, field=field, prompt_field="messages",
        )  # fmt: skip
        job = make_job(
            body, service.limits, [view.prompt], lengths, turn_ends=view.format.stop_token_ids,
            top_logprobs=body.top_logprobs or 0, prompt_logprobs=body.prompt_logprobs,
            version=context.version, conversation=conversation,
        )  # fmt: skip
        if view.is_forced:
            forced = await context.beside_loop(self._forced_call, body, view.format)
            job = self._guided(job, "tool_choice", forced)
        else:
            found = await context.beside_loop(grammar_of, body.response_format)
            job = self._guided(job, "response_format", found)
        closes = view.format.thoughts_end(view.prompt) if job.grammar and view.has_tools else ""
        if job.grammar and closes:
            grammar = behind_thoughts(job.grammar, closes, view.format)
            job = dataclasses.replace(job, grammar=grammar)
        async for event in self.run(job, context, view, body.stream, body.stream_options):
            yield event

    def _forced_call(self, body: ChatRequest, chat_format: ChatFormat) -> tuple[str, str]:
        """As `grammar_of`, of the calls that have to be made; `response_format` is of answers
        without a call, as with OpenAI."""
        assert body.tool_choice is not None, "there is one that forces"
        one_call = body.tool_choice != "required" or body.parallel_tool_calls is False
        with chat.refused_by_template("tools"):
            grammar = call_grammar(chat_format, body.tools or (), body.tool_choice, one_call)
        check_length(grammar, "tools")
        return "tool_choice", grammar

    # --- texts -------------------------------------------------------------------------------

    async def text(self, body: CompletionRequest, context: RequestContext) -> AsyncIterator[Event]:
        """Events of text completions."""
        service = self._service
        prompts = await context.beside_loop(self._prompts, body.prompt)
        lengths = read_lengths(
            prompts, body.max_tokens, service.limits, default=_COMPLETION_TOKENS,
            field="max_tokens", prompt_field="prompt", least=0 if body.echo else 1,
        )  # fmt: skip
        scored = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scored = max(scored or 0, body.logprobs)
        job = make_job(
            body, service.limits, prompts, lengths, top_logprobs=body.logprobs or 0,
            prompt_logprobs=scored, version=context.version, continues_text=True,
            samples=body.max_tokens != 0,
        )  # fmt: skip
        found = await context.beside_loop(grammar_of, body.response_format)
        job = self._guided(job, "response_format", found)
        view = await context.beside_loop(TextView, service, body, context.request_id, prompts)
        async for event in self.run(job, context, view, body.stream, body.stream_options):
            yield event

    def _prompts(self, given: Any) -> list[list[int]]:
        """Token ids of all prompts of a request."""
        tokenizer, limits = self._service.tokenizer, self._service.limits
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        prompts = []
        for each in given:
            if isinstance(each, str):
                limits.check_chars(each, "prompt")
                each = encode_text(tokenizer, each)
            refuse(not each, "prompt must have at least one token.", "prompt")
            check_tokens(each, limits, "prompt")
            prompts.append(list(each))
        return prompts

    def _guided(self, job: Job, field: str, found: tuple[str, str] | None) -> Job:
        """The job with the grammar that a field of the request asks for, if any, as `grammar_of`
        has found it."""
        if found is None:
            return job
        ends = self._service.limits.eos_token_ids
        refuse(not ends or ends[0] not in job.params.stop_token_ids,
               f"{field} must come without ignore_eos: the model's EOS token ends the answer.",
               field, "unsupported_value")  # fmt: skip
        refuse(job.params.min_new_tokens,
               f"min_tokens must be left out with {field}, which says when the answer ends.",
               "min_tokens", "unsupported_value")  # fmt: skip
        return dataclasses.replace(job, grammar=found[1], grammar_field=found[0])


async def _answered(
    context: RequestContext, view: View, stream: bool | None, options: StreamOptions | None
) -> AsyncIterator[Event]:
    """Yields the one answer, or its chunks."""
    service, running, is_large = context.service, view.running, False
    running.on_piece = view.on_piece
    if running.job.prompt_logprobs is not None:
        view.scores = await running.scores()
        is_large = sum(map(len, running.job.prompts)) > _SMALL_TOKENS
    if not stream:
        pieces = await running.collect()
        is_large = is_large or running.num_completion_tokens > _SMALL_TOKENS
        context.has_large_answer = is_large
        choices, further = await service.beside_loop(
            is_large, lambda: (view.choices(pieces), view.further)
        )
        yield view.holding(choices, usage=view.usage, **further)
        return

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        if options and options.continuous_usage_stats:
            return view.holding([choice], usage=view.usage)
        further = {"usage": None} if options and options.include_usage else {}
        return view.holding([choice], **further)

    for choice in await service.beside_loop(is_large, view.before):
        yield await service.encoded(is_large, chunk(choice))
    if not running.job.samples:
        for i in range(len(running.choices)):
            yield chunk({"index": i, "text": "", "logprobs": None, "finish_reason": "length"})
    async for i, piece in running:
        for choice in view.chunks(i, piece):
            yield chunk(choice)
    if options and options.include_usage:
        yield view.holding([], usage=view.usage)


# --- responses -----------------------------------------------------------------------------------

_LOGPROBS = "message.output_text.logprobs"  # in `include`
# Fields of a chat completion, as a response's request calls them.
_FIELDS = {
    "messages": "input", "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format", "response_format.json_schema.schema": "text.format.schema",
}  # fmt: skip


def chat_request(body: ResponseRequest) -> ChatRequest:
    """Returns the chat completion, streamed, that answers a response's request; 400: none does."""
    asked: dict[str, Any] = {
        **body.model_dump(include={*DecodingFields.model_fields}),
        "messages": _messages(body), "model": body.model, "stream": True,
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        asked |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        named = [tool.model_dump(exclude={"type", "strict"}, exclude_none=True)
                 for tool in body.tools]  # fmt: skip
        asked["tools"] = [{"type": "function", "function": each} for each in named]
    choice = body.tool_choice
    if isinstance(choice, ResponseToolName):
        asked["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        asked["tool_choice"] = choice
    if body.text is not None and body.text.format is not None:
        told = body.text.format
        asked["response_format"] = {"type": told.type}
        if told.type == "json_schema":
            schema = {"name": told.name or "answer", "schema": told.schema_}
            asked["response_format"]["json_schema"] = schema
    try:
        return ChatRequest.model_validate(asked)
    except ValidationError as error:  # such as an input that says nothing
        errors = [each | {"loc": ("body", *each["loc"])} for each in error.errors()]
        with fields_named(_FIELDS):
            raise field_error(errors, "json", "") from error


async def with_fields_named(
    events: AsyncIterator[Event], names: Mapping[str, str]
) -> AsyncIterator[Event]:
    """The events; see `fields_named`."""
    with fields_named(names):
        async for event in events:
            yield event


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    for item in body.input:
        if isinstance(item, MessageItem):
            found.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, CallItem):
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            found[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, CallOutputItem):
            content = _text(item.output)
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    return found


def _text(content: str | list[ResponsePart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


# --- what is answered ----------------------------------------------------------------------------


def _whole_response(
    body: ResponseRequest, context: RequestContext, status: str, output: list[dict[str, Any]],
    completion: dict[str, Any], incomplete: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A response. completion: the chat completion, or a chunk of it, that says who sampled;
    incomplete: why it is."""
    used = completion.get("usage")
    choice = body.tool_choice
    told = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    return {
        "id": f"resp_{context.request_id}", "object": "response",
        "created_at": completion.get("created", int(time.time())),
        "status": status, "error": None,
        "incomplete_details": incomplete and {"reason": incomplete},
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
        "metadata": {**(body.metadata or {}), **completion.get("metadata", {})},
        "model": completion.get("model", body.model or context.service.weights.name),
        "output": output,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": body.temperature, "top_p": body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "tool_choice": choice.model_dump() if isinstance(choice, ResponseToolName)
        else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "text": {"format": {"type": "text"}, **told},
        "truncation": "disabled",
        "usage": used and {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        },
    }  # fmt: skip


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message_item(context: RequestContext, status: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{context.request_id}", "type": "message", "role": "assistant",
        "status": status, "content": content,
    }  # fmt: skip


def _call_item(call: dict[str, Any], status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{call['id']}", "type": "function_call", "status": status,
        "call_id": call["id"], "name": call["function"]["name"],
        "arguments": call["function"]["arguments"] if status == "completed" else "",
    }  # fmt: skip


# Of the finish reasons of chats, those that leave a response incomplete.
_INCOMPLETE = {"length": "max_output_tokens", "abort": "aborted"}


async def _last_response(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Yields the response of the last event."""
    async for event in events:
        last = event
    assert isinstance(last, dict)
    yield last["response"]


async def _response_events(
    body: ResponseRequest, context: RequestContext, events: AsyncIterator[Event]
) -> AsyncIterator[Event]:
    """The events of a response."""
    number = 0

    def event(kind: str, **further: Any) -> Event:
        nonlocal number
        number += 1
        return {"type": kind, "sequence_number": number - 1, **further}

    text, finish = "", None
    calls: list[dict[str, Any]] = []
    logprobs: list[dict[str, Any]] = []
    num_told = 0  # of them
    completion: dict[str, Any] = {}
    at = {"item_id": f"msg_{context.request_id}", "output_index": 0, "content_index": 0}
    async for chunk in events:
        assert isinstance(chunk, dict), "echoes alone are JSON already"
        if not completion:
            begun = _whole_response(body, context, "in_progress", [], chunk)
            yield event("response.created", response=begun)
            yield event("response.in_progress", response=begun)
        completion = chunk
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            delta = choice["delta"]
            calls += delta.get("tool_calls") or ()
            new = delta.get("content") or ""
            logprobs += choice["logprobs"]["content"] if choice["logprobs"] else []
            if not new:
                continue
            if not text:
                item = _message_item(context, "in_progress")
                yield event("response.output_item.added", output_index=0, item=item)
                yield event("response.content_part.added", **at, part=_part("", []))
            text += new
            news, num_told = logprobs[num_told:], len(logprobs)
            yield event("response.output_text.delta", **at, delta=new, logprobs=news)
    output = []
    incomplete = _INCOMPLETE.get(finish or "")
    status = "incomplete" if incomplete else "completed"
    if text:
        part = _part(text, logprobs)
        output.append(_message_item(context, status, part))
        yield event("response.output_text.done", **at, text=text, logprobs=logprobs)
        yield event("response.content_part.done", **at, part=part)
        yield event("response.output_item.done", output_index=0, item=output[0])
    for call in calls:
        place, done = len(output), _call_item(call, "completed")
        item = _call_item(call, "in_progress")
        said = {"item_id": done["id"], "output_index": place}
        yield event("response.output_item.added", output_index=place, item=item)
        told = done["arguments"]
        yield event("response.function_call_arguments.delta", **said, delta=told)
        yield event("response.function_call_arguments.done", **said, arguments=told)
        yield event("response.output_item.done", output_index=place, item=done)
        output.append(done)
    context.has_large_answer = len(logprobs) > _SMALL_TOKENS
    ended = _whole_response(body, context, status, output, completion, incomplete)
    yield event(f"response.{status}", response=ended)
