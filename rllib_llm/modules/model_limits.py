"""Context length and size of a model, read without loading its weights."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from rllib_llm.modules.model_source import (
    DOTTED,
    ModelSourceError,
    build_from_dotted,
    load_with_retries,
    source_kind,
)
from rllib_llm.shared.errors import SettingError


def num_embeddings(model: str | os.PathLike) -> int:
    """Rows of the model's embedding, all of which it may sample; often more than tokens."""
    kind, value = source_kind(model)
    if kind == DOTTED:
        network: Any = build_from_dotted(value)[0]
        return network.get_input_embeddings().num_embeddings
    return text_config(model).vocab_size


def num_positions(model: str | os.PathLike) -> int | None:
    """Tokens that the model reads at most, each row whatever the others of its batch are; None
    where its config names no limit."""
    config = text_config(model)
    limits = (getattr(config, "max_position_embeddings", None), longrope_border(config))
    return min((limit for limit in limits if limit is not None), default=None)


def longrope_border(config: Any) -> int | None:
    """Positions up to which longrope keeps to its short factors; None for other embeddings. Beyond
    it one longer row has all rows of its batch rotated by other factors."""
    settings = getattr(config, "rope_parameters", None) or {}
    # One dictionary, or one for each type of layer.
    each = [settings, *(part for part in settings.values() if isinstance(part, dict))]
    borders = [
        part.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for part in each
        if part.get("rope_type") == "longrope"
    ]
    return min((border for border in borders if border is not None), default=None)


def text_config(model: str | os.PathLike) -> Any:
    """The config of what reads text in `model` (folder, hub id or dotted path)."""
    kind, value = source_kind(model)
    if kind == DOTTED:
        network: Any = build_from_dotted(value)[0]
        return network.config.get_text_config(decoder=True)
    config: Any = load_with_retries(lambda: AutoConfig.from_pretrained(value), value, kind)
    return config.get_text_config(decoder=True)


def check_reference_vocabulary(
    reference: str | os.PathLike, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises ValueError where a reference would read an id of the policy's `tokenizer` as another
    token, or has no embedding for it.

    A reference without a tokenizer of its own is asked for the number of its embeddings alone.
    """
    name, remedy = f"reference.model={str(reference)!r}", "Name the model that training starts from"
    vocabulary = tokenizer.get_vocab()
    own = _tokens_by_id(reference)
    for i, token in sorted((i, token) for token, i in vocabulary.items()):
        if own.get(i, token) != token:
            raise SettingError(
                name=name,
                rule="have the vocabulary of the policy",
                reason=f"its token {i} is {own[i]!r}, the policy's {token!r}, and a KL between "
                "them would be of nothing",
                remedy=f"{remedy}, or leave reference out",
            )
    rows, largest = num_embeddings(reference), max(vocabulary.values())
    if largest >= rows:
        raise SettingError(
            name=name,
            rule="have an embedding for each of the policy's tokens",
            reason=f"it has {rows} rows and the policy's largest id is {largest}",
            remedy=f"{remedy}, or leave reference out",
        )


def _tokens_by_id(model: str | os.PathLike) -> dict[int, str]:
    """The token of each id in the model's own tokenizer; {} without one."""
    kind, value = source_kind(model)
    try:
        tokenizer: Any = (
            build_from_dotted(value)[1]
            if kind == DOTTED
            else load_with_retries(lambda: AutoTokenizer.from_pretrained(value), value, kind)
        )
    except ModelSourceError:
        return {}
    return {i: token for token, i in tokenizer.get_vocab().items()}


def check_lengths(
    positions: int | None,
    *,
    max_prompt_len: int,
    max_new_tokens: int,
    model: str = "the model",
    longest_prompt: int | None = None,
) -> None:
    """Raises ValueError where prompt and completion can be longer than `positions`.

    `longest_prompt`: tokens of the longest prompt of the data, where that is known: shorter ones
    need no room for `max_prompt_len`.
    """
    longest = min(max_prompt_len, longest_prompt or max_prompt_len)
    if positions is None or longest + max_new_tokens <= positions:
        return
    told = f"the longest prompt has {longest_prompt} tokens, and " if longest_prompt else ""
    room = positions - max_new_tokens
    if room <= 0:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} must be below {positions}: {told}{model} reads "
            f"{positions} tokens, of prompt and completion together, and none is left for the "
            "prompt. Lower it, or take a model with more positions."
        )
    raise SettingError(
        name="env_config.max_prompt_len",
        value=max_prompt_len,
        rule=f"be at most {room} with max_new_tokens={max_new_tokens}",
        reason=f"{told}{model} reads {positions} tokens, of prompt and completion together",
        remedy=f"Set max_prompt_len: {room}, or take a model with more positions",
    )


class TruncatedWeightsError(SettingError):
    """A safetensors file that ends before its tensors do."""


def num_elements(file: Path) -> int:
    """The number of elements in a safetensors file, from its header.

    Raises:
        TruncatedWeightsError: the file is shorter than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(min(length, size))
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise _truncated(file, size, 8 + length)
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    needed = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
    if size < needed:
        raise _truncated(file, size, needed)
    return sum(math.prod(entry["shape"]) for entry in tensors)


def num_parameters(folder: str | os.PathLike) -> int | None:
    """Parameters of the model in `folder`; None without safetensors files."""
    files = sorted(Path(folder).expanduser().glob("*.safetensors"))
    return sum(num_elements(file) for file in files) if files else None


def _truncated(file: Path, size: int, needed: int) -> TruncatedWeightsError:
    return TruncatedWeightsError(
        name="truncated",
        value=str(file),
        rule=f"have at least {needed} bytes, as its header says",
        reason=f"it has {size}",
        remedy="Copy it again",
    )
