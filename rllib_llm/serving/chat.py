"""Chats as the model's template writes them."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from rllib_llm.conversations.chat_format import ChatFormat, ChatFormatError
from rllib_llm.conversations.json_values import broken_up, is_json
from rllib_llm.data.image_prompts import with_places
from rllib_llm.serving.images import ImageReader
from rllib_llm.serving.jobs import Limits
from rllib_llm.serving.schemas import (
    ApiError,
    ChatMessage,
    ChatRequest,
    ImagePart,
    TextPart,
    ToolSchema,
    refuse,
)
from rllib_llm.shared.chat_templates import not_variables

_MAX_FORMATS = 64


class Chats:
    """A cache of chat formats by tools and settings of requests. A format in use, as in sessions,
    is never evicted.
    """

    def __init__(self, tokenizer: Any, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._formats: WeakValueDictionary[str, ChatFormat] = WeakValueDictionary()
        self._latest: deque[ChatFormat] = deque(maxlen=_MAX_FORMATS)
        with contextlib.suppress(ApiError):  # a model without a template serves completions
            self.format()  # imports what the first request need not wait for

    def of(self, body: ChatRequest) -> ChatFormat:
        """The chat format of a request."""
        tools = None if body.tool_choice == "none" else body.tools
        return self.format(tools, body.chat_template_kwargs)

    def format(
        self, tools: Sequence[ToolSchema] | None = None, settings: Mapping[str, Any] | None = None
    ) -> ChatFormat:
        """The chat format for these tools; 400 where the model has no chat template, or none that
        can be used, or where a setting is no variable of templates."""
        for name in settings or ():
            param = f"chat_template_kwargs.{name}"
            refuse(name in not_variables(), f"{param} must be left out: the server sets it.", param)
        with refused_by_template("tools" if tools else "messages"):
            specs = [tool.model_dump(exclude_none=True) for tool in tools or ()]
            key = json.dumps([specs, dict(settings or {})], sort_keys=True)
            found = self._formats.get(key)
            if found is None:
                try:
                    every = {**self._settings, **(settings or {})}
                    made = ChatFormat(self._tokenizer, tools=specs, template_settings=every)
                except ChatFormatError as error:
                    message = f"{error} It is the server's chat_template."
                    raise ApiError(400, message, "messages", "no_chat_template") from error
                found = self._formats.setdefault(key, made)  # another thread may have made it
                self._latest.append(found)
        return found


def as_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates take them: text as one string, where there are images parts; arguments
    of calls as objects. 400 where they are nested too deep."""
    found = []
    with refused_by_template():
        for message in messages:
            given = message.model_dump(exclude_none=True)
            if given["role"] == "developer":
                given["role"] = "system"
            parts = message.content if isinstance(message.content, list) else ()
            if any(isinstance(part, ImagePart) for part in parts):
                given["content"] = [
                    {"type": "text", "text": part.text} if isinstance(part, TextPart)
                    else {"type": "image"} for part in parts
                ]  # fmt: skip
            elif isinstance(message.content, list):
                given["content"] = "".join(part["text"] for part in given["content"])
            given.setdefault("content", "")
            for call in given.get("tool_calls", ()):
                function = call["function"]
                function["arguments"] = read_arguments(function.get("arguments"))
            found.append(given)
    return found


def read_arguments(given: Any) -> Any:
    """A call's arguments parsed as JSON, what cannot be read as text, and an empty object where
    there are none, which clients write as null, as "" or not at all."""
    read = given
    if isinstance(given, str):
        try:
            read = json.loads(given.strip() or "null")
        except (ValueError, RecursionError):
            return given
    return {} if read is None else read if is_json(read) else given


def image_urls(messages: Sequence[ChatMessage], field: str = "messages") -> dict[str, str]:
    """The addresses of a chat's images, by the names of their fields; `field`: the chat's."""
    return {
        f"{field}.{i}.content.{k}.image_url.url": part.image_url.url
        for i, message in enumerate(messages)
        for k, part in enumerate(message.content if isinstance(message.content, list) else ())
        if isinstance(part, ImagePart)
    }


def read_prompt(
    chat_format: ChatFormat, messages: Sequence[ChatMessage], limits: Limits, reader: ImageReader,
    *, generation_prompt: bool = True, field: str = "messages",
) -> tuple[list[int], dict[str, Tensor]]:  # fmt: skip
    """Ids of a chat that the assistant is to answer, and what its images show, as the model takes
    it; 400 where the template refuses the messages, or there is too much of them. `field`: the
    chat's name."""
    urls = image_urls(messages, field)
    images = reader.read(urls) if urls else []
    with refused_by_template():
        cleaned = [chat_format.cleaned(message) for message in as_messages(messages)]
        if images:
            cleaned = with_places(broken_up(cleaned, reader.marks), 0)
        text = chat_format.render(cleaned, generation_prompt=generation_prompt, sees=bool(images))
    limits.check_chars(text, "messages")
    return reader.encode(text, images) if images else (chat_format.encode(text), {})


@contextlib.contextmanager
def refused_by_template(field: str = "messages") -> Iterator[None]:
    """Refuses a request, 400, if a chat template fails on it. A template is foreign code and may
    raise anything."""
    try:
        yield
    except ApiError:
        raise
    except Exception as error:
        told = "nested too deep" if isinstance(error, RecursionError) else str(error)[:500]
        message = f"{field} must be what the chat template takes: it failed on them ({told})."
        if isinstance(error, ChatFormatError):
            message = str(error)
        raise ApiError(400, message, field) from error
