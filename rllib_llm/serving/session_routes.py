"""`/sessions/{id}/v1/...`: OpenAI's interface for an agent whose turns are learnt from."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request

from rllib_llm.serving import chat
from rllib_llm.serving.choices import Piece
from rllib_llm.serving.context import Event, RequestContext, context_of
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.guides import Guides
from rllib_llm.serving.json_route import JsonRoute
from rllib_llm.serving.openai_routes import Completer, model_cards
from rllib_llm.serving.schemas import ChatRequest, RewardRequest
from rllib_llm.serving.service import Service
from rllib_llm.serving.sessions import Session


def make_router(service: Service, chats: chat.Chats, guides: Guides) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/sessions", route_class=JsonRoute)
    sessions = service.sessions
    completer = Completer(service, chats, guides)

    @router.post("")
    async def begin() -> dict[str, Any]:
        session_id = uuid.uuid4().hex
        sessions.begin(session_id)
        return {"session_id": session_id, "base_url": f"/sessions/{session_id}/v1"}

    @router.get("/{session_id}")
    async def show(session_id: str) -> dict[str, Any]:
        return {"session_id": session_id, **sessions.get(session_id).as_dict()}

    @router.delete("/{session_id}")
    async def end(session_id: str) -> dict[str, Any]:
        return {"session_id": session_id, **sessions.end(session_id).as_dict()}

    @router.post("/{session_id}/reward")
    async def reward(session_id: str, body: RewardRequest) -> dict[str, Any]:
        session = sessions.get(session_id)
        session.add_reward(body.reward)
        return {"session_id": session_id, "reward": session.reward}

    @router.get("/{session_id}/v1/models")
    async def models(session_id: str) -> dict[str, Any]:
        return {"object": "list", "data": model_cards(service)}

    @router.post("/{session_id}/v1/chat/completions")
    async def chat_completions(session_id: str, body: ChatRequest, request: Request) -> Any:
        if (body.n or 1) != 1:
            raise ApiError(
                400, f"n={body.n} must be 1 in a session: it goes on with one answer.", param="n",
                code="unsupported_value",
            )  # fmt: skip
        session = sessions.asked(session_id)
        # An agent that is trained asks for whatever model it was written for.
        context = await context_of(request, service, None if session.rules else body.model)
        return await context.answer(turn(session, body, context), body.stream)

    async def turn(
        session: Session, body: ChatRequest, context: RequestContext
    ) -> AsyncIterator[Event]:
        """Events of a chat completion that the session keeps."""
        async with session.lock:
            settings = session.template_settings(body.chat_template_kwargs)
            body = body.model_copy(update={"chat_template_kwargs": settings or None})
            chat_format = completer.format_of(body)
            given = chat.as_messages(body.messages)
            conversation = session.begin_turn(chat_format, given)
            whole = Piece()
            try:
                prompt = conversation.token_ids
                body = session.governed(body, len(prompt))
                cached = conversation if session.rules else None
                async for event in completer.chat(body, context, prompt, whole.add, cached):
                    yield event
            finally:
                kept = whole if whole.finish_reason not in (None, "abort") else None
                versions = [service.weights.of(serial).version for serial in whole.versions]
                session.end_turn(conversation, kept, versions)

    return router
