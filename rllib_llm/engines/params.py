"""Sampling parameters of one generation, validated on creation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_llm.shared.errors import require

# Settings that act on tokens that have occurred, and the values that switch them off.
_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
# Logits of float32 divided by less need not be finite.
LOWEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one generation.

    Order of operations on the logits, as in vLLM: `logit_bias`, the three penalties, temperature,
    then what truncates: stop tokens are forbidden below `min_new_tokens`, min_p, top-k, top-p.

    The log-probs handed back are of the distribution before truncation: they see the bias, the
    penalties and the temperature. With a bias or a penalty they are therefore not those of the
    policy at its temperature, which a learner computes: such settings are for serving and
    evaluation.

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
    """Take the likeliest token; top_k, top_p and min_p then have no effect."""
    top_logprobs: int = 0
    """So many of the likeliest tokens are told beside each that is sampled, >= 0."""
    min_p: float = 0.0
    """Sample from tokens at least this share as likely as the likeliest, 0 .. 1; 0 switches it off
    (Nguyen et al. 2024, arXiv:2407.01082)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that it was sampled in this completion,
    -2 .. 2 (OpenAI's)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were sampled in this completion, -2 .. 2
    (OpenAI's)."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens of the prompt and the completion are divided by it, negative ones
    multiplied, > 0; 1 switches it off (Keskar et al. 2019, arXiv:1909.05858; transformers')."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens, -100 .. 100 each; may be given as a mapping."""

    @classmethod
    def of(
        cls, config: Any, pad_token_id: int = 0, ends: Sequence[int] = (), *, greedy: bool = False
    ) -> SamplingParams:
        """As a config says, an algorithm's; `ends`: the model's, where it sets no stop tokens."""
        stops = ends if config.stop_token_ids is None else config.stop_token_ids
        names = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p")
        chosen = {name: getattr(config, name) for name in names}
        return cls(pad_token_id, tuple(stops), greedy=greedy, **chosen)

    @property
    def drawn_by(self) -> dict[str, Any]:
        """The same settings in vLLM's request fields; a temperature of 0 is greedy. Fields beyond
        OpenAI's and vLLM's oldest are sent only if they have an effect."""
        if self.greedy:
            drawn: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
        else:
            drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
            if self.min_p:
                drawn["min_p"] = self.min_p
        return drawn | self.adjustments

    @property
    def adjustments(self) -> dict[str, Any]:
        """The settings that change logits before the temperature and are on, by name; `logit_bias`
        as a mapping."""
        found: dict[str, Any] = {
            name: getattr(self, name) for name, off in _PENALTIES.items()
            if getattr(self, name) != off
        }  # fmt: skip
        if self.logit_bias:
            found["logit_bias"] = dict(self.logit_bias)
        return found

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return any(getattr(self, name) != off for name, off in _PENALTIES.items())

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        bias = self.logit_bias
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        sorted_bias = tuple(sorted((int(i), float(value)) for i, value in pairs))
        object.__setattr__(self, "logit_bias", sorted_bias)
        for holds, name, rule, reason, remedy in self._rules():
            require(holds, name, getattr(self, name), f"be {rule}", reason, remedy)

    def _rules(self) -> Iterator[tuple[bool, str, str, str, str]]:
        """(whether it holds, setting, rule, reason, remedy) of each rule."""
        yield (
            self.max_new_tokens >= 1, "max_new_tokens", "at least 1",
            "a completion without tokens cannot be judged or learnt from",
            "Set the longest completion you want",
        )  # fmt: skip
        yield (
            0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens",
            f"within 0 and max_new_tokens={self.max_new_tokens}", "more can never be sampled",
            "Lower min_new_tokens or raise max_new_tokens",
        )  # fmt: skip
        yield (
            LOWEST_TEMPERATURE <= self.temperature < math.inf, "temperature",
            f"a finite number of at least {LOWEST_TEMPERATURE}",
            "logits are divided by it and must stay finite",
            "Use greedy=True for the limit of temperature 0",
        )  # fmt: skip
        yield (
            self.top_k >= 0, "top_k", "0 or more", "it counts the tokens that stay",
            "Use 0 to switch it off",
        )  # fmt: skip
        yield (
            0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1",
            "it is a probability mass", "Use 1.0 to switch it off",
        )  # fmt: skip
        yield (
            self.top_logprobs >= 0, "top_logprobs", "0 or more", "it counts tokens",
            "Use 0 for none",
        )  # fmt: skip
        yield (
            0.0 <= self.min_p <= 1.0, "min_p", "within 0 and 1",
            "it is a share of the likeliest token's probability", "Use 0.0 to switch it off",
        )  # fmt: skip
        for name in ("frequency_penalty", "presence_penalty"):
            yield (
                -2.0 <= getattr(self, name) <= 2.0, name, "within -2 and 2, as OpenAI's",
                "it is subtracted from logits", "Use 0.0 to switch it off",
            )  # fmt: skip
        yield (
            0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty",
            "within 0.01 and 100", "logits are divided by it and must stay finite",
            "Use 1.0 to switch it off",
        )  # fmt: skip
        row = "they are rows of the embedding"
        yield (
            self.pad_token_id >= 0, "pad_token_id", "0 or more", "it is a row of the embedding",
            "Give the tokenizer's pad_token_id",
        )  # fmt: skip
        vocabulary = "Give ids of the tokenizer's vocabulary"
        yield (
            all(token >= 0 for token in self.stop_token_ids), "stop_token_ids", "ids of 0 or more",
            row, vocabulary,
        )  # fmt: skip
        yield (
            len(set(self.stop_token_ids)) == len(self.stop_token_ids), "stop_token_ids",
            "distinct", "a repeated id has no effect", "Name each stop token once",
        )  # fmt: skip
        ids = [token for token, _ in self.logit_bias]
        yield (
            all(token >= 0 for token in ids) and len(set(ids)) == len(ids), "logit_bias",
            "of distinct ids of 0 or more", row, vocabulary,
        )  # fmt: skip
        yield (
            all(-100.0 <= value <= 100.0 for _, value in self.logit_bias), "logit_bias",
            "of numbers within -100 and 100, as OpenAI's", "they are added to logits",
            "Use -100 for tokens that must not come",
        )  # fmt: skip
