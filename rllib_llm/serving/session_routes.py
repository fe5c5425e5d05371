"""`/sessions/{id}/v1/...`: OpenAI's interface for an agent whose turns are trained on."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.serving import chat
from rllib_llm.serving.errors import ApiError, documented
from rllib_llm.serving.openai_routes import SAMPLING_ERRORS, Completer, model_cards
from rllib_llm.serving.schemas import ChatRequest, RewardRequest
from rllib_llm.serving.security import Client, Guards
from rllib_llm.serving.service import RequestContext, Service
from rllib_llm.serving.sessions import Session
from rllib_llm.serving.streams import Event, Piece
from rllib_llm.serving.views import ChatView


def session_router(service: Service, completer: Completer, guards: Guards) -> APIRouter:
    """The routes."""

    async def has_one_replica() -> None:
        if service.settings.has_replicas:
            raise ApiError(
                400, "Sessions must have a server with one replica: the next request of a session "
                "would reach another one, which does not know it.", code="sessions_off",
            )  # fmt: skip

    router = APIRouter(
        prefix="/sessions", dependencies=[guards.client, Depends(has_one_replica)],
        responses=documented(401, 404, 429),
    )  # fmt: skip
    sessions = service.sessions

    @router.post("")
    async def begin(request: Request) -> dict[str, Any]:
        if not sessions.begin_by_themselves:
            raise ApiError(
                404, "Sessions of this server are begun by its run: use the address that the agent "
                "was given.", code="session_not_found",
            )  # fmt: skip
        session_id = uuid.uuid4().hex
        sessions.begin(session_id, _owner(request))
        return {"session_id": session_id, "base_url": f"/sessions/{session_id}/v1"}

    @router.get("/{session_id}")
    async def show(session_id: str, request: Request) -> dict[str, Any]:
        session = sessions.get(session_id, _owner(request))
        return {"session_id": session_id, **session.as_dict()}

    @router.delete("/{session_id}")
    async def end(session_id: str, request: Request) -> dict[str, Any]:
        session = sessions.end(session_id, _owner(request))
        return {"session_id": session_id, **session.as_dict()}

    @router.post("/{session_id}/reward")
    async def reward(session_id: str, body: RewardRequest, request: Request) -> dict[str, Any]:
        session = sessions.get(session_id, _owner(request))
        session.add_reward(body.reward)
        return {"session_id": session_id, "reward": session.reward}

    @router.get("/{session_id}/v1/models")
    async def models(session_id: str) -> dict[str, Any]:
        return {"object": "list", "data": model_cards(service)}

    @router.post(
        "/{session_id}/v1/chat/completions", response_model=None, responses=SAMPLING_ERRORS
    )
    async def chat_completions(session_id: str, body: ChatRequest, request: Request) -> Response:
        if (body.n or 1) != 1:
            raise ApiError(
                400, f"n={body.n} must be 1 in a session: it goes on with one answer.", param="n",
                code="unsupported_value",
            )  # fmt: skip
        session = sessions.asked(session_id, _owner(request))
        _check_free(session)
        # An agent that is trained asks for whatever model it was written for.
        context = await service.context_of(request, None if session.rules else body.model)
        return await context.answer(turn(session, body, context), body.stream)

    async def turn(
        session: Session, body: ChatRequest, context: RequestContext
    ) -> AsyncIterator[Event]:
        """Events of a chat completion that the session keeps."""
        _check_free(session)  # the lock is taken at once: nothing waits in between
        async with session.lock:
            chat.check_variables(body.chat_template_kwargs or {})
            settings = session.template_settings(body.chat_template_kwargs)
            body = body.model_copy(update={"chat_template_kwargs": settings or None})
            chat_format, conversation = await context.beside_loop(_begun, session, body)
            whole = Piece()
            views: list[ChatView] = []
            try:
                prompt = conversation.token_ids
                body = session.governed(body, len(prompt))
                async for event in completer.answer_chat(
                    body, context, chat_format, prompt, whole.add, views.append,
                    conversation if session.rules else None,
                ):  # fmt: skip
                    yield event
            finally:
                kept = whole if whole.finish_reason not in (None, "abort") else None
                versions = [service.weights.of(serial).version for serial in whole.versions]
                told = views[0].message(0, whole)[0] if kept is not None else {}
                session.end_turn(conversation, kept, versions, told)

    def _begun(session: Session, body: ChatRequest) -> tuple[ChatFormat, Conversation]:
        """The chat format, and the conversation that a request continues or begins."""
        chat_format = completer.format_of(body)
        return chat_format, session.begin_turn(chat_format, chat.as_messages(body.messages))

    return router


def _check_free(session: Session) -> None:
    """Raises ApiError if a turn of the session is in progress, since waiting would occupy a
    connection. Agents of a training run do wait, as often as their rules allow."""
    if session.rules is None and session.lock.locked():
        raise ApiError(
            409, "A turn of this session is under way: its turns are made one after the other. "
            "Wait for its answer, or begin another session.", code="session_busy",
            headers={"Retry-After": "1"},
        )  # fmt: skip


def _owner(request: Request) -> bytes:
    """The key that a request came with; empty where there are none."""
    client: Client = request.scope["state"]["client"]
    return client.key
