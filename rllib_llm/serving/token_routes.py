"""Tokens in, tokens out: what trainers ask of a server, in vLLM's shape."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from rllib_llm.serving import chat
from rllib_llm.serving.errors import ApiError, documented
from rllib_llm.serving.job import check_tokens, make_job, read_lengths
from rllib_llm.serving.openai_routes import SAMPLING_ERRORS, Completer
from rllib_llm.serving.running_job import RunningJob
from rllib_llm.serving.schemas import (
    ChatRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from rllib_llm.serving.security import Guards
from rllib_llm.serving.service import RequestContext, Service
from rllib_llm.serving.streams import Event, Piece
from rllib_llm.serving.views import prompt_logprobs, token_logprobs, usage, versions_told


def token_router(service: Service, completer: Completer, guards: Guards) -> APIRouter:
    """The routes."""
    router = APIRouter(dependencies=[guards.client])

    @router.post("/inference/v1/generate", response_model=None, responses=SAMPLING_ERRORS)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        context = await service.context_of(request, body.model)
        context.request_id = body.request_id or context.request_id
        return await context.answer(_generate(service, completer, body, context), body.stream)

    @router.post("/tokenize", responses=documented(401, 404))
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        context = await service.context_of(request, body.model)
        tokens = await context.beside_loop(_tokens_of, service, completer, body)
        texts = [service.texts.of(token)[0] for token in tokens]
        return {
            "count": len(tokens),
            "max_model_len": service.limits.max_model_len,
            "tokens": tokens,
            "token_strs": texts if body.return_token_strs else None,
        }

    @router.post("/detokenize", responses=documented(401, 404))
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        context = await service.context_of(request, body.model)
        check_tokens(body.tokens, service.limits, "tokens")
        text = await context.beside_loop(service.tokenizer.decode, body.tokens)
        return {"prompt": text}

    return router


def _tokens_of(service: Service, completer: Completer, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(
            400, "prompt or messages must be given, and not both.", param="prompt",
            code="invalid_value",
        )  # fmt: skip
    if body.prompt is not None:
        service.limits.check_chars(body.prompt, "prompt")
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return list(service.tokenizer(body.prompt, add_special_tokens=special)["input_ids"])
    asked = ChatRequest.model_construct(messages=body.messages, tools=body.tools)
    return chat.prompt_ids(
        completer.format_of(asked), body.messages or [], service.limits,
        generation_prompt=body.add_generation_prompt is not False,
    )  # fmt: skip


async def _generate(
    service: Service, completer: Completer, body: GenerateRequest, context: RequestContext
) -> AsyncIterator[Event]:
    """Events of /inference/v1/generate."""
    fields = body.sampling_params
    check_tokens(body.token_ids, service.limits, "token_ids")
    if fields.max_tokens == 0:
        raise ApiError(
            400, "sampling_params.max_tokens=0 must be at least 1.",
            param="sampling_params.max_tokens", code="invalid_value",
        )  # fmt: skip
    if body.output_mode == "text" and fields.skip_special_tokens is False:
        raise ApiError(
            400, "sampling_params.skip_special_tokens=false must come without output_mode='text': "
            "the text has none. Read token_ids.", param="sampling_params.skip_special_tokens",
            code="unsupported_value",
        )  # fmt: skip
    lengths = read_lengths(
        [body.token_ids], fields.max_tokens, service.limits,
        default=service.limits.default_max_tokens, field="sampling_params.max_tokens",
        prompt_field="token_ids",
    )  # fmt: skip
    job = make_job(
        fields, service.limits, [body.token_ids], lengths, prefix="sampling_params.",
        top_logprobs=fields.logprobs or 0, prompt_logprobs=fields.prompt_logprobs,
        version=context.version,
    )  # fmt: skip

    async def answer(running: RunningJob) -> AsyncIterator[Event]:
        told = None
        if job.prompt_logprobs is not None:
            (scores,) = await running.scores()
            told = prompt_logprobs(service, body.token_ids, scores)
        if body.stream:
            async for i, piece in running:
                yield _answer(service, body, running, [(i, piece)])
            return
        pieces = list(enumerate(await running.collect()))
        whole = _answer(service, body, running, pieces)
        whole["prompt_token_ids"] = body.token_ids if body.return_token_ids else None
        whole["prompt_logprobs"] = told
        whole["usage"] = usage(job.prompts, running.num_completion_tokens)
        yield whole

    async for event in completer.run(job, context, answer):
        yield event


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
