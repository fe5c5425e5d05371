"""What a policy's files say that an engine of another library has to be told."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from rllib_llm.modules.model_source import DOTTED, build_from_dotted, source_kind
from rllib_llm.modules.tokenizer import eos_token_ids, load_generation_config


def policy_eos_ids(model: str, tokenizer: Any) -> tuple[int, ...]:
    """Every EOS id of a policy, as our own decode loop takes them from the loaded model: those of
    its config, its generation config and its tokenizer.

    Args:
        model: folder, hub id or dotted path.
        tokenizer: the policy's.
    """
    kind, value = source_kind(model)
    if kind == DOTTED:
        return eos_token_ids(tokenizer, build_from_dotted(value)[0])
    config = AutoConfig.from_pretrained(value)
    return eos_token_ids(tokenizer, config, load_generation_config(model))
