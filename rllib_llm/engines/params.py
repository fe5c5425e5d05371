"""Sampling parameters of one generation, validated on creation."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_llm.shared.errors import Problem, report

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
    """Fills completions after their end."""
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
    """So many of the likeliest tokens are returned with each that is sampled, >= 0."""
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
        """The settings of an algorithm's config; `ends`: the model's, where it sets no stop
        tokens."""
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

    @functools.cached_property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return any(getattr(self, name) != off for name, off in _PENALTIES.items())

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        bias = self.logit_bias
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        sorted_bias = tuple(sorted((int(i), float(value)) for i, value in pairs))
        object.__setattr__(self, "logit_bias", sorted_bias)
        report(list(self._wrong()))

    def _wrong(self) -> Iterator[Problem]:
        stops, ids = self.stop_token_ids, [token for token, _ in self.logit_bias]
        most, least = self.max_new_tokens, LOWEST_TEMPERATURE
        greedy, never = "Use greedy=True for the limit 0", "Use -100 for tokens that must not come"
        rules: list[tuple] = [  # whether it holds, name, rule, remedy if any
            (most >= 1, "max_new_tokens", "at least 1"),
            (0 <= self.min_new_tokens <= most, "min_new_tokens",
             f"within 0 and max_new_tokens={most}"),
            (least <= self.temperature < math.inf, "temperature", f"finite, >= {least}", greedy),
            (self.top_k >= 0, "top_k", "0 (off) or more"),
            (0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1 (off)"),
            (self.top_logprobs >= 0, "top_logprobs", "0 (none) or more"),
            (0.0 <= self.min_p <= 1.0, "min_p", "within 0 (off) and 1"),
            (-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "within -2 and 2"),
            (-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "within -2 and 2"),
            (0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "within 0.01 and 100"),
            (self.pad_token_id >= 0, "pad_token_id", "0 or more"),
            (all(token >= 0 for token in stops), "stop_token_ids", "ids of 0 or more"),
            (len(set(stops)) == len(stops), "stop_token_ids", "distinct"),
            (all(i >= 0 for i in ids) and len(set(ids)) == len(ids), "logit_bias",
             "of distinct ids of 0 or more"),
            (all(-100.0 <= value <= 100.0 for _, value in self.logit_bias), "logit_bias",
             "of numbers within -100 and 100", never),
        ]  # fmt: skip
        for holds, name, rule, *remedies in rules:
            if not holds:
                remedy = next(iter(remedies), "")
                yield Problem(name, f"be {rule}", "", remedy, getattr(self, name))
