"""Images of requests: data URLs and files of one folder, read within bounds."""

from __future__ import annotations

import base64
import functools
import io
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from torch import Tensor

from rllib_llm.data.image_prompts import ImagePrompts
from rllib_llm.serving.schemas import ApiError, refuse
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.shared.errors import Problems

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
