"""OpenAI's endpoints: models, chat completions, completions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any

from fastapi import APIRouter, Request

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.serving import chat
from rllib_llm.serving.answers import Envelope, usage
from rllib_llm.serving.choices import Piece
from rllib_llm.serving.context import Event, RequestContext, context_of
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.guides import Guides
from rllib_llm.serving.job import Job, check_tokens, make_job, read_lengths
from rllib_llm.serving.json_route import JsonRoute
from rllib_llm.serving.running_job import RunningJob
from rllib_llm.serving.schemas import ChatRequest, CompletionRequest, OpenAIFields
from rllib_llm.serving.service import Service
from rllib_llm.serving.views import ChatView, TextView

_COMPLETION_TOKENS = 16  # OpenAI's default


def make_router(service: Service, chats: chat.Chats, guides: Guides) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=JsonRoute)
    completer = Completer(service, chats, guides)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": model_cards(service)}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        service.weights.named(model)
        return next(card for card in model_cards(service) if card["id"] == model)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Any:
        context = await context_of(request, service, body.model)
        return await context.answer(completer.chat(body, context), body.stream)

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Any:
        context = await context_of(request, service, body.model)
        return await context.answer(completer.text(body, context), body.stream)

    return router


def model_cards(service: Service) -> list[dict[str, Any]]:
    """The newest weights under the model's name, and each live version under its own."""
    weights = service.weights
    common = {
        "object": "model", "owned_by": "rllib_llm", "max_model_len": service.limits.max_model_len,
    }  # fmt: skip
    newest = weights.newest
    cards = [
        {"id": weights.name, "created": int(newest.loaded_at), **common, "root": newest.source}
    ]
    for each in weights.live:
        cards.append(
            {
                "id": weights.id_of(each), "created": int(each.loaded_at), **common,
                "root": each.source, "parent": weights.name,
            }
        )  # fmt: skip
    return cards


