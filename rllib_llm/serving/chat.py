"""Chats as the model's template writes them, and their images: data URLs and files of one folder,
read within bounds."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname
from weakref import WeakValueDictionary

from torch import Tensor

from rllib_llm.conversations.chat_format import ChatFormat, ChatFormatError
from rllib_llm.conversations.json_values import is_json
from rllib_llm.data.encoding import broken_up
from rllib_llm.data.image_prompts import ImagePrompts, with_places
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
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.shared.chat_templates import not_variables
from rllib_llm.shared.errors import Problems

_MAX_FORMATS = 64
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # others' readers start programs, or are seldom tested


class ImageReader:
    """Reads images for the processor of the served model. Thread-safe.

    source: of the model, as `load_causal_lm` takes it.
    """

    def __init__(self, settings: ServeSettings, source: str, tokenizer: Any) -> None:
        self._settings, self._lock = settings, threading.Lock()
        self._model = source, tokenizer

    @functools.cached_property
    def _prompts(self) -> ImagePrompts | Problems:
        source, tokenizer = self._model
        try:
            return ImagePrompts(source, tokenizer, tokenizer.chat_template)
        except Problems as error:
            return error

    @property
    def prompts(self) -> ImagePrompts:
        """The model's processor; 400 where it has none."""
        with self._lock:
            found = self._prompts
        if isinstance(found, Problems):
            raise ApiError(400, str(found), "messages", "unsupported_value")
        return found

    @property
    def marks(self) -> list[str]:
        """Texts that stand for an image, which nobody may quote."""
        token = self._model[1].convert_ids_to_tokens(self.prompts.image_token_id)
        return [token, self.prompts.mark]

    def check_number(self, urls: Collection[str]) -> None:
        """Refuses a request with too many images."""
        most = self._settings.max_images
        refuse(len(urls) > most, f"messages must have at most {most} images, not {len(urls)}.",
               "messages", "too_many_images")  # fmt: skip

    def read(self, urls: Mapping[str, str]) -> list[Any]:
        """Images of PIL, by the names of their fields; 400 for one that may not or cannot be
        read."""
        self.check_number(urls)
        assert self.prompts
        return [self._image(name, self._bytes(name, url)) for name, url in urls.items()]

    def _bytes(self, name: str, url: str) -> bytes:
        most, folder = self._settings.max_image_bytes, self._settings.allowed_local_media_path
        kind, _, rest = url.partition(":")
        too_large = f"{name} must be of at most {most} bytes."
        if kind == "data":
            head, _, text = rest.partition(",")
            refuse(not head.endswith(";base64"), f"{name} must be base64, a data URL.", name)
            refuse(len(text) > 4 * (most // 3 + 1), too_large, name, "image_too_large")
            try:
                found = base64.b64decode(text, validate=True)
            except ValueError as error:
                raise ApiError(400, f"{name} must be base64: {error}.", name) from error
            refuse(len(found) > most, too_large, name, "image_too_large")
            return found
        refuse(kind != "file", f"{name} must be a data URL or file://: nothing is fetched from "
               "other addresses.", name, "unsupported_value")  # fmt: skip
        refuse(folder is None, f"{name} must be a data URL: this server reads no files, since it "
               "has no allowed_local_media_path.", name, "unsupported_value")  # fmt: skip
        assert folder is not None
        found = b""
        try:
            parts = urlsplit(url)
            path = Path(url2pathname(parts.path)).resolve()  # links and .. lead nowhere else
            is_below = parts.netloc in ("", "localhost") and path.is_relative_to(folder.resolve())
            if is_below and path.is_file():
                with path.open("rb") as file:
                    found = file.read(most + 1)
        except (OSError, ValueError):
            pass
        refuse(not found, f"{name} must name a file that can be read, below the server's "
               "allowed_local_media_path.", name)  # fmt: skip
        refuse(len(found) > most, too_large, name, "image_too_large")
        return found

    def _image(self, name: str, data: bytes) -> Any:
        from PIL import Image  # few servers need it

        most = self._settings.max_image_pixels
        try:
            found = Image.open(io.BytesIO(data), formats=_FORMATS)
            size = found.width * found.height  # by its head alone: few bytes may be many pixels
            if size <= most:
                return found.convert("RGB")
        except Exception as error:  # readers raise what they like
            message = f"{name} must be a whole image in one of the formats {_FORMATS}."
            raise ApiError(400, message, name) from error
        raise ApiError(400, f"{name} must have at most {most} pixels, not {size}.", name,
                       "image_too_large")  # fmt: skip

    def encode(self, text: str, images: Sequence[Any]) -> tuple[list[int], dict[str, Tensor]]:
        """Token ids of a rendered chat and what it shows; 400 where the processor fails."""
        prompts = self.prompts
        try:
            with self._lock:  # its tokenizer is of one thread
                return prompts.read(text, images, add_special_tokens=False)
        except Exception as error:  # foreign code, and images of any shape
            message = f"messages must be what the model's processor reads: {str(error)[:500]}."
            raise ApiError(400, message, "messages") from error


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
