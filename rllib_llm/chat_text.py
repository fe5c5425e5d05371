"""A chat as the text that its template writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    generation_prompt: bool = False,
    refused: type[ValueError] = ValueError,
    **settings: Any,
) -> str:
    """The messages as the tokenizer's chat template writes them.

    Args:
        tokenizer: with a chat template.
        messages: in order.
        tools: JSON schemas that the template is to announce.
        generation_prompt: whether what begins the assistant's turn stands at the end.
        refused: the class of the error.
        settings: further variables of the template.

    Raises:
        ValueError: of the class `refused`: the template refuses the messages.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tools=list(tools) if tools else None,
            tokenize=False, add_generation_prompt=generation_prompt, **settings,
        )  # fmt: skip
    except TemplateError as error:
        roles = [message.get("role") for message in messages]
        raise refused(
            f"messages with the roles {roles} must be what the chat template takes: it refuses "
            f"them ({error}). Correct the messages, or set chat_template to one that takes them."
        ) from error
    return str(rendered)
