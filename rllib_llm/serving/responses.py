"""`/v1/responses` in its plain form: chat completions in another format; none is stored or
retrievable."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError

from rllib_llm.serving import schemas
from rllib_llm.serving.completions import ChatView
from rllib_llm.serving.jobs import Job
from rllib_llm.serving.schemas import field_error
from rllib_llm.serving.service import LARGE_TOKENS, Event, RequestContext

_LOGPROBS = "message.output_text.logprobs"  # in `include`
# Of the finish reasons of chats, those that leave a response incomplete.
_INCOMPLETE = {"length": "max_output_tokens", "abort": "aborted"}


class ResponseView(ChatView):
    """A chat's only completion as the events of a response; the last of them has all of it."""

    fields = {
        "messages": "input", "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "response_format.json_schema.schema": "text.format.schema",
    }  # fmt: skip
    framing = {"names": True, "ends": b""}

    def __init__(self, context: RequestContext, body: schemas.ResponseRequest) -> None:
        super().__init__(context, body)
        self._asked, self._num_events, self._num_told = body, 0, 0
        self._text, self._finish = "", ""
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._at = {"item_id": f"msg_{context.request_id}", "output_index": 0, "content_index": 0}

    async def job(self) -> Job:
        self.body = await self.context.beside_loop(chat_request, self._asked)
        return await super().job()

    async def events(self) -> AsyncGenerator[Event, None]:
        async with aclosing(super().events()) as events:
            async for event in events:
                if self._asked.stream:
                    yield event
        if not self._asked.stream:
            assert isinstance(event, dict), "echoes alone are JSON already"
            yield event["response"]

    def chunk(self, choice: dict[str, Any]) -> list[Event]:
        found: list[Event] = []
        if not self._num_events:
            begun = self._response("in_progress", [])
            found.append(self._event("response.created", response=begun))
            found.append(self._event("response.in_progress", response=begun))
        self._finish = choice["finish_reason"] or self._finish
        self._calls += choice["delta"].get("tool_calls") or ()
        self._logprobs += choice["logprobs"]["content"] if choice["logprobs"] else []
        if not (new := choice["delta"].get("content")):
            return found
        if not self._text:
            item = self._item("in_progress", [])
            found.append(self._event("response.output_item.added", output_index=0, item=item))
            part = _part("", [])
            found.append(self._event("response.content_part.added", **self._at, part=part))
        self._text += new
        news, self._num_told = self._logprobs[self._num_told :], len(self._logprobs)
        delta = {"delta": new, "logprobs": news}
        found.append(self._event("response.output_text.delta", **self._at, **delta))
        return found

    def behind(self) -> list[Event]:
        found, output, event = [], [], self._event
        incomplete = _INCOMPLETE.get(self._finish)
        status = "incomplete" if incomplete else "completed"
        if self._text:
            told: dict[str, Any] = {"text": self._text, "logprobs": self._logprobs}
            part = _part(**told)
            output.append(self._item(status, [part]))
            found += [
                event("response.output_text.done", **self._at, **told),
                event("response.content_part.done", **self._at, part=part),
                event("response.output_item.done", output_index=0, item=output[0]),
            ]
        for call in self._calls:
            arguments, place = call["function"]["arguments"], {"output_index": len(output)}
            item = {
                "id": f"fc_{call['id']}", "type": "function_call", "status": "completed",
                "call_id": call["id"], "name": call["function"]["name"], "arguments": arguments,
            }  # fmt: skip
            begun = {**item, "status": "in_progress", "arguments": ""}
            at, of = {"item_id": item["id"], **place}, "response.function_call_arguments"
            found += [
                event("response.output_item.added", **place, item=begun),
                event(f"{of}.delta", **at, delta=arguments),
                event(f"{of}.done", **at, arguments=arguments),
                event("response.output_item.done", **place, item=item),
            ]
            output.append(item)
        self.has_large_answer = len(self._logprobs) > LARGE_TOKENS
        ended = self._response(status, output, incomplete, self.usage)
        return [*found, event(f"response.{status}", response=ended)]

    def _event(self, kind: str, **further: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **further}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._at["item_id"], "type": "message", "role": "assistant", "status": status,
            "content": content,
        }  # fmt: skip

    def _response(
        self, status: str, output: list[dict[str, Any]], incomplete: str | None = None,
        used: dict[str, int] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The response. incomplete: why it is; used: its tokens."""
        asked, choice, completion = self._asked, self._asked.tool_choice, self.holding([])
        text = asked.text.model_dump(by_alias=True, exclude_none=True) if asked.text else {}
        return {
            "id": f"resp_{self.context.request_id}", "object": "response",
            "created_at": completion["created"], "status": status, "error": None,
            "incomplete_details": incomplete and {"reason": incomplete},
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
            "metadata": {**(asked.metadata or {}), **completion["metadata"]},
            "model": completion["model"],
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": asked.temperature, "top_p": asked.top_p,
            "top_logprobs": asked.top_logprobs or 0,
            "tool_choice": choice.model_dump() if isinstance(choice, schemas.ResponseToolName)
            else choice or "auto",
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "text": {"format": {"type": "text"}, **text},
            "truncation": "disabled",
            "usage": used and {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            },
        }  # fmt: skip


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def chat_request(body: schemas.ResponseRequest) -> schemas.ChatRequest:
    """Returns the chat completion, streamed, that answers a response's request; 400: none does."""
    asked: dict[str, Any] = {
        **body.model_dump(include={*schemas.DecodingFields.model_fields}),
        "messages": _messages(body), "model": body.model, "stream": True,
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
    }  # fmt: skip
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        asked |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        named = [tool.model_dump(exclude={"type", "strict"}, exclude_none=True)
                 for tool in body.tools]  # fmt: skip
        asked["tools"] = [{"type": "function", "function": each} for each in named]
    choice = body.tool_choice
    if isinstance(choice, schemas.ResponseToolName):
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
        return schemas.ChatRequest.model_validate(asked)
    except ValidationError as error:  # such as an input that says nothing
        errors = [each | {"loc": ("body", *each["loc"])} for each in error.errors()]
        raise field_error(errors, "json", "") from error


def _messages(body: schemas.ResponseRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    for item in body.input:
        if isinstance(item, schemas.MessageItem):
            found.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, schemas.CallItem):
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            found[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, schemas.CallOutputItem):
            content = _text(item.output)
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    return found


def _text(content: str | list[schemas.ResponsePart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
