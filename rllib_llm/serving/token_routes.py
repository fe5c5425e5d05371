"""Tokens in, tokens out: what trainers ask of a server, in vLLM's shape."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request

from rllib_llm.serving import chat
from rllib_llm.serving.answers import token_logprobs, usage, versions_told
from rllib_llm.serving.choices import Piece
from rllib_llm.serving.context import RequestContext, context_of
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.job import check_tokens, make_job, read_lengths
from rllib_llm.serving.json_route import JsonRoute
from rllib_llm.serving.running_job import RunningJob
from rllib_llm.serving.schemas import DetokenizeRequest, GenerateRequest, TokenizeRequest
from rllib_llm.serving.service import Service


def make_router(service: Service, chats: chat.Chats) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/inference/v1/generate")
    async def generate(body: GenerateRequest, request: Request) -> Any:
        context = await context_of(request, service, body.model)
        context.request_id = body.request_id or context.request_id
        return await context.answer(_generate(service, body, context), body.stream)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.weights.named(body.model)
        tokens = _tokens_of(service, chats, body)
        texts = [service.texts.of(token)[0] for token in tokens]
        return {
            "count": len(tokens),
            "max_model_len": service.limits.max_model_len,
            "tokens": tokens,
            "token_strs": texts if body.return_token_strs else None,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        service.weights.named(body.model)
        check_tokens(body.tokens, service.limits, "tokens")
        return {"prompt": service.tokenizer.decode(body.tokens)}

    return router


def _tokens_of(service: Service, chats: chat.Chats, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(
            400, "prompt or messages must be given, and not both.", param="prompt",
            code="invalid_value",
        )  # fmt: skip
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return list(service.tokenizer(body.prompt, add_special_tokens=special)["input_ids"])
    chat_format = chats.format(body.tools)
    if body.add_generation_prompt is not False:
        return chat.prompt_ids(chat_format, body.messages or [])
    messages = [chat_format.cleaned(each) for each in chat.as_messages(body.messages or [])]
    with chat.refused_by_template():
        return chat_format.encode(chat_format.render(messages))


async def _generate(
    service: Service, body: GenerateRequest, context: RequestContext
) -> AsyncIterator[dict[str, Any]]:
    """Events of /inference/v1/generate."""
    fields = body.sampling_params
    check_tokens(body.token_ids, service.limits, "token_ids")
    if fields.max_tokens == 0:
        raise ApiError(
            400, "sampling_params.max_tokens=0 must be at least 1.",
            param="sampling_params.max_tokens", code="invalid_value",
        )  # fmt: skip
    lengths = read_lengths(
        [body.token_ids], fields.max_tokens, service.limits,
        default=service.limits.default_max_tokens, field="sampling_params.max_tokens",
        prompt_field="token_ids",
    )  # fmt: skip
    job = make_job(
        fields, service.limits, [body.token_ids], lengths, prefix="sampling_params.",
        top_logprobs=fields.logprobs or 0, version=context.version,
    )  # fmt: skip
    async with service.run(context.request_id, job, context.client) as running:
        if body.stream:
            async for i, piece in running:
                yield _answer(service, body, running, [(i, piece)])
            return
        pieces = list(enumerate(await running.collect()))
        whole = _answer(service, body, running, pieces)
        whole["prompt_token_ids"] = body.token_ids if body.return_token_ids else None
        whole["usage"] = usage(job.prompts, running.num_completion_tokens)
        yield whole


def _answer(
    service: Service,
    body: GenerateRequest,
    running: RunningJob,
    pieces: list[tuple[int, Piece]],
) -> dict[str, Any]:
    weights = running.weights
    return {
        "request_id": running.request_id,
        "model": service.weights.id_of(weights[-1]),
        "choices": [_choice(service, body, running, i, piece) for i, piece in pieces],
        "metadata": versions_told(weights),
        "system_fingerprint": f"fp_{weights[-1].fingerprint}",
    }


def _choice(
    service: Service, body: GenerateRequest, running: RunningJob, i: int, piece: Piece
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": i,
        "token_ids": piece.token_ids,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
        "logprobs": None,
    }
    if body.sampling_params.logprobs is not None:
        choice["logprobs"] = token_logprobs(piece, body.sampling_params.logprobs)
    if piece.finish_reason is not None:
        choice["weight_versions"] = [
            {"version": service.weights.of(serial).label, "start": start, "end": end}
            for serial, start, end in running.choices[i].spans
        ]
    if body.output_mode == "text":
        choice["text"] = piece.text
    return choice
