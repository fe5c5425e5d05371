"""OpenAI's endpoints: models, chat completions, completions."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.serving import chat
from rllib_llm.serving.guides import check_length, grammar_of
from rllib_llm.serving.jobs import Job, RunningJob, check_tokens, make_job, read_lengths
from rllib_llm.serving.schemas import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    OpenAIFields,
    documented,
)
from rllib_llm.serving.security import Guards
from rllib_llm.serving.service import RequestContext, Service
from rllib_llm.serving.streams import Event, Piece
from rllib_llm.serving.views import ChatView, Envelope, TextView, usage
from rllib_llm.serving.weights import MODEL_GONE

_COMPLETION_TOKENS = 16  # OpenAI's default
SAMPLING_ERRORS = documented(401, 404, 409, 429, 503, 504)
# Of routes that take `stream`.
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}},
    **SAMPLING_ERRORS,
}


def openai_router(service: Service, completer: Completer, guards: Guards) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/v1", dependencies=[guards.client])

    @router.get("/models", responses=documented(401))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": model_cards(service)}

    @router.get("/models/{model:path}", responses=documented(401, 404))
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

    def __init__(self, service: Service) -> None:
        self._service = service
        self._chats = chat.Chats(service.tokenizer)

    async def run(
        self,
        job: Job,
        context: RequestContext,
        answer: Callable[[RunningJob], AsyncIterator[Event]],
    ) -> AsyncIterator[Event]:
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
                    ) as running:
                        async for event in answer(running):
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

    def prompt_of(self, body: ChatRequest) -> tuple[ChatFormat, list[int]]:
        """How a chat is written, and its token ids."""
        chat_format = self.format_of(body)
        return chat_format, chat.prompt_ids(chat_format, body.messages, self._service.limits)

    async def chat(self, body: ChatRequest, context: RequestContext) -> AsyncIterator[Event]:
        """Events of a chat completion."""
        chat_format, prompt = await context.beside_loop(self.prompt_of, body)
        async for event in self.answer_chat(body, context, chat_format, prompt):
            yield event

    async def answer_chat(
        self,
        body: ChatRequest,
        context: RequestContext,
        chat_format: ChatFormat,
        prompt: list[int],
        on_piece: Callable[[Piece], None] | None = None,
        on_view: Callable[[ChatView], None] | None = None,
        conversation: Hashable | None = None,
    ) -> AsyncIterator[Event]:
        """Events of a chat completion.

        Args:
            body, context: of the request.
            chat_format: how it is written.
            prompt: its token ids.
            on_piece: is told what comes.
            on_view: is given what shows it.
            conversation: whose KV cache is kept for its next turn.
        """
        forced = body.tool_choice not in (None, "none", "auto")
        job = await self._chat_job(body, context, prompt, chat_format, forced)
        job = dataclasses.replace(job, conversation=conversation)
        has_tools = bool(body.tools) and body.tool_choice != "none"
        view = ChatView(
            self._service, body, context.request_id, prompt, chat_format if has_tools else None,
            chat.forced_syntax(chat_format) if forced else None,
        )  # fmt: skip
        if on_view is not None:
            on_view(view)

        def answer(running: RunningJob) -> AsyncIterator[Event]:
            running.on_piece = on_piece
            kind = "chat.completion.chunk" if body.stream else "chat.completion"
            envelope = Envelope(self._service, running, f"chatcmpl-{context.request_id}", kind)
            return _answer(view, running, envelope, body)

        async for event in self.run(job, context, answer):
            yield event

    async def _chat_job(
        self,
        body: ChatRequest,
        context: RequestContext,
        prompt: list[int],
        chat_format: ChatFormat,
        forced: bool,
    ) -> Job:
        """The engine's job for a chat request."""
        service = self._service
        asked = (
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        )
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        if body.top_logprobs and not body.logprobs:
            raise ApiError(
                400, "top_logprobs must come with logprobs=true.", param="top_logprobs",
            )  # fmt: skip
        lengths = read_lengths(
            [prompt], asked, service.limits, default=service.limits.default_max_tokens,
            field=field, prompt_field="messages",
        )  # fmt: skip
        job = make_job(
            body, service.limits, [prompt], lengths, turn_ends=chat_format.stop_token_ids,
            top_logprobs=body.top_logprobs or 0, prompt_logprobs=body.prompt_logprobs,
            version=context.version,
        )  # fmt: skip
        if not forced:
            return self._guided(body, job)
        grammar = self._forced_call(body, chat_format)
        return self._with_grammar(job, grammar, "tool_choice")

    def _forced_call(self, body: ChatRequest, chat_format: ChatFormat) -> str:
        """The grammar of the calls that have to be made; `response_format` is of answers without
        a call, as with OpenAI."""
        assert body.tool_choice is not None, "there is one that forces"
        one_call = body.tool_choice != "required" or body.parallel_tool_calls is False
        with chat.refused_by_template("tools"):
            grammar = chat.call_grammar(chat_format, body.tools or (), body.tool_choice, one_call)
        check_length(grammar, "tools")
        return grammar

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
        job = self._guided(body, job)
        view = TextView(service, body, prompts)

        def answer(running: RunningJob) -> AsyncIterator[Event]:
            envelope = Envelope(service, running, f"cmpl-{context.request_id}", "text_completion")
            return _answer(view, running, envelope, body)

        async for event in self.run(job, context, answer):
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
                each = tokenizer(each)["input_ids"]
            prompts.append(list(each))
        for prompt in prompts:
            if not prompt:
                raise ApiError(
                    400, "prompt must have at least one token: there is nothing to go on from.",
                    param="prompt",
                )  # fmt: skip
            check_tokens(prompt, limits, "prompt")
        return prompts

    # --- grammars ----------------------------------------------------------------------------

    def _guided(self, body: ChatRequest | CompletionRequest, job: Job) -> Job:
        """The job with the grammar of the response format."""
        found = None if body.response_format is None else grammar_of(body.response_format)
        if found is None:
            return job
        field, grammar = found
        return self._with_grammar(job, grammar, "response_format", field)

    def _with_grammar(self, job: Job, grammar: str, field: str, within: str = "") -> Job:
        """The job with a grammar.

        Args:
            job: of the request.
            grammar: of llguidance.
            field: of the request that asks for it.
            within: the part of the field that says it, where it is one.
        """
        ends = self._service.limits.eos_token_ids
        if not ends or ends[0] not in job.params.stop_token_ids:
            raise ApiError(
                400, f"{field} must come with the model's EOS token as a stop token: it ends the "
                "answer. Leave out ignore_eos.", param=field, code="unsupported_value",
            )  # fmt: skip
        if job.params.min_new_tokens:
            raise ApiError(
                400, f"min_tokens must be left out with {field}, which says when the answer ends.",
                param="min_tokens", code="unsupported_value",
            )  # fmt: skip
        return dataclasses.replace(job, grammar=grammar, grammar_field=within or field)


