"""Environments with word tokenizers for tests, and completions to answer them."""

from __future__ import annotations

import torch

from rllib_llm.envs.bandit import BanditEnv
from rllib_llm.envs.judges.rewards import RewardSum
from rllib_llm.envs.prompts import PromptSource
from tests.envs.tiny_tokenizers import word_tokenizer

PROMPTS = [
    {"prompt": "the cat", "label": 10},
    {"prompt": "a big dog", "label": 20},
    {"prompt": "red", "label": 30},
    {"prompt": "the dog ran", "label": 40},
]


def num_words(completions):
    return [float(len(completion.split())) for completion in completions]


def word_env(**settings) -> BanditEnv:
    """Prompts in the order of `PROMPTS`, judged by the number of words."""
    defaults = {
        "tokenizer": word_tokenizer(),
        "prompts": PromptSource(PROMPTS, shuffle=False),
        "rewards": RewardSum(num_words),
        "num_envs": 2,
        "max_prompt_len": 8,
        "max_completion_len": 6,
    }
    return BanditEnv(**{**defaults, **settings})


def make_word_env(env_config):
    return word_env(**env_config)


def answer(env: BanditEnv, *texts: str, end: bool = True) -> dict[str, torch.Tensor]:
    """Actions of these texts, each ended by EOS unless `end` is False."""
    rows = [
        env.tokenizer(text, add_special_tokens=False)["input_ids"]
        + [env.tokenizer.eos_token_id] * end
        for text in texts
    ]
    longest = max(map(len, rows))
    ids = [row + [env.tokenizer.pad_token_id] * (longest - len(row)) for row in rows]
    mask = [[True] * len(row) + [False] * (longest - len(row)) for row in rows]
    return {"completion_ids": torch.tensor(ids), "completion_mask": torch.tensor(mask)}
