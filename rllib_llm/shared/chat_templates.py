"""Names that chat templates' variables cannot have."""

from __future__ import annotations

import functools
import inspect

# Of `encoding.apply_template`, and of what renders turns.
OURS = ("tokenizer", "messages", "tools", "refused", "generation_prompt")


@functools.cache
def not_variables() -> frozenset[str]:
    """Names that no variable of a template may have: they are its caller's."""
    from transformers import PreTrainedTokenizerBase

    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset({*taken, *OURS})
