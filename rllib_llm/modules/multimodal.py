"""Multimodal checkpoints as policies: the decoder that writes text, the parts that see or hear for
it, and the files of their processor.

    Qwen2_5_VLForConditionalGeneration
        model.language_model, lm_head    the text decoder: trained, published, adapted
        model.visual                     vision tower and projector: frozen unless `train_vision`

Every process loads the frozen parts with the model, so that they never travel; exports have them as
they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn
from transformers.utils.hub import cached_file

from rllib_llm.modules.model_source import (
    DOTTED,
    call_dotted,
    is_multimodal,
    load_with_retries,
    model_config,
    source_kind,
)

# Of processors that were saved before there was chat_template.jinja, which tokenizers write.
CHAT_TEMPLATE = "chat_template.json"
_PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    CHAT_TEMPLATE,
)  # fmt: skip
_CLASSIFIER_HEADS = ("score", "classifier", "classification_head")


def text_decoder(model: Any) -> Any:
    """The part of `model` that reads tokens; the model itself where all of it does."""
    return model.get_decoder() if is_multimodal(model) else model


def heads(model: Any) -> list[nn.Module]:
    """The LM head of `model`, or a classifier's whole head."""
    own = (getattr(model, name, None) for name in _CLASSIFIER_HEADS)
    found = (model.get_output_embeddings(), *own)
    return [head for head in found if isinstance(head, nn.Module)]


def other_parts(model: Any) -> list[str]:
    """Names of the largest parts of `model` that hold nothing of its text decoder and heads: towers
    and projectors; [] for a model of text."""
    if not is_multimodal(model):
        return []
    kept = {id(part) for own in (text_decoder(model), *heads(model)) for part in own.modules()}

    def outside(part: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in part.named_children():
            if id(child) not in kept:
                if kept.isdisjoint(map(id, child.modules())):
                    yield prefix + name
                else:
                    yield from outside(child, f"{prefix}{name}.")

    return list(outside(model, ""))


def other_tensors(model: Any) -> dict[str, Tensor]:
    """The parameters and buffers outside the text decoder and heads, by their names in the state of
    `model`."""
    if not is_multimodal(model):
        return {}
    own = (text_decoder(model), *heads(model))
    kept = {id(t) for part in own for t in part.state_dict(keep_vars=True).values()}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if id(tensor) not in kept}


def load_processor(model: str) -> Any:
    """The processor of `model`, a folder, hub id or dotted path; None of a function that returns a
    tokenizer.

    Raises:
        ImportError: it needs a package that is not installed.
    """
    from transformers import AutoProcessor  # few runs need it

    kind, value = source_kind(model)
    if kind == DOTTED:
        reader = call_dotted(value)[1]
        return reader if hasattr(reader, "image_processor") else None
    return load_with_retries(lambda: AutoProcessor.from_pretrained(value), value, kind)


def processor_files(model: str) -> dict[str, bytes]:
    """The files of the processor of a multimodal `model`, a folder, hub id or dotted path, by
    name."""
    kind, value = source_kind(model)

    def read() -> dict[str, bytes]:
        optional = {"_raise_exceptions_for_missing_entries": False}
        paths = {name: cached_file(value, name, **optional) for name in _PROCESSOR_FILES}
        return {name: Path(path).read_bytes() for name, path in paths.items() if path}

    if kind != DOTTED:
        return load_with_retries(read, value, kind)
    processor = load_processor(value)
    with TemporaryDirectory() as value:
        if processor is not None:
            processor.save_pretrained(value)
        return read()


def processor_template(model: str) -> str | None:
    """The chat template of the processor beside `model`, where it is in a file of its own."""
    kind, value = source_kind(model)
    text = None
    if kind != DOTTED and is_multimodal(model_config(value)):
        text = processor_files(value).get(CHAT_TEMPLATE)
    return None if text is None else json.loads(text)["chat_template"]
