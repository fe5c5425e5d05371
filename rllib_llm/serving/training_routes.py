"""Routes of trainers: tokens in, tokens out, in vLLM's shape, and `/sessions/{id}/v1/...`, OpenAI's
interface for an agent whose turns are trained on."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.data.encoding import encode_spans
from rllib_llm.serving import chat
from rllib_llm.serving.jobs import check_tokens, make_job, read_lengths
from rllib_llm.serving.openai_routes import (
    STREAMED,
    RequestCompleter,
    model_cards,
    with_fields_named,
)
from rllib_llm.serving.schemas import (
    ApiError,
    ChatRequest,
    DetokenizeRequest,
    GenerateParams,
    GenerateRequest,
    SessionRewardRequest,
    TokenizeRequest,
    documented,
    refuse,
)
from rllib_llm.serving.security import OF_CLIENTS, Client, Guards, JsonRoute
from rllib_llm.serving.service import JsonResponse, RequestContext, Service
from rllib_llm.serving.sessions import Session
from rllib_llm.serving.streams import CompletionPiece, Event, encoded
from rllib_llm.serving.views import ChatView, TokenView

_SMALL_SESSION = 2**13  # tokens of one that is shown by the event loop itself


def token_router(service: Service, completer: RequestCompleter, guards: Guards) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=JsonRoute, dependencies=[guards.client], responses=OF_CLIENTS)

    @router.post("/inference/v1/generate", response_model=None, responses=STREAMED)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        context = await service.context_of(request, body.model)
        context.request_id = body.request_id or context.request_id
        events = with_fields_named(_generate(service, completer, body, context), _PARAMS)
        return await context.answer(events, body.stream)

    @router.post("/tokenize", response_model=None, responses=documented(404, 409, 503))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        context = await service.context_of(request, body.model)
        return JsonResponse(await context.beside_loop(tokenized, body))

    def tokenized(body: TokenizeRequest) -> bytes:
        if body.prompt is not None:
            service.limits.check_chars(body.prompt, "prompt")
            special = body.add_special_tokens is not False
            tokens = encode_spans(service.tokenizer, body.prompt, [], add_special_tokens=special)[0]
        else:
            asked = ChatRequest.model_construct(messages=body.messages, tools=body.tools)
            tokens = chat.prompt_ids(
                completer.format_of(asked), body.messages or [], service.limits,
                generation_prompt=body.add_generation_prompt is not False,
            )  # fmt: skip
        texts = [service.texts.of(token)[0] for token in tokens] if body.return_token_strs else None
        return encoded({
            "count": len(tokens), "max_model_len": service.limits.max_model_len, "tokens": tokens,
            "token_strs": texts,
        })  # fmt: skip

    @router.post("/detokenize", response_model=None, responses=documented(404, 409, 503))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        context = await service.context_of(request, body.model)
        return JsonResponse(await context.beside_loop(detokenized, body))

    def detokenized(body: DetokenizeRequest) -> bytes:
        check_tokens(body.tokens, service.limits, "tokens")
        return encoded({"prompt": service.tokenizer.decode(body.tokens)})

    return router


# Of fields within another, as the client's request calls them.
_PARAMS = {name: f"sampling_params.{name}" for name in GenerateParams.model_fields}


async def _generate(
    service: Service, completer: RequestCompleter, body: GenerateRequest, context: RequestContext
) -> AsyncIterator[Event]:
    """Events of /inference/v1/generate."""
    fields = body.sampling_params
    await context.beside_loop(check_tokens, body.token_ids, service.limits, "token_ids")
    lengths = read_lengths(
        [body.token_ids], fields.max_tokens, service.limits,
        default=service.limits.default_max_tokens, field="max_tokens", prompt_field="token_ids",
    )  # fmt: skip
    job = make_job(
        fields, service.limits, [body.token_ids], lengths, top_logprobs=fields.logprobs or 0,
        prompt_logprobs=fields.prompt_logprobs, version=context.version,
    )  # fmt: skip
    view = TokenView(service, body, context.request_id)
    async for event in completer.run(job, context, view, body.stream):
        yield event


# --- sessions ------------------------------------------------------------------------------------


def session_router(service: Service, completer: RequestCompleter, guards: Guards) -> APIRouter:
    """The routes."""

    async def has_one_replica() -> None:
        refuse(service.settings.has_replicas, "Sessions must have a server with one replica: "
               "another does not know them.", code="sessions_off")  # fmt: skip

    router = APIRouter(
        prefix="/sessions", dependencies=[guards.client, Depends(has_one_replica)],
        route_class=JsonRoute, responses=OF_CLIENTS | documented(404),
    )  # fmt: skip
    sessions = service.sessions

    @router.post("")
    async def begin(request: Request) -> dict[str, Any]:
        refuse(not sessions.begin_by_themselves, "Sessions of this server are begun by its run: "
               "use the address that the agent was given.", None, "session_not_found", 404)
        session_id = uuid.uuid4().hex
        sessions.begin(session_id, _owner(request))
        return {"session_id": session_id, "base_url": f"/sessions/{session_id}/v1"}

    async def shown(session_id: str, session: Session) -> Response:
        session.measure()
        is_large = session.size > _SMALL_SESSION
        # Each row has the whole path to its turn, so many turns of a long chat are much more.
        told = await service.beside_loop(is_large, session.as_dict)
        return JsonResponse(await service.encoded(is_large, {"session_id": session_id, **told}))

    @router.get("/{session_id}")
    async def show(session_id: str, request: Request) -> Response:
        return await shown(session_id, sessions.get(session_id, _owner(request)))

    @router.delete("/{session_id}")
    async def end(session_id: str, request: Request) -> Response:
        return await shown(session_id, sessions.end(session_id, _owner(request)))

    @router.post("/{session_id}/reward")
    async def reward(
        session_id: str, body: SessionRewardRequest, request: Request
    ) -> dict[str, Any]:
        session = sessions.get(session_id, _owner(request))
        session.add_reward(body.reward)
        return {"session_id": session_id, "reward": session.reward}

    @router.get("/{session_id}/v1/models")
    async def models(session_id: str) -> dict[str, Any]:
        return {"object": "list", "data": model_cards(service)}

    @router.post("/{session_id}/v1/chat/completions", response_model=None, responses=STREAMED)
    async def chat_completions(session_id: str, body: ChatRequest, request: Request) -> Response:
        refuse((body.n or 1) != 1, f"n={body.n} must be 1 in a session.", "n", "unsupported_value")
        read = sessions.begin if sessions.begin_by_themselves else sessions.get
        session = read(session_id, _owner(request))
        # An agent that is trained asks for whatever model it was written for.
        context = await service.context_of(request, None if session.rules else body.model)
        return await context.answer(turn(session, body, context), body.stream)

    async def turn(
        session: Session, body: ChatRequest, context: RequestContext
    ) -> AsyncIterator[Event]:
        """Events of a chat completion that the session keeps."""
        # Waiting would occupy a connection; agents of a run wait as often as their rules allow. The
        # lock is taken at once: nothing waits in between.
        if session.rules is None and session.lock.locked():
            message = "A turn of this session is under way. Wait for its answer."
            raise ApiError(409, message, None, "session_busy", {"Retry-After": "1"})
        async with session.lock:
            sessions.hold(session)  # one that is too large already holds no further message
            settings = session.template_settings(body.chat_template_kwargs)
            body = body.model_copy(update={"chat_template_kwargs": settings or None})
            chat_format, conversation = await context.beside_loop(_begun, session, body)
            whole = CompletionPiece()
            view: ChatView | None = None
            try:
                sessions.hold(session)
                prompt = conversation.token_ids
                body = session.governed(body, len(prompt))
                view = ChatView(service, body, context.request_id, chat_format, prompt)
                view.on_piece = whole.add
                kept_in_engine = conversation if session.rules else None
                async for event in completer.answer_chat(view, context, kept_in_engine):
                    yield event
            finally:
                kept = whole if whole.finish_reason not in (None, "abort") else None
                versions = [service.weights.of(serial).version for serial in whole.versions]
                told = view.message(0, whole)[0] if view and kept is not None else {}
                session.end_turn(conversation, kept, versions, told)

    def _begun(session: Session, body: ChatRequest) -> tuple[ChatFormat, Conversation]:
        """The chat format, and the conversation that a request continues or begins."""
        chat_format = completer.format_of(body)
        conversation = session.begin_turn(chat_format, chat.as_messages(body.messages))
        session.measure()
        return chat_format, conversation

    return router


def _owner(request: Request) -> bytes:
    """The key that a request came with; empty where there are none."""
    client: Client = request.scope["state"]["client"]
    return client.key
