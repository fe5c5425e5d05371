"""rllib_llm/Lookup-v0: facts that stand in texts alone, the smallest task with a search.

"kqx?" is asked, and "417" is right because a passage says "kqx: 417". It can only be looked up:
the policy may search in its first turn, and repeat in its second what was found. Everything is
generated:
`build_model` makes the model and its tokenizer, `sft_rows` conversations to start it with.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rllib_llm.conversations.conversation import Conversation
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.settings import declared
from rllib_llm.envs.tools import SearchTool
from rllib_llm.examples.characters import (
    SftTurn,
    chat_tokenizer,
    says_answer,
    sft_conversations,
    small_llama,
)
from rllib_llm.shared.setting import Settings, setting

MODEL = "rllib_llm.examples.lookup.build_model"
_PIECES = ("search", '{"query": "', "Nothing found.")
_CHARACTERS = f"{string.ascii_lowercase}0123456789?: "
_STREAM = 43  # key of the facts' random numbers
_SFT_SEED = 1  # of facts that are in no text of the environment
_NUM_LETTERS, _NUM_DIGITS = 3, 3


class Facts(Settings):
    """The facts that stand in the texts."""

    num_facts: int = setting(500, "the number of facts", least=1, most=26**_NUM_LETTERS)


class Lookup(ConversationEnv):
    """A question, a search, and 1 where the last words are the right number."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "model": MODEL,
        "eval_fraction": 0.1,
        "max_turns": 3,
        **declared(Facts),
    }

    def tools(self) -> Sequence[Any]:
        return [SearchTool(facts(self.settings["num_facts"]), num_results=1)]

    def rows(self) -> Sequence[Mapping[str, Any]]:
        found = facts(self.settings["num_facts"])
        return [{"prompt": f"{key}?", "answer": value} for key, value in found.items()]

    def score(self, conversation: Conversation) -> float:
        return says_answer(conversation)


def facts(num_facts: int = 500, seed: int = 0) -> dict[str, str]:
    """{title: text} of passages such as {"kqx": "417"}, no title twice."""
    generator = torch.Generator().manual_seed(_STREAM + seed)
    titles = torch.randperm(26**_NUM_LETTERS, generator=generator)[:num_facts].tolist()
    values = torch.randint(10**_NUM_DIGITS, (num_facts,), generator=generator).tolist()
    places = ([title // 26**i % 26 for i in range(_NUM_LETTERS)] for title in titles)
    keys = ("".join(map(string.ascii_lowercase.__getitem__, each)) for each in places)
    return {key: str(v).zfill(_NUM_DIGITS) for key, v in zip(keys, values, strict=True)}


def sft_rows(num_rows: int = 8000, call_share: float = 1.0) -> list[dict[str, Any]]:
    """Conversations {"messages", "tools"} about other facts than the environment's, of which
    `call_share` search; the others guess."""
    turns = (
        SftTurn(f"{key}?", {"query": key}, f"{key}: {value}", value)
        for key, value in facts(num_rows, _SFT_SEED).items()
    )
    return sft_conversations(turns, num_rows, call_share, SearchTool({"a": "b"}).schema, _STREAM)


def build_model(
    seed: int = 0, max_len: int = 96, **size: int
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A small Llama with random weights, and its tokenizer; size: see `small_llama`."""
    return small_llama(chat_tokenizer(_CHARACTERS, _PIECES), seed, max_len=max_len, **size)

