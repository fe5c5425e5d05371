"""Rows of a data set that show images: found, and made into tokens and pixels by the processor of a
multimodal model, as TRL reads them.

A row has its images in a column `image` or `images`, or in the parts of its messages:

    {"image": "cat.png", "prompt": "What is this?", "completion": "A cat."}
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                               {"type": "text", "text": "What is this?"}]}, ...]}

Where neither text nor messages say where an image stands, it stands before the first words of the
user.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rllib_llm.data.encoding import as_turns, encode_text, is_message
from rllib_llm.modules.images import image_bytes, image_token_id, packed_files, read_image
from rllib_llm.shared.errors import Problems, require

COLUMNS = ("image", "images")
_NOT_IMAGES = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
_REMEMBERED_BYTES = 2**29
Messages = list[dict[str, Any]]


def images_of_row(row: Mapping[str, Any]) -> list[Any]:
    """The images of a row as they are written, in their order; [] of a row of text."""
    given = [image for name in COLUMNS for image in _listed(row.get(name))]
    chats = [row.get(name) for name in ("messages", "prompt")]
    chats += [row.get("chosen")] if not isinstance(chats[1], list) else []
    turns = [turn for chat in chats if isinstance(chat, list) for turn in chat if is_message(turn)]
    return given or [part.get("image") for turn in turns for part in _image_parts(turn)]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _image_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


class ImagePrompts:
    """The processor of a multimodal model.

    Args:
        model: folder or hub id; None is refused.
        chat_template: in the place of the processor's own.

    Raises:
        Problems: no model, or one that reads text alone, or its processor cannot be loaded.
    """

    def __init__(
        self, model: str | None, tokenizer: Any, chat_template: str | None = None
    ) -> None:
        # Here, since few runs need them, and configs load nothing heavy.
        from rllib_llm.modules.model_source import is_multimodal, model_config
        from rllib_llm.modules.multimodal import load_processor

        if model is None:
            raise Problems("image", "be left out here", "no model reads it", "Drop or rename it")
        config = model_config(model)
        require(is_multimodal(config), "image", ..., "be left out for this model",
                f"model={model!r} reads text alone", "Name a model that sees")  # fmt: skip
        try:
            self._processor = load_processor(model)
        except ImportError as error:
            needed = str(error).strip().splitlines()[0]
            raise Problems("image", "have what its processor needs", needed,
                           "Run pip install torchvision pillow") from error  # fmt: skip
        require(self._processor is not None, "model", model, "return a processor with the model",
                "its function returns a tokenizer alone", "")  # fmt: skip
        self._tokenizer, self._chat_template = tokenizer, chat_template
        self.image_token_id = image_token_id(config)
        self._remembered: dict[Any, tuple[str, list[int], dict[str, Tensor]]] = {}
        self._lock = threading.Lock()

    def prompt(
        self, prompt: str | Messages, images: Sequence[Any], key: Hashable | None = None
    ) -> tuple[list[int], dict[str, Tensor], str]:
        """Token ids of a prompt, text or a chat that the assistant continues, with those of its
        images; what the model sees of them; and the text that was read. `key`: see `read`."""
        if isinstance(prompt, str):
            text = prompt if self.mark in prompt else self.mark * len(images) + prompt
            return (*self.read(text, images, key, add_special_tokens=True), text)
        text = self._render(with_places(prompt, len(images)), add_generation_prompt=True)
        return (*self.read(text, images, key, add_special_tokens=False), text)

    def files(self, prompt: str | Messages, text: str, images: Sequence[Any]) -> dict[str, Tensor]:
        """The files of a prompt's images, and the tokens of its text before they have become any;
        see `images.packed_files`."""
        unread = self._tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
        return packed_files([*map(image_bytes, images)], unread)

    def example(
        self, row: Mapping[str, Any], key: Hashable | None = None
    ) -> tuple[list[int], list[bool], dict[str, Tensor]]:
        """Token ids of a row to learn from, which of them its answer has, and what it shows. Of a
        conversation the last turn is the answer. `key`: see `read`.

        Raises:
            Problems: it has none, or a template that does not write it after the prompt.
        """
        images, eos = images_of_row(row), self._tokenizer.eos_token_id
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            ids, seen, _ = self.prompt(prompt, images, key)
            said = [*self._tokenizer(completion, add_special_tokens=False)["input_ids"], eos]
            return ids + said, [False] * len(ids) + [True] * len(said), seen
        given = row.get("messages")
        turns = as_turns(None, given)[0] if given is not None else as_turns(prompt, completion)[0]
        require(turns and turns[-1]["role"] == "assistant", "messages", ...,
                "end with a turn of 'assistant' to learn from", "")  # fmt: skip
        ids, seen, before = self.prompt(turns[:-1], images, key)
        whole = self._render(with_places(turns, len(images)))
        require(whole.startswith(before), "chat_template", ..., "write an answer after its prompt",
                "it writes another text before the answer than without it")  # fmt: skip
        said = encode_text(self._tokenizer, whole[len(before) :].rstrip("\n"))
        bos = self._tokenizer.bos_token_id
        said = said[1:] if bos is not None and said[:1] == [bos] else said
        said += [] if eos in said[-1:] else [eos]
        return ids + said, [False] * len(ids) + [True] * len(said), seen

    @property
    def mark(self) -> str:
        """The text that stands for an image, before the processor makes its tokens of it."""
        return getattr(self._processor, "boi_token", None) or self._processor.image_token

    def _render(self, messages: Messages, **settings: Any) -> str:
        own = self._chat_template or self._processor.chat_template or self._tokenizer.chat_template
        return str(self._processor.apply_chat_template(
            messages, chat_template=own, tokenize=False, **settings
        ))  # fmt: skip

    def read(
        self, text: str, images: Sequence[Any], key: Hashable | None = None, **settings: Any
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Token ids of a text in which images have their places, and what the model sees. What was
        read last is remembered by `key`: a group's completions, and learners, ask again."""
        known = self._remembered.get(key)
        if key is not None and known is not None and known[0] == text:
            return known[1:]
        made = self._processor(
            text=[text], images=[[read_image(image) for image in images]], return_tensors="pt",
            **settings,
        )  # fmt: skip
        seen = {name: tensor for name, tensor in made.items() if name not in _NOT_IMAGES}
        found = made["input_ids"][0].tolist(), seen
        if key is not None:
            with self._lock:  # samplers' threads share it
                self._remembered.pop(key, None)
                self._remembered[key] = (text, *found)
                num_bytes = [sum(t.nbytes for t in each[2].values())
                             for each in self._remembered.values()]  # fmt: skip
                while sum(num_bytes) > _REMEMBERED_BYTES and len(num_bytes) > 1:
                    del self._remembered[next(iter(self._remembered))], num_bytes[0]
        return found

    def seen(self, images: Sequence[Any], key: Hashable) -> dict[str, Tensor]:
        """Tensors that the model sees of images, in whatever text they stand."""
        known = self._remembered.get(key)
        return self.read(self.mark * len(images), images)[1] if known is None else known[2]


def with_places(messages: Sequence[Mapping[str, Any]], num_images: int) -> Messages:
    """Messages whose contents are parts, images among them; without any, they stand before the
    first words of the user."""
    has_places = any(map(_image_parts, messages))
    turns, left = [], 0 if has_places else num_images
    for message in messages:
        content = message.get("content")
        parts = [*content] if isinstance(content, list | tuple) else [
            {"type": "text", "text": "" if content is None else str(content)}
        ]  # fmt: skip
        if left and message["role"] == "user":
            parts, left = [{"type": "image"}] * left + parts, 0
        turns.append({**message, "content": parts})
    return turns


def without_images(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Messages as a model of text reads them."""
    shown = [(message, _image_parts(message)) for message in messages]
    return [{**message, "content": [part for part in message["content"] if part not in images]}
            if images else {**message} for message, images in shown]  # fmt: skip
