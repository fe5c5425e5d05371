"""Building blocks of the example models: a character tokenizer and a small random Llama."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rllib_llm.conversations.conversation import Conversation
from rllib_llm.data.rows import permuted

END = "<|end|>"
CHAT_SPECIAL = ("<pad>", END, "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL_PIECES = ("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": ', '"}}', "Error: ")
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t.function.name }}{% endfor %}<|end|>"
    "{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def character_tokenizer(
    characters: str, *, special: Sequence[str], pieces: Sequence[str] = (), **settings: Any
) -> PreTrainedTokenizerFast:
    """One token for each character and each piece.

    special: pad, EOS and unknown, then further ones. settings: further arguments of the tokenizer.
    """
    vocabulary = {token: i for i, token in enumerate([*special, *pieces, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=special[2]))
    pattern = "|".join([*(re.escape(piece) for piece in pieces), "."])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=special[0], eos_token=special[1],
        unk_token=special[2], **settings,
    )  # fmt: skip


def chat_tokenizer(characters: str, pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose chat template supports tools, with one token for each part of a call."""
    return character_tokenizer(
        characters, special=CHAT_SPECIAL, pieces=[*CALL_PIECES, *pieces],
        additional_special_tokens=list(CHAT_SPECIAL[3:]), chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def small_llama(
    tokenizer: PreTrainedTokenizerFast,
    seed: int = 0,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    max_len: int,
    **config: Any,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A Llama with random weights, drawn with `seed`, and its tokenizer; the global random state is
    kept. config: further fields of `LlamaConfig`."""
    fields = {
        "vocab_size": len(tokenizer), "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size, "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads, "max_position_embeddings": max_len,
        "tie_word_embeddings": True, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**fields, **config})).eval(), tokenizer


class SftTurn(NamedTuple):
    """A question, the arguments of the tool call that answers it, its result, and the final
    reply."""

    question: str
    arguments: dict[str, str]
    result: str
    reply: str


def sft_conversations(
    turns: Iterable[SftTurn], num_rows: int, call_share: float, schema: Mapping[str, Any], seed: int
) -> list[dict[str, Any]]:
    """Conversations {"messages", "tools"}. A share `call_share` of them, drawn with `seed`, calls
    the tool; the others answer directly."""
    tool, call_id = schema["function"]["name"], "call00000"
    order = permuted(np.arange(num_rows), num_rows, seed, 1).tolist()
    rows = []
    for place, turn in zip(order, turns, strict=True):
        function = {"name": tool, "arguments": turn.arguments}
        call = {"type": "function", "id": call_id, "function": function}
        used = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": tool, "tool_call_id": call_id, "content": turn.result},
        ]
        messages = [
            {"role": "user", "content": turn.question},
            *(used if place < call_share * num_rows else ()),
            {"role": "assistant", "content": turn.reply},
        ]
        rows.append({"messages": messages, "tools": [schema]})
    return rows


def says_answer(conversation: Conversation) -> float:
    """1 where the last words are the task's answer, else 0."""
    assert conversation.reply is not None, "the policy has answered"
    return float(conversation.reply.content.strip() == conversation.task["answer"])


_SPECIAL = ("<pad>", "<eos>", "<unk>")
_CHARACTERS = f"{string.digits}{string.ascii_letters}{string.punctuation} "


def build_model(
    seed: int = 0, max_len: int = 256, **size: int
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model and its tokenizer; size: see `small_llama`."""
    tokenizer = character_tokenizer(_CHARACTERS, special=_SPECIAL)
    return small_llama(tokenizer, seed, max_len=max_len, **size)