class Completer:
    """Answers both completion endpoints: events, of which a whole answer is the only one."""

    def __init__(self, service: Service, chats: chat.Chats, guides: Guides) -> None:
        self._service, self._chats, self._guides = service, chats, guides

    # --- chats -------------------------------------------------------------------------------

    def format_of(self, body: ChatRequest) -> ChatFormat:
        """How a chat is written."""
        tools = None if body.tool_choice == "none" else body.tools
        return self._chats.format(tools, body.chat_template_kwargs)

    async def chat(
        self,
        body: ChatRequest,
        context: RequestContext,
        prompt: list[int] | None = None,
        on_piece: Callable[[Piece], None] | None = None,
        conversation: Hashable | None = None,
    ) -> AsyncIterator[Event]:
        """Events of a chat completion.

        Args:
            body, context: of the request.
            prompt: token ids of the chat, where they are known; else the template writes them.
            on_piece: is told what comes.
            conversation: whose KV cache is kept for its next turn.
        """
        chat_format = self.format_of(body)
        if prompt is None:
            prompt = chat.prompt_ids(chat_format, body.messages)
        job = await self.chat_job(body, context, prompt, chat_format.stop_token_ids)
        job = dataclasses.replace(job, conversation=conversation)
        async with self._service.run(context.request_id, job, context.client) as running:
            kind = "chat.completion.chunk" if body.stream else "chat.completion"
            envelope = Envelope(self._service, running, f"chatcmpl-{context.request_id}", kind)
            running.on_piece = on_piece
            has_tools = bool(body.tools) and body.tool_choice != "none"
            view = ChatView(self._service, body, prompt, chat_format if has_tools else None)
            make = _streamed if body.stream else _whole
            async for event in make(view, running, envelope, body):
                yield event

    async def chat_job(
        self,
        body: ChatRequest,
        context: RequestContext,
        prompt: list[int],
        turn_ends: Sequence[int],
    ) -> Job:
        """What a chat asks of the engine."""
        service = self._service
        asked = (
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        )
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        if asked == 0:
            raise ApiError(400, f"{field}=0 must be at least 1.", param=field, code="invalid_value")
        if body.top_logprobs and not body.logprobs:
            raise ApiError(
                400, "top_logprobs must come with logprobs=true.", param="top_logprobs",
                code="invalid_value",
            )  # fmt: skip
        lengths = read_lengths(
            [prompt], asked, service.limits, default=service.limits.default_max_tokens,
            field=field, prompt_field="messages",
        )  # fmt: skip
        return await self._job(body, context, [prompt], lengths, turn_ends, body.top_logprobs or 0)

    # --- texts -------------------------------------------------------------------------------

    async def text(self, body: CompletionRequest, context: RequestContext) -> AsyncIterator[Event]:
        """Events of text completions."""
        service = self._service
        prompts = self._prompts(body.prompt)
        least = 0 if body.echo else 1
        asked = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        if asked < least:
            raise ApiError(
                400, f"max_tokens={asked} must be at least 1 without echo.", param="max_tokens",
                code="invalid_value",
            )  # fmt: skip
        if body.echo and body.stream:
            raise ApiError(
                400, "echo=true must come without stream: what is echoed is no stream.",
                param="echo", code="unsupported_value",
            )  # fmt: skip
        lengths = read_lengths(
            prompts, body.max_tokens, service.limits, default=_COMPLETION_TOKENS,
            field="max_tokens", prompt_field="prompt",
        )  # fmt: skip
        view = TextView(service, body, prompts)
        if asked == 0:
            service.check_open()
            envelope = Envelope(service, None, f"cmpl-{context.request_id}", "text_completion")
            await view.score(context.version)
            n = body.n or 1
            pieces = [Piece(finish_reason="length") for _ in range(len(prompts) * n)]
            yield envelope.holding(view.choices(pieces, n), usage=usage(prompts, 0))
            return
        job = await self._job(body, context, prompts, lengths, (), body.logprobs or 0)
        async with service.run(context.request_id, job, context.client) as running:
            envelope = Envelope(service, running, f"cmpl-{context.request_id}", "text_completion")
            make = _streamed if body.stream else _whole
            async for event in make(view, running, envelope, body):
                yield event

    def _prompts(self, given: Any) -> list[list[int]]:
        """Token ids of all prompts of a request."""
        tokenizer, limits = self._service.tokenizer, self._service.limits
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        prompts = [
            list(tokenizer(each)["input_ids"]) if isinstance(each, str) else list(each)
            for each in given
        ]
        for prompt in prompts:
            if not prompt:
                raise ApiError(
                    400, "prompt must have at least one token: there is nothing to go on from.",
                    param="prompt", code="invalid_value",
                )  # fmt: skip
            check_tokens(prompt, limits, "prompt")
        return prompts

    async def _job(
        self,
        body: ChatRequest | CompletionRequest,
        context: RequestContext,
        prompts: list[list[int]],
        lengths: list[int],
        turn_ends: Sequence[int],
        top_logprobs: int,
    ) -> Job:
        job = make_job(
            body, self._service.limits, prompts, lengths, turn_ends=turn_ends,
            top_logprobs=top_logprobs, version=context.version,
            continues_text=isinstance(body, CompletionRequest),
        )  # fmt: skip
        if body.response_format is None:
            return job
        # Reading a schema may take a while.
        guide = await asyncio.to_thread(self._guides.maker, body.response_format, job.params)
        return dataclasses.replace(job, make_guide=guide)


async def _whole(
    view: ChatView | TextView, running: RunningJob, envelope: Envelope, body: OpenAIFields
) -> AsyncIterator[Event]:
    """The one answer."""
    pieces = await running.collect()
    if isinstance(view, TextView) and view.body.echo:
        await view.score(running.job.version)
    told = usage(running.job.prompts, running.num_completion_tokens)
    yield envelope.holding(view.choices(pieces, running.job.n), usage=told)


async def _streamed(
    view: ChatView | TextView, running: RunningJob, envelope: Envelope, body: OpenAIFields
) -> AsyncIterator[Event]:
    """A chunk for each piece, in JSON, and the usage at the end, if it is asked for."""
    options = body.stream_options
    further = {"usage": None} if options and options.include_usage else {}
    async for i, piece in running:
        for choice in view.chunks(i, piece):
            yield envelope.chunk([choice], **further)
    if options and options.include_usage:
        told = usage(running.job.prompts, running.num_completion_tokens)
        yield envelope.holding([], usage=told)
