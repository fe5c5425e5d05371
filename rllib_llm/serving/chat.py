"""Chats as the model's template writes them, and the model's turns read back."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rllib_llm.conversations.chat_format import ChatFormat, ChatFormatError
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.schemas import Message, Tool

_MAX_FORMATS = 64


class Chats:
    """Chat formats by the tools and settings that requests bring.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._formats: OrderedDict[str, ChatFormat] = OrderedDict()

    def format(
        self, tools: Sequence[Tool] | None = None, settings: Mapping[str, Any] | None = None
    ) -> ChatFormat:
        """The chat format for these tools.

        Raises:
            ApiError: 400, the model has no chat template, or none that can be used.
        """
        specs = [tool.model_dump(exclude_none=True) for tool in tools or ()]
        key = json.dumps([specs, dict(settings or {})], sort_keys=True)
        found = self._formats.get(key)
        if found is None:
            try:
                found = ChatFormat(self._tokenizer, tools=specs, template_settings=settings)
            except ChatFormatError as error:
                raise ApiError(
                    400, str(error), param="messages", code="no_chat_template"
                ) from error
            except (TypeError, ValueError) as error:  # of the template, about its variables
                raise _refused(error) from error
            self._formats[key] = found
        self._formats.move_to_end(key)
        while len(self._formats) > _MAX_FORMATS:
            self._formats.popitem(last=False)
        return found


def as_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates take them: text as one string, arguments of calls as objects."""
    return [_as_message(message) for message in messages]


def _as_message(message: Message) -> dict[str, Any]:
    given = message.model_dump(exclude_none=True)
    if given["role"] == "developer":
        given["role"] = "system"
    content = message.content
    if isinstance(content, list):
        given["content"] = "".join(part.text for part in content)
    given.setdefault("content", "")
    for call in given.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                continue  # the template writes the text
    return given


def prompt_ids(chat_format: ChatFormat, messages: Sequence[Message]) -> list[int]:
    """Ids of a chat that the assistant is to answer.

    Raises:
        ApiError: 400, the template refuses the messages.
    """
    cleaned = [chat_format.cleaned(message) for message in as_messages(messages)]
    with refused_by_template():
        return chat_format.prompt_ids(cleaned)


@contextlib.contextmanager
def refused_by_template() -> Iterator[None]:
    """Raises ApiError, 400, where a chat template fails on what a request has."""
    try:
        yield
    except ChatFormatError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _refused(error) from error


def _refused(error: Exception) -> ApiError:
    return ApiError(
        400,
        f"messages must be what the chat template takes: it failed on them ({error}).",
        param="messages",
        code="invalid_value",
    )


def assistant_message(
    chat_format: ChatFormat,
    token_ids: Sequence[int],
    prompt: Sequence[int],
    finish_reason: str | None,
) -> tuple[dict[str, Any], str | None]:
    """A sampled turn as OpenAI's message, and why it ended: a call that is cut off, or that cannot
    be read, is text and not a call."""
    reply = chat_format.parse(token_ids, finish=finish_reason or "length", prompt_ids=prompt)
    whole = [c for c in reply.tool_calls if c.status in ("ok", "unknown_tool")]
    broken = [c.raw for c in reply.tool_calls if c.status not in ("ok", "unknown_tool")]
    content = "\n".join(filter(None, [reply.content, *broken]))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if whole:
        message["content"] = content or None
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{i}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for i, call in enumerate(whole)
        ]
        if finish_reason == "stop":
            return message, "tool_calls"
    return message, finish_reason