async def _answer(
    view: ChatView | TextView, running: RunningJob, envelope: Envelope, body: OpenAIFields
) -> AsyncIterator[Event]:
    """The one answer, or its chunks."""
    if running.job.prompt_logprobs is not None:
        view.scores = await running.scores()
    if body.stream:
        async for event in _streamed(view, running, envelope, body):
            yield event
        return
    pieces: Sequence[Piece] = await running.collect()
    told = usage(running.job.prompts, running.num_completion_tokens)
    yield envelope.holding(view.choices(pieces), usage=told, **view.further)


async def _streamed(
    view: ChatView | TextView, running: RunningJob, envelope: Envelope, body: OpenAIFields
) -> AsyncIterator[Event]:
    """Server-sent chunks of JSON for each piece, then the usage if requested."""
    options = body.stream_options
    counts_all = bool(options and options.continuous_usage_stats)
    further = {"usage": None} if options and options.include_usage else {}

    def told() -> dict[str, int]:
        return usage(running.job.prompts, running.num_completion_tokens)

    def chunk(choice: dict[str, Any]) -> Event:
        if counts_all:
            return envelope.holding([choice], usage=told())
        return envelope.chunk([choice], **further)

    for choice in view.before():
        yield chunk(choice)
    if not running.job.samples:
        for i in range(len(running.choices)):
            yield chunk({"index": i, "text": "", "logprobs": None, "finish_reason": "length"})
    async for i, piece in running:
        for choice in view.chunks(i, piece):
            yield chunk(choice)
    if options and options.include_usage:
        yield envelope.holding([], usage=told())
