"""rllib_llm/Arithmetic-v0: sums with verified answers, the smallest real environment.

The prompt is "12+7=", the right completion "19" and the end. Everything is generated, so nothing is
downloaded: `build_model` makes a character-level model and tokenizer, `sft_texts` the texts to
start it with.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rllib_llm.data.rows import MadeRows
from rllib_llm.envs.bandit import BanditEnv
from rllib_llm.envs.prompts import PromptSource
from rllib_llm.envs.rlhf import COMMON_DEFAULTS, build_bandit, policy_tokenizer, with_defaults
from rllib_llm.envs.settings import check_values, declared
from rllib_llm.examples.characters import character_tokenizer, small_llama
from rllib_llm.modules.tokenizer import eos_token_ids
from rllib_llm.shared.errors import require
from rllib_llm.shared.setting import Settings, setting

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MODEL = "rllib_llm.examples.arithmetic.build_model"


class ArithmeticSums(Settings):
    """How hard the problems are, and what they are worth."""

    digits: int = setting(1, "the length of each number, which says how hard", least=1, most=9)
    operations: str = setting("+", "any of '+', '-' and '*', as one text")
    num_problems: int = setting(10_000, "the size of the data set, at most all there are", least=1)
    correct_weight: float = setting(1.0, "the weight of the right answer")
    format_weight: float = setting(0.1, "the weight of the right form")


DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    **declared(ArithmeticSums),
    "model": MODEL,
    "eval_fraction": 0.1,
    "max_prompt_len": 16,
    "max_completion_len": 8,
}
_SPECIAL = ("<pad>", "<eos>", "<unk>")
_CHARACTERS = "0123456789+-*= "
_INTEGER = re.compile(r"-?\d+")


def create(env_config: Mapping[str, Any]) -> BanditEnv:
    """The environment; its keys and their defaults are `DEFAULTS`.

    Rewards: "correct" (1 where the first integer of the completion is the answer) and "format" (1
    where the completion is one integer and the end, nothing else).
    """
    settings = with_defaults(env_config, DEFAULTS)
    chosen = {name: settings[name] for name in ("digits", "operations", "num_problems")}
    problems = ArithmeticProblems(**chosen)
    tokenizer = policy_tokenizer(settings)
    return build_bandit(
        settings, tokenizer=tokenizer, prompts=problems, prompt_column="prompt",
        rewards=[
            {"function": correct, "weight": settings["correct_weight"]},
            {"function": answer_format, "name": "format", "weight": settings["format_weight"],
             "kwargs": {"stop_token_ids": eos_token_ids(tokenizer)}},
        ],
    )  # fmt: skip


def correct(completions: Sequence[str], answer: Sequence[int]) -> list[float]:
    """1.0 for each completion whose first integer is the answer, else 0.0."""
    found = (_INTEGER.search(completion) for completion in completions)
    return [
        float(match is not None and int(match.group()) == int(right))  # text in CSV files
        for match, right in zip(found, answer, strict=True)
    ]


def answer_format(
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    stop_token_ids: Sequence[int],
) -> list[float]:
    """1.0 for each completion that is one integer and then a stop token, else 0.0."""
    return [
        float(_INTEGER.fullmatch(text.strip()) is not None and ids[-1] in stop_token_ids)
        for text, ids in zip(completions, completion_ids, strict=True)
    ]


class ArithmeticProblems(MadeRows):
    """Problems {"prompt": "3+4=", "answer": 7}, each a pure function of its index, none twice.

    There are len(operations) * 100**digits problems; index i is the problem numbered
    (stride * i) mod that number, the stride coprime to it, which visits each once and mixes sizes
    and operations however few are taken.
    """

    column_names = ("prompt", "answer")

    def __init__(self, digits: int = 1, operations: str = "+", num_problems: int = 10_000) -> None:
        check_values(DEFAULTS, digits=digits, operations=operations, num_problems=num_problems)
        is_known = set(operations) <= set(OPERATIONS)
        require(is_known, "operations", operations, "be of '+-*', as one text", "", "")
        self._limit = 10**digits
        self._operations = "".join(dict.fromkeys(operations))
        self._total = len(self._operations) * self._limit**2
        super().__init__(min(num_problems, self._total))
        golden = max(1, round(self._total * (math.sqrt(5) - 1) / 2))
        self._stride = next(n for n in itertools.count(golden) if math.gcd(n, self._total) == 1)

    def make(self, index: int) -> dict[str, Any]:
        """The problem at `index`."""
        number = index * self._stride % self._total
        number, second = divmod(number, self._limit)
        place, first = divmod(number, self._limit)
        sign = self._operations[place]
        return {"prompt": f"{first}{sign}{second}=", "answer": OPERATIONS[sign](first, second)}


def sft_texts(
    digits: int = 1, operations: str = "+", num_problems: int = 10_000, split: str = "train",
    eval_fraction: float = 0.1, split_seed: int = 0,
) -> list[dict[str, str]]:  # fmt: skip
    """Rows {"prompt", "completion"} of solved problems, the environment's held-out ones apart."""
    source = PromptSource(
        ArithmeticProblems(digits, operations, num_problems), shuffle=False, prompt_column="prompt",
        split=split, eval_fraction=eval_fraction, split_seed=split_seed,
    )  # fmt: skip
    return [
        {"prompt": row.prompt, "completion": str(row.columns["answer"])}
        for row in source.rows(0, len(source))
    ]


def build_model(
    seed: int = 0, max_len: int = 64, **size: int
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A small random Llama and its character-level tokenizer; size: see `small_llama`."""
    return small_llama(build_tokenizer(), seed, max_len=max_len, **size)


def build_large_model(seed: int = 1) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A Llama of 1.3 million parameters with the tokenizer of `build_model`: a teacher."""
    return build_model(seed, hidden_size=160, num_layers=4, num_heads=4)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character of the problems, pad, EOS and unknown apart."""
    return character_tokenizer(_CHARACTERS, special=_SPECIAL)
