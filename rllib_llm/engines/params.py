"""What to sample: the settings of one generation, checked where they enter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one generation.

    Order of operations on the logits, as in transformers.generate: stop tokens are forbidden below
    `min_new_tokens`, then temperature, then top-k, then top-p. The log-probs handed back see only
    the temperature.

    Raises:
        ValueError: a value outside its range, or stop tokens given twice.
    """

    pad_token_id: int
    """Fills completions behind their end."""
    stop_token_ids: tuple[int, ...] = ()
    """Each of these ends a completion and belongs to it."""
    max_new_tokens: int = 64
    """Longest completion, tokens, >= 1."""
    min_new_tokens: int = 0
    """No stop token before this many tokens have been sampled, 0 .. max_new_tokens."""
    temperature: float = 1.0
    """Logits are divided by it, > 0. For the limit 0 use `greedy`."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 switches it off."""
    top_p: float = 1.0
    """Sample from the smallest set of likeliest tokens holding this mass, in (0, 1]."""
    greedy: bool = False
    """Take the likeliest token; top_k and top_p then have no effect."""
    top_logprobs: int = 0
    """So many of the likeliest tokens are told beside each that is sampled, >= 0."""

    @property
    def drawn_by(self) -> dict[str, Any]:
        """temperature, top_p and top_k as other engines take them: a temperature of 0 is greedy."""
        if self.greedy:
            return {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        _require(
            self.max_new_tokens >= 1,
            "max_new_tokens",
            self.max_new_tokens,
            "at least 1: a completion without tokens cannot be judged or learnt from",
            "Set the longest completion you want",
        )
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            f"within 0 and max_new_tokens={self.max_new_tokens}: more can never be sampled",
            "Lower min_new_tokens or raise max_new_tokens",
        )
        _require(
            math.isfinite(self.temperature) and self.temperature > 0,
            "temperature",
            self.temperature,
            "a finite number above 0: logits are divided by it",
            "Use greedy=True for the limit of temperature 0",
        )
        _require(
            self.top_k >= 0,
            "top_k",
            self.top_k,
            "0 or more: it counts the tokens that stay",
            "Use 0 to switch it off",
        )
        _require(
            0.0 < self.top_p <= 1.0,
            "top_p",
            self.top_p,
            "above 0 and at most 1: it is a probability mass",
            "Use 1.0 to switch it off",
        )
        _require(
            self.top_logprobs >= 0,
            "top_logprobs",
            self.top_logprobs,
            "0 or more: it counts tokens",
            "Use 0 for none",
        )
        self._check_token_ids()

    def _check_token_ids(self) -> None:
        _require(
            self.pad_token_id >= 0,
            "pad_token_id",
            self.pad_token_id,
            "0 or more: it is a row of the embedding",
            "Give the tokenizer's pad_token_id",
        )
        _require(
            all(token >= 0 for token in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "ids of 0 or more: they are rows of the embedding",
            "Give ids of the tokenizer's vocabulary",
        )
        _require(
            len(set(self.stop_token_ids)) == len(self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "distinct: a repeated id has no effect",
            "Name each stop token once",
        )


def _require(holds: bool, name: str, value: object, rule_and_reason: str, remedy: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r} must be {rule_and_reason}. {remedy}.")
