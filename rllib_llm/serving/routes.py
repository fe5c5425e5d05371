"""The routes: plain functions with FastAPI's dependencies, behind the gate of `security.py`.

From a request to a sampled token there are at most eight hops (`docs/explanations/house.md`):

    Gate ─▶ route ─▶ View ─▶ RunningJob ─▶ EngineProcess ═▶ EngineWorker ─▶ HotSwapEngine
                                      (a socket; without a process: ThreadHost)   │
    Decoder.step ◀────────────────────── TorchEngine ◀────────────────────────────┘

A `View` (`completions.py`) makes the job of a body and shows its tokens, for all routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from rllib_llm.data.encoding import encode_spans
from rllib_llm.serving import chat, schemas
from rllib_llm.serving.completions import ChatBatchView, ChatView, SessionView
from rllib_llm.serving.responses import ResponseView
from rllib_llm.serving.schemas import ApiError, documented, refuse
from rllib_llm.serving.security import JsonRoute, admin_key, client_key
from rllib_llm.serving.service import JsonResponse, RequestContext, ServedWeights, Service, encoded
from rllib_llm.serving.sessions import Session
from rllib_llm.serving.text_completions import TextView, TokenView
from rllib_llm.serving.weight_sources import load_folder

_PAGE = Path(__file__).with_name("page.html")
Json = dict[str, Any]
_SMALL_SESSION = 2**13  # tokens of one that is shown by the event loop itself


async def service_of(request: Request) -> Service:
    """The service behind a request."""
    return request.app.state.service


async def context_of(request: Request) -> RequestContext:
    """The context of a request."""
    return RequestContext(request)


Served = Annotated[Service, Depends(service_of)]
Context = Annotated[RequestContext, Depends(context_of)]
_OF_CLIENTS: dict[str, Any] = {
    "route_class": JsonRoute, "dependencies": [Depends(client_key)],
    "responses": documented(401, 429),
}  # fmt: skip
_OF_MODELS: dict[str, Any] = {"response_model": None, "responses": documented(404, 409, 503)}
_STREAMED: dict[str, Any] = {
    "response_model": None,
    "responses": {200: {"content": {"text/event-stream": {}}}, **documented(404, 409, 503, 504)},
}

# --- OpenAI's ------------------------------------------------------------------------------------

openai = APIRouter(prefix="/v1", **_OF_CLIENTS)


@openai.get("/models")
async def models(service: Served) -> Json:
    # The newest weights under the model's name, and each live version under its own.
    weights = service.weights

    def card(id: str, of: ServedWeights, **further: Any) -> Json:
        return {
            "id": id, "object": "model", "owned_by": "rllib_llm", "created": int(of.loaded_at),
            "max_model_len": service.limits.max_model_len, "root": of.source, **further,
        }  # fmt: skip

    versions = [card(weights.id_of(each), each, parent=weights.name) for each in weights.live]
    return {"object": "list", "data": [card(weights.name, weights.newest), *versions]}


@openai.get("/models/{model:path}", responses=documented(404))
async def model(model: str, service: Served) -> Json:
    service.weights.named(model)
    cards = (await models(service))["data"]
    return next(card for card in cards if card["id"] == model)


@openai.post("/chat/completions", **_STREAMED)
async def chat_completions(body: schemas.ChatRequest, context: Context) -> Response:
    return await ChatView(context, body).answer()


@openai.post("/chat/completions/batch", **_OF_MODELS)
async def chat_batch(body: schemas.ChatBatchRequest, context: Context) -> Response:
    return await ChatBatchView(context, body).answer()


@openai.post("/completions", **_STREAMED)
async def completions(body: schemas.CompletionRequest, context: Context) -> Response:
    return await TextView(context, body).answer()


@openai.post("/responses", **_STREAMED)
async def responses(body: schemas.ResponseRequest, context: Context) -> Response:
    return await ResponseView(context, body).answer()


# --- tokens in, tokens out, in vLLM's shape ------------------------------------------------------

tokens = APIRouter(**_OF_CLIENTS)


@tokens.post("/inference/v1/generate", **_STREAMED)
async def generate(body: schemas.GenerateRequest, context: Context) -> Response:
    return await TokenView(context, body).answer()


@tokens.post("/tokenize", **_OF_MODELS)
async def tokenize(body: schemas.TokenizeRequest, context: Context) -> Response:
    service, messages = context.service, body.messages or []

    def tokenized() -> bytes:
        if body.prompt is not None:
            service.limits.check_chars(body.prompt, "prompt")
            special = body.add_special_tokens is not False
            found = encode_spans(service.tokenizer, body.prompt, [], add_special_tokens=special)[0]
        else:
            found, _ = chat.read_prompt(
                service.chats.format(body.tools), messages, service.limits, service.images,
                generation_prompt=body.add_generation_prompt is not False,
            )  # fmt: skip
        texts = [service.texts.of(token)[0] for token in found] if body.return_token_strs else None
        return encoded({
            "count": len(found), "max_model_len": service.limits.max_model_len, "tokens": found,
            "token_strs": texts,
        })  # fmt: skip

    await context.begin(body.model)
    shows = bool(chat.image_urls(messages))
    return JsonResponse(await context.beside_loop(tokenized, is_large=shows))


@tokens.post("/detokenize", **_OF_MODELS)
async def detokenize(body: schemas.DetokenizeRequest, context: Context) -> Response:
    service = context.service

    def detokenized() -> bytes:
        service.limits.check_tokens(body.tokens, "tokens")
        return encoded({"prompt": service.tokenizer.decode(body.tokens)})

    await context.begin(body.model)
    return JsonResponse(await context.beside_loop(detokenized))


# --- sessions: OpenAI's interface for an agent whose turns are trained on ------------------------


async def has_one_replica(service: Served) -> None:
    """Refuses sessions where a request may reach another replica."""
    refuse(service.settings.has_replicas, "Sessions must have a server with one replica: "
           "another does not know them.", code="sessions_off")  # fmt: skip


sessions = APIRouter(
    prefix="/sessions", route_class=JsonRoute,
    dependencies=[Depends(client_key), Depends(has_one_replica)],
    responses=documented(401, 404, 429),
)  # fmt: skip


@sessions.post("")
async def begin(context: Context) -> Json:
    held = context.service.sessions
    refuse(not held.begin_by_themselves, "Sessions of this server are begun by its run: "
           "use the address that the agent was given.", None, "session_not_found", 404)
    session_id = uuid.uuid4().hex
    held.begin(session_id, context.client.key)
    return {"session_id": session_id, "base_url": f"/sessions/{session_id}/v1"}


async def _shown(service: Service, session_id: str, session: Session) -> Response:
    session.measure()
    is_large = session.size > _SMALL_SESSION
    # Each row has the whole path to its turn, so many turns of a long chat are much more.
    told = await service.beside_loop(is_large, session.as_dict)
    return JsonResponse(await service.encoded(is_large, {"session_id": session_id, **told}))


@sessions.get("/{session_id}")
async def show(session_id: str, context: Context) -> Response:
    session = context.service.sessions.get(session_id, context.client.key)
    return await _shown(context.service, session_id, session)


@sessions.delete("/{session_id}")
async def end(session_id: str, context: Context) -> Response:
    session = context.service.sessions.end(session_id, context.client.key)
    return await _shown(context.service, session_id, session)


@sessions.post("/{session_id}/reward")
async def reward(session_id: str, body: schemas.SessionRewardRequest, context: Context) -> Json:
    session = context.service.sessions.get(session_id, context.client.key)
    session.add_reward(body.reward)
    return {"session_id": session_id, "reward": session.reward}


@sessions.get("/{session_id}/v1/models", name="models")
async def session_models(session_id: str, service: Served) -> Json:
    return await models(service)


@sessions.post("/{session_id}/v1/chat/completions", name="chat_completions", **_STREAMED)
async def session_turn(session_id: str, body: schemas.ChatRequest, context: Context) -> Response:
    refuse((body.n or 1) != 1, f"n={body.n} must be 1 in a session.", "n", "unsupported_value")
    held = context.service.sessions
    session = (held.begin if held.begin_by_themselves else held.get)(session_id, context.client.key)
    return await SessionView(context, body, session).answer()


# --- administration ------------------------------------------------------------------------------

administration = APIRouter(
    route_class=JsonRoute, dependencies=[Depends(admin_key)], responses=documented(401, 403, 503),
    tags=["administration"],
)  # fmt: skip


@administration.post("/pause")
async def pause(service: Served) -> Json:
    service.host.pause()
    return {"is_paused": True}


@administration.post("/resume")
async def resume(service: Served) -> Json:
    service.host.resume()
    return {"is_paused": False}


@administration.get("/is_paused")
async def is_paused(service: Served) -> Json:
    return {"is_paused": service.host.is_paused}


@administration.post("/abort_requests")
@administration.post("/inference/v1/abort_requests")
async def abort_requests(service: Served, body: schemas.AbortRequest | None = None) -> Json:
    return {"aborted": service.abort(None if body is None else body.request_ids)}


def _described(weights: ServedWeights) -> Json:
    return {name: value for name, value in asdict(weights).items() if name != "serial"}


@administration.get("/weight_info")
async def weight_info(service: Served) -> Json:
    live = [*map(_described, service.weights.live)]
    return {"newest": live[0], "live": live, "in_flight": service.settings.in_flight}


@administration.post("/update_weights", responses=documented(409))
async def update_weights(body: schemas.UpdateRequest, service: Served) -> Json:
    async with service.updating:  # each takes the version behind the newest
        await service.check_takes_weights()
        newest = service.weights.newest
        epoch = newest.epoch if body.epoch is None else body.epoch
        version = newest.version + 1 if body.version is None else body.version
        for each in service.weights.live:  # two would have one name
            refuse((each.epoch, each.version) == (epoch, version), f"version={version} must be one "
                   f"that is not in use: {service.weights.id_of(each)} came from {each.source}.",
                   "version", "weight_version_in_use", 409)  # fmt: skip
        try:
            loaded = await asyncio.to_thread(load_folder, service, body.path, epoch, version)
        except (ValueError, OSError) as error:
            raise ApiError(400, str(error), "path") from error
    return _described(loaded)


@administration.post("/drain")
async def drain(service: Served) -> Json:
    is_done = await service.drain(service.settings.drain_s)
    return {"drained": is_done, "under_way": len(service.jobs)}


# --- routes that want no key ---------------------------------------------------------------------

health = APIRouter()


@health.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page() -> str:
    return _PAGE.read_text(encoding="utf-8")


@health.get("/health")  # of vLLM's clients
@health.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@health.get("/readyz", responses=documented(503))
async def readyz(service: Served) -> dict[str, str]:
    service.check_open()
    await service.counts()
    return {"status": "ready"}


@health.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Served) -> PlainTextResponse:
    counts = None
    if service.is_ready:
        with contextlib.suppress(ApiError):  # the engine has ended, which /readyz says
            counts = await service.counts()
    text = service.metrics.text(service.weights, counts)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


ROUTERS = (openai, tokens, sessions, administration, health)
