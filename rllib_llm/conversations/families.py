"""What the package `renderers` knows of a model family: how a conversation goes on behind a turn.

A renderer appends to the very tokens that were sampled and needs no rendering of what was there.
Where it does not know the way (a template that drops old thoughts) it says so, and the template
decides.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

AUTO = "auto"


def family_renderer(
    tokenizer: Any, family: str | None, settings: Mapping[str, Any]
) -> tuple[Any, str]:
    """The renderer of a model family and its name; (None, why not) where there is none.

    Args:
        tokenizer: of the model; "auto" knows it by the hub id that it was loaded from.
        family: "auto", None, or a name such as "qwen3" or "llama-3".
        settings: variables of the chat template.

    Raises:
        ImportError: a family is named, and renderers is not installed.
        ValueError: renderers does not know the family.
    """
    if family is None:
        return None, "none is wanted"
    if importlib.util.find_spec("renderers") is None:
        if family == AUTO:
            return None, "the package renderers is not installed"
        raise ImportError(
            f"renderer={family!r} must find the package renderers: it is not installed. Install "
            "it: pip install 'rllib-llm[renderers]'."
        )
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    known = MODEL_RENDERER_MAP.get(str(tokenizer.name_or_path)) if family == AUTO else family
    if known is None:
        return None, f"renderers knows no family of {str(tokenizer.name_or_path)!r}"
    try:
        config = config_from_name(known)
        return create_renderer(tokenizer, config, chat_template_kwargs=settings or None), known
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        if family == AUTO:
            return None, f"{known} does not suit the tokenizer: {error}"
        raise ValueError(
            f"renderer={family!r} must suit the tokenizer and template_settings="
            f"{dict(settings)!r}: {error}. Name another family, or None."
        ) from error


def bridged(
    renderer: Any,
    prompt_ids: Sequence[int],
    sampled_ids: Sequence[int],
    new: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> list[int] | None:
    """Ids to append behind a sampled turn, up to the next generation prompt; None where the
    renderer does not know them, or would change what was sampled."""
    specs = [tool["function"] for tool in tools] or None
    found = renderer.bridge_to_next_turn(
        list(prompt_ids), list(sampled_ids), [dict(message) for message in new], tools=specs
    )
    held = [*prompt_ids, *sampled_ids]
    if found is None or list(found.token_ids[: len(held)]) != held:
        return None
    return [int(token) for token in found.token_ids[len(held) :]]
