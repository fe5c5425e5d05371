"""Off-policy corrections of a learner; the formulas are in `numerics/off_policy.py`.

Where old log-probs are the learner's own, those of the first mini-batch are of that very pass,
detached, which saves another one: their ratio is 1. The learner scores the rest of the batch before
the update. In half precision they always are: two passes of the same weights differ by their
rounding, in bfloat16 by some hundredths of a nat per token. As a ratio that is noise at the first
mini-batch, where nothing has changed yet, and where the ratio of a whole completion is meant it is
more than the clip range of GSPO.

    mini-batch 1  old = its own log-probs ── kept for the epochs to come
    mini-batch 2  old = of a pass before the update
    ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rllib_llm.learners.metrics import WeightedMeans
from rllib_llm.numerics import off_policy
from rllib_llm.shared import columns

Batch = dict[str, Tensor]
NUM_LAGS = 5  # the last is of all that are older


class OffPolicyCorrection:
    """Gives each micro-batch the proximal policy's log-probs and its tokens their weights, and
    notes how far the sampler's policy was.

    Args:
        mode: "bypass", "decoupled" or "decoupled_loglinear".
        weights: arguments of `importance_weights`; None: all weigh 1.
        rejection: arguments of `kept_tokens`; None: nothing is rejected.
        means: takes the metrics `off_policy/...`, means over the tokens before rejection.
    """

    def __init__(
        self, mode: str, *, weights: dict[str, Any] | None,
        rejection: dict[str, Any] | None, means: WeightedMeans,
    ) -> None:  # fmt: skip
        self._mode = mode
        self._weights = weights if mode != "bypass" else None
        self._rejection = rejection
        self._means = means
        self._is_first = False
        self._version = 0

    @classmethod
    def from_config(cls, config: Any, means: WeightedMeans) -> OffPolicyCorrection:
        """The correction that an RLHF config with `off_policy` asks for."""
        names = ("level", "lower", "upper")
        weights = {name: getattr(config, f"off_policy_{name}") for name in names}
        rejection = {name: getattr(config, f"rejection_{name}") for name in names}
        mode, estimator = config.off_policy_weights, config.rejection
        return cls(
            config.off_policy, means=means,
            weights=None if mode is None else {"mode": mode, **weights},
            rejection=None if estimator is None else {"estimator": estimator, **rejection},
        )  # fmt: skip

    def start_minibatch(
        self, minibatch: Batch, mask: Tensor, version: int, *, is_first: bool
    ) -> None:
        """Counts the tokens of a whole mini-batch, `mask` [B, T], before any is rejected.

        version: of the weights before the update. is_first: the policy is still that one.
        """
        self._version, self._is_first = version, is_first
        names = ["rejected_share"]
        if self._weights is not None:
            names += ["weight", "weight_square", "bounded_share"]
        if is_first:
            names += ["k1", "k3"]
            for lag, of_lag in self._by_lag(minibatch, mask):
                for name in (f"k1_lag_{lag}", f"k3_lag_{lag}"):
                    self._means.add_count(f"off_policy/{name}", of_lag.sum())
        for name in names:
            self._means.add_count(f"off_policy/{name}", mask.sum())

    def apply(self, batch: Batch, logprobs: Tensor, mask: Tensor) -> tuple[Batch, Tensor | None]:
        """The micro-batch with `old_logprobs` of the proximal policy, and the weight of each of
        its tokens, [B, T], 0 where it is rejected; None: all weigh 1."""
        behaviour = batch[columns.SAMPLER_LOGPROBS]
        if self._mode == "decoupled_loglinear":
            age = off_policy.ages(batch[columns.WEIGHTS_VERSION], self._version)
            proximal = off_policy.loglinear_proximal(logprobs, behaviour, age)
            batch = {**batch, columns.OLD_LOGPROBS: proximal.where(mask, 0.0)}
        if self._is_first:
            own = off_policy.log_ratio(logprobs, behaviour, mask)
            for name in ("k1", "k3"):
                value = off_policy.mismatch(own, name)
                self._means.add_total(f"off_policy/{name}", value.where(mask, 0.0).sum())
                for lag, of_lag in self._by_lag(batch, mask):
                    total = value.where(of_lag, 0.0).sum()
                    self._means.add_total(f"off_policy/{name}_lag_{lag}", total)
        # Without a proximal policy it is the present one that the sampler's is compared with.
        proximal = logprobs if self._mode == "bypass" else batch[columns.OLD_LOGPROBS]
        log_ratios = off_policy.log_ratio(proximal, behaviour, mask)
        weights = None
        if self._weights is not None:
            found = off_policy.importance_weights(log_ratios, mask, **self._weights)
            weights, counted = found.weights, found.weights.where(mask, 0.0)
            self._means.add_total("off_policy/weight", counted.sum())
            self._means.add_total("off_policy/weight_square", counted.square().sum())
            self._means.add_total("off_policy/bounded_share", found.bounded.sum())
        if self._rejection is None:
            self._means.add_total("off_policy/rejected_share", 0.0)
            return batch, weights
        kept = off_policy.kept_tokens(log_ratios, mask, **self._rejection)
        self._means.add_total("off_policy/rejected_share", (mask & ~kept).sum())
        return batch, kept.float() if weights is None else weights * kept

    def _by_lag(self, batch: Batch, mask: Tensor) -> list[tuple[int, Tensor]]:
        """(age, mask [B, T] of the tokens of that age), if the batch has weight versions."""
        if columns.WEIGHTS_VERSION not in batch:
            return []
        age = off_policy.ages(batch[columns.WEIGHTS_VERSION], self._version)
        age = age.clamp(max=NUM_LAGS - 1)
        return [(lag, mask & (age == lag)) for lag in range(NUM_LAGS)]


NUMBER = "number_in_update"  # column [rows] int64: which row of the update it is


class OldLogprobs:
    """The old log-probs of one update, whose `rows` get the column `NUMBER`; `first`: numbers of
    those in the first mini-batch; `all_reduce` sums over learners, who compute some rows each."""

    def __init__(self, rows: Batch, first: Tensor, all_reduce: Callable[[Tensor], Tensor]) -> None:
        old = rows[columns.OLD_LOGPROBS]
        rows[NUMBER] = torch.arange(len(old), device=old.device)
        columns.remember(rows[NUMBER], torch.arange(len(old)))
        self._own, self._is_known = torch.zeros_like(old), torch.zeros_like(old[:, :1])
        self._is_first = torch.zeros(len(old), dtype=torch.bool)  # on the host, as `first` is
        self._is_first[first] = True
        self._all_reduce: Callable[[Tensor], Tensor] | None = all_reduce

    @property
    def later(self) -> Tensor:
        """Numbers of the rows that are not in the first mini-batch."""
        return (~self._is_first).nonzero().squeeze(1)

    def of_this_pass(self, micro_batch: Batch, logprobs: Tensor) -> Batch:
        """A micro-batch of the first mini-batch; its old log-probs are its `logprobs` [rows, T]."""
        own = logprobs.detach()
        self._own[micro_batch[NUMBER], : own.shape[1]] = own
        self._is_known[micro_batch[NUMBER]] = 1.0  # on the device, which so has no mask to wait for
        return {**micro_batch, columns.OLD_LOGPROBS: own}

    def recall(self, minibatch: Batch) -> None:
        """Puts into a later mini-batch what `of_this_pass` was given of its rows."""
        numbers = minibatch[NUMBER]
        if not bool(self._is_first[columns.fetched([numbers])[0]].any()):
            return
        if self._all_reduce is not None:
            self._all_reduce(self._own)
            self._all_reduce(self._is_known)
            self._all_reduce = None
        minibatch[columns.OLD_LOGPROBS] = torch.where(
            self._is_known[numbers] > 0, self._own[numbers], minibatch[columns.OLD_LOGPROBS]
        )
