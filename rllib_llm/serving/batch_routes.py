"""Many requests in one: JSON Lines in, JSON Lines out, in OpenAI's batch format."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response

from rllib_llm.serving.context import GONE
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.sse import ClientGoneError, while_there

URLS = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")
_AT_ONCE = 16
_MAX_LINES = 10_000
_EXAMPLE = {
    "custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once"},
}  # fmt: skip


def make_router(app: FastAPI) -> APIRouter:
    """The route.

    Args:
        app: answers each line.
    """
    router = APIRouter()
    schema = {"content": {"application/jsonl": {"schema": {"type": "string"}}}, "required": True}

    @router.post("/v1/batch", openapi_extra={"requestBody": schema})
    async def batch(request: Request) -> Response:
        lines = _lines(await request.body())
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(i: int, line: dict[str, Any]) -> dict[str, Any]:
            async with places:
                return await _answer(app, request, i, line)

        work = asyncio.gather(*(one(i, line) for i, line in enumerate(lines)))
        try:
            answers = await while_there(request.receive, work)
        except ClientGoneError:
            return Response(status_code=GONE)
        text = "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
        return Response(text, media_type="application/jsonl")

    return router


def _lines(body: bytes) -> list[dict[str, Any]]:
    try:
        texts = [text for text in body.decode().splitlines() if text.strip()]
        lines = [json.loads(text) for text in texts]
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400, f"The batch must be JSON Lines: {error}. A line is {json.dumps(_EXAMPLE)}.",
            code="invalid_json",
        ) from error  # fmt: skip
    if not 0 < len(lines) <= _MAX_LINES:
        raise ApiError(
            400, f"The batch must have 1 to {_MAX_LINES} lines: it has {len(lines)}.",
            code="invalid_value",
        )  # fmt: skip
    for number, line in enumerate(lines, start=1):
        good = isinstance(line, dict) and line.get("url") in URLS
        good = good and isinstance(line.get("body"), dict) and not line["body"].get("stream")
        if not good or line.get("method", "POST") != "POST":
            raise ApiError(
                400, f"Line {number} must be a request to one of {URLS}, without stream, such as "
                f"{json.dumps(_EXAMPLE)}.", param=f"line {number}", code="invalid_value",
            )  # fmt: skip
    return lines


async def _answer(app: FastAPI, request: Request, i: int, line: dict[str, Any]) -> dict[str, Any]:
    """One line's answer, by the application itself."""
    state = dict(request.scope["state"])
    state["request_id"] = f"{state['request_id']}-{i}"
    body = json.dumps(line["body"]).encode()
    scope = {
        **request.scope, "path": line["url"], "raw_path": line["url"].encode(), "state": state,
        "headers": [(b"content-type", b"application/json")], "query_string": b"",
    }  # fmt: skip
    status, parts, is_asked = 0, [], False
    forever = asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal is_asked
        if is_asked:
            await forever.wait()
        is_asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    for key in ("endpoint", "route", "path_params", "router", "app", "fastapi_inner_astack",
                "fastapi_function_astack", "fastapi_middleware_astack"):  # fmt: skip
        scope.pop(key, None)
    await app(scope, receive, send)
    return {
        "id": state["request_id"],
        "custom_id": line.get("custom_id"),
        "response": {
            "status_code": status,
            "request_id": state["request_id"],
            "body": json.loads(b"".join(parts)),
        },
        "error": None,
    }
