"""A chat as the text that its template writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

# A template is a program: beside its own complaints it raises what Python raises.
_TEMPLATES_RAISE = (
    TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError
)  # fmt: skip


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
            [_as_templates_take(message) for message in messages],
            tools=list(tools) if tools else None, tokenize=False,
            add_generation_prompt=generation_prompt, **settings,
        )  # fmt: skip
    except _TEMPLATES_RAISE as error:
        roles = [message.get("role") for message in messages]
        raise refused(
            f"messages with the roles {roles} must be what the chat template takes: it refuses "
            f"them ({_told(error)}). Correct the messages, or set chat_template to one that takes "
            "them."
        ) from error
    return str(rendered)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"


def _as_templates_take(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, the arguments of its tool calls as objects: OpenAI writes them as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
