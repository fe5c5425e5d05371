"""The tokenizer of a model: loaded, with a pad token, and checked against the embedding."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils.chat_template_utils import render_jinja_template

from rllib_llm.modules.model_source import (
    DOTTED,
    FOLDER,
    build_from_dotted,
    load_with_retries,
    model_config,
    no_model,
    source_kind,
    text_config,
)
from rllib_llm.modules.multimodal import processor_template
from rllib_llm.shared.chat_templates import check_variables
from rllib_llm.shared.errors import report, require, warning


def load_tokenizer(
    model: str | os.PathLike, *, chat_template: str | None = None,
    template_settings: Mapping[str, Any] | None = None,
) -> PreTrainedTokenizerBase:  # fmt: skip
    """Returns the tokenizer of `model` (folder, hub id or dotted path), with a pad token.

    See `ensure_pad_token` for a missing pad token and one that is EOS too, and
    `with_chat_template` for its chat template.

    Raises:
        Problems: nothing can be loaded from `model`.
        ValueError: the tokenizer has ids for which the model has no embedding.
    """
    kind, value = source_kind(model)
    if kind == DOTTED:
        network, tokenizer = build_from_dotted(value)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            got = type(tokenizer).__name__
            raise no_model(value, f"the function returned a {got}, no transformers tokenizer")
        sources: tuple[Any, ...] = (network, tokenizer)
        num_embeddings = len(network.get_input_embeddings().weight)
    else:
        config = model_config(value)
        tokenizer = load_with_retries(lambda: AutoTokenizer.from_pretrained(value), value, kind)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = processor_template(value)
        sources = (config, tokenizer, load_generation_config(value))
        num_embeddings = text_config(config).vocab_size
    largest = max(tokenizer.get_vocab().values(), default=-1)
    require(
        largest < num_embeddings, "the tokenizer's largest id", largest,
        f"be below {num_embeddings}, the rows of the model's embedding", "",
        "Call model.resize_token_embeddings(len(tokenizer)) and save the model again",
    )  # fmt: skip
    ensure_pad_token(tokenizer, eos_token_ids(*sources))
    return with_chat_template(tokenizer, chat_template, template_settings)


def with_chat_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None,
    template_settings: Mapping[str, Any] | None,
) -> PreTrainedTokenizerBase:  # fmt: skip
    """The tokenizer, or a copy of it with the chat template that `chat_template` is or names, and
    with `template_settings` as values of the template's variables, where nobody gives others. They
    are written into the template, so that all who render it find them, and they are saved with it.

    Raises:
        Problems: no template, or a setting that is no variable of templates.
    """
    if chat_template is None and not template_settings:
        return tokenizer
    tokenizer = copy.copy(tokenizer)
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    given = tokenizer.chat_template or ""
    templates = given if isinstance(given, dict) else {"": given}
    settings = dict(template_settings or {})
    everything = "".join(templates.values())
    check_variables("template_settings", settings)
    if idle := [each for each in settings if each not in everything]:
        rule, reason = "hold variables of the chat template alone", f"it does not name {idle}"
        report([warning("template_settings", rule, reason, "Leave them out", settings)])
    values = "".join(
        f"{{% if {each} is not defined %}}{{% set {each} = {value!r} %}}{{% endif %}}"
        for each, value in settings.items()
    )
    if values and everything:
        # The line break is not rendered: the template begins a line as before.
        made = {each: f"{values}\n{text}" for each, text in templates.items()}
        tokenizer.chat_template = made if isinstance(given, dict) else made[""]
    return tokenizer


def read_chat_template(given: str) -> str:
    """The text of a chat template (Jinja): `given` itself, or the contents of the file it names.

    Raises:
        ValueError: there is no such file, or no valid Jinja in it.
    """
    text, found = given, ""
    if "{%" not in given and "{{" not in given:
        file = Path(given).expanduser()
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if "{%" not in text and "{{" not in text:
            found = "it holds no Jinja" if file.is_file() else "there is no such file"
    try:
        render_jinja_template([], chat_template=text)
    except TemplateSyntaxError as error:
        found = f"line {error.lineno}: {error.message}"
    require(not found, "chat_template", given, "be a Jinja template or its file", found)
    return text


def load_generation_config(model: str | os.PathLike) -> GenerationConfig | None:
    """Loads the generation settings stored with `model`, or returns None."""
    kind, value = source_kind(model)
    if kind == DOTTED:
        return getattr(build_from_dotted(value)[0], "generation_config", None)
    if kind == FOLDER and not os.path.exists(os.path.join(value, "generation_config.json")):
        return None
    try:
        return GenerationConfig.from_pretrained(value)
    except OSError:
        # A hub id whose config was just found: the file is optional there.
        if kind == FOLDER:
            raise
        return None


def eos_token_ids(*sources: Any) -> tuple[int, ...]:
    """Returns every end-of-sequence id that `sources` name, ascending; () where there is none.

    sources: models, configs, generation configs and tokenizers; None is skipped. A generation
    config may list several ids, as chat models do.
    """
    found: set[int] = set()
    for source in sources:
        config = source if isinstance(source, PreTrainedConfig) else getattr(source, "config", None)
        text = config and text_config(config)
        for holder in (source, config, text, getattr(source, "generation_config", None)):
            ids = getattr(holder, "eos_token_id", None)
            if ids is None:
                continue
            found.update([ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


def policy_eos_ids(model: str, tokenizer: Any) -> tuple[int, ...]:
    """Every EOS id of a policy, as our own decode loop takes them from the loaded model: those of
    its config, its generation config and its tokenizer."""
    kind, value = source_kind(model)
    if kind == DOTTED:
        return eos_token_ids(tokenizer, build_from_dotted(value)[0])
    return eos_token_ids(tokenizer, model_config(model), load_generation_config(model))


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase, eos_ids: tuple[int, ...] = ()) -> None:
    """Sets a pad token of `tokenizer` that is none of `eos_ids`, without growing the vocabulary.

    Pad ids are only filler here: masks say which tokens count, so any id that the embedding knows
    will do, and EOS inside a mask is learned whatever the pad token is. A distinct one is chosen
    all the same for tools that compare ids: a token named after padding, a reserved one, the
    unknown token, the beginning-of-sequence token. Where there is none of them EOS stays.
    """
    ends = set(eos_ids) | set(eos_token_ids(tokenizer))
    if tokenizer.pad_token is not None and tokenizer.pad_token_id not in ends:
        return
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    vocabulary = tokenizer.get_vocab()
    plain = [name for name in ("<pad>", "[PAD]", "<|pad|>") if name in vocabulary]
    named = [name for name in special if "pad" in name.lower()]
    reserved = [name for name in special if "reserved" in name or "unused" in name]
    candidates = [*plain, *named, *reserved, tokenizer.unk_token, tokenizer.bos_token]
    choice = next((c for c in candidates if c in vocabulary and vocabulary[c] not in ends), None)
    require(choice is not None or tokenizer.eos_token is not None, "tokenizer.pad_token", None,
            "be a token", "the vocabulary has no pad, reserved, unknown, BOS or EOS token",
            "Set it and save again")  # fmt: skip
    tokenizer.pad_token = choice or tokenizer.eos_token
