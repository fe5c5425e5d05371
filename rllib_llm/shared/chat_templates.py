"""Names that chat templates' variables cannot have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from rllib_llm.shared.errors import Problems, require

# Of `encoding.apply_template`, and of what renders turns.
OURS = ("tokenizer", "messages", "tools", "refused", "generation_prompt")


@functools.cache
def not_variables() -> frozenset[str]:
    """Names that no variable of a template may have: they are its caller's."""
    from transformers import PreTrainedTokenizerBase

    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset({*taken, *OURS})


def check_variables(
    name: str, variables: Mapping[str, Any], kind: type[Problems] = Problems
) -> None:
    """Raises an error of the class `kind` where `variables`, which the setting `name` gives, hold
    another argument than variables of a template."""
    taken = sorted(not_variables() & variables.keys())
    require(not taken, name, dict(variables), "hold variables of the chat template alone",
            f"{taken} are set by its caller", kind=kind)  # fmt: skip
