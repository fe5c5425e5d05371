"""A small random Llama that reads and writes any ASCII text, letter by letter."""

from __future__ import annotations

import string

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rllib_llm.examples.characters import character_tokenizer, small_llama

_SPECIAL = ("<pad>", "<eos>", "<unk>")
_CHARACTERS = f"{string.digits}{string.ascii_letters}{string.punctuation} "


def build_model(
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    max_len: int = 256,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model with weights drawn with `seed`, and its tokenizer."""
    tokenizer = character_tokenizer(_CHARACTERS, special=_SPECIAL)
    model = small_llama(
        tokenizer, seed, hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads,
        max_len=max_len,
    )  # fmt: skip
    return model, tokenizer
