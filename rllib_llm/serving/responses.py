"""`/v1/responses`: OpenAI's newer interface in its plain form. Responses are chat completions in
another format; none is stored or retrievable."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from rllib_llm.serving.openai_routes import STREAMED, Completer
from rllib_llm.serving.schemas import (
    ApiError,
    CallItem,
    CallOutputItem,
    ChatRequest,
    MessageItem,
    ResponsePart,
    ResponseRequest,
    ResponseTool,
    ResponseToolName,
    Sampling,
)
from rllib_llm.serving.security import Guards
from rllib_llm.serving.service import RequestContext, Service
from rllib_llm.serving.streams import Event, EventStream, whole


def response_router(service: Service, completer: Completer, guards: Guards) -> APIRouter:
    """The route."""
    router = APIRouter(prefix="/v1", dependencies=[guards.client])

    @router.post("/responses", response_model=None, responses=STREAMED)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        context = await service.context_of(request, body.model)
        events = completer.chat(chat_request(body), context)
        if not body.stream:
            return await whole(request.receive, _whole(body, context, events))
        seconds = service.settings.slow_reader_s
        return EventStream(_streamed(body, context, events), seconds, names=True, ends=b"")

    return router


_LOGPROBS = "message.output_text.logprobs"  # in `include`

# --- what is asked -------------------------------------------------------------------------------


def chat_request(body: ResponseRequest) -> ChatRequest:
    """The chat completion that answers a response's request.

    Raises:
        ApiError: 400, there is none.
    """
    asked: dict[str, Any] = {
        **body.model_dump(include={*Sampling.model_fields}),
        "messages": _messages(body), "model": body.model, "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "stream_options": {"include_usage": True} if body.stream else None,
    }  # fmt: skip
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        asked |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        asked["tools"] = [_tool(tool) for tool in body.tools]
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
        first = error.errors(include_url=False)[0]
        name = {"messages": "input", "response_format": "text.format"}.get(str(first["loc"][0]), "")
        name = name or str(first["loc"][0])
        raise ApiError(400, f"{name} must be corrected: {first['msg']}.", param=name) from error


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


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


def _answer(
    body: ResponseRequest,
    context: RequestContext,
    status: str,
    output: list[dict[str, Any]],
    completion: dict[str, Any],
) -> dict[str, Any]:
    """A response.

    Args:
        body, context: of the request.
        status: of the response.
        output: its items.
        completion: the chat completion, or a chunk of it, that says who sampled.
    """
    used = completion.get("usage")
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    choice = body.tool_choice
    told = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    return {
        "id": f"resp_{context.request_id}",
        "object": "response",
        "created_at": completion.get("created", int(time.time())),
        "status": status,
        "error": None,
        "incomplete_details": details,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {**(body.metadata or {}), **completion.get("metadata", {})},
        "model": completion.get("model", body.model or context.service.weights.name),
        "output": output,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": body.temperature,
        "tool_choice": choice.model_dump()
        if isinstance(choice, ResponseToolName)
        else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": {"type": "text"}, **told},
        "truncation": "disabled",
        "usage": None
        if not used
        else {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        },
    }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message_item(context: RequestContext, status: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{context.request_id}", "type": "message", "role": "assistant",
        "status": status, "content": content,
    }  # fmt: skip


def _logprobs(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Log-probs of a choice's or chunk's tokens, if requested."""
    return choice["logprobs"]["content"] if choice["logprobs"] else []


def _call_item(call: dict[str, Any], status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{call['id']}", "type": "function_call", "status": status,
        "call_id": call["id"], "name": call["function"]["name"],
        "arguments": call["function"]["arguments"] if status == "completed" else "",
    }  # fmt: skip


def _status(finish: str | None) -> str:
    return "incomplete" if finish == "length" else "completed"


async def _whole(
    body: ResponseRequest, context: RequestContext, events: AsyncIterator[Event]
) -> AsyncIterator[Event]:
    """The one response."""
    async for completion in events:
        assert isinstance(completion, dict), "chunks alone are JSON already"
        (choice,) = completion["choices"]
        message, status = choice["message"], _status(choice["finish_reason"])
        output = []
        if message["content"]:
            part = _part(message["content"], _logprobs(choice))
            output.append(_message_item(context, status, part))
        output += [_call_item(call, "completed") for call in message.get("tool_calls", ())]
        yield _answer(body, context, status, output, completion)


async def _streamed(
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
    async for given in events:
        chunk = given if isinstance(given, dict) else json.loads(given)
        if not completion:
            begun = _answer(body, context, "in_progress", [], chunk)
            yield event("response.created", response=begun)
            yield event("response.in_progress", response=begun)
        completion = chunk
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            delta = choice["delta"]
            calls += delta.get("tool_calls") or ()
            new = delta.get("content") or ""
            logprobs += _logprobs(choice)
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
    status = _status(finish)
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
    ended = _answer(body, context, status, output, completion)
    yield event(f"response.{status}", response=ended)
