"""What happens to a judge's scores before they become rewards: clipping, scaling, penalties."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rllib_llm.numerics.advantages import AllReduceSum


def clip_scores(scores: Tensor, limit: float) -> Tensor:
    """Scores held to [-limit, limit], [batch]."""
    if not limit > 0:
        raise ValueError(
            f"limit={limit!r} must be above 0: scores are held to [-limit, limit]. "
            "Leave clipping off to keep them as they are."
        )
    return scores.clamp(-limit, limit)


def missing_eos_penalty(scores: Tensor, finished: Tensor, penalty: float) -> Tensor:
    """Scores [batch], less `penalty` (>= 0) where no stop token ended the completion."""
    _require_penalty("penalty", penalty)
    return torch.where(finished, scores, scores - penalty)


def length_penalty(scores: Tensor, lengths: Tensor, coeff: float) -> Tensor:
    """Scores [batch], less `coeff` (>= 0) for each of the `lengths` [batch] completion tokens."""
    _require_penalty("coeff", coeff)
    return scores - coeff * lengths


def overlong_penalty(scores: Tensor, lengths: Tensor, max_len: int, buffer: int) -> Tensor:
    """Scores [batch] plus DAPO's soft overlong punishment (Yu et al. 2025, eq. 13).

    0 up to max_len - buffer tokens, then falling linearly to -1 at max_len, -1 beyond; `lengths` in
    tokens [batch].
    """
    if not 0 < buffer <= max_len:
        raise ValueError(
            f"buffer={buffer!r} must be in 1..max_len ({max_len}): the punishment grows over the "
            "last `buffer` tokens before max_len. DAPO used 4096 of 20480."
        )
    return scores + ((max_len - buffer - lengths) / buffer).clamp(-1.0, 0.0)


class RunningScoreScale:
    """Scores divided by the running standard deviation of all scores seen.

    Moments of batches are merged exactly (Chan, Golub, LeVeque 1979), so that many small batches
    give the mean and standard deviation (ddof = 1) of all scores at once. Until two scores have
    been seen the scale is 1. With `shift_mean` the running mean is taken off first.
    """

    def __init__(self, *, shift_mean: bool = False, eps: float = 1e-8):
        self.shift_mean = shift_mean
        self.eps = eps
        self.count = 0.0
        self.mean = 0.0
        self._square_sum = 0.0

    @property
    def std(self) -> float:
        """Standard deviation of all scores seen; 1 until there are two."""
        if self.count < 2:
            return 1.0
        return (self._square_sum / (self.count - 1)) ** 0.5

    def update(
        self, scores: Tensor, valid: Tensor | None = None, all_reduce: AllReduceSum | None = None
    ) -> None:
        """Take in the (valid) scores [batch] of one batch, of all learners with `all_reduce`.

        Scores that are not finite are left out: one would spoil the scale for good.
        """
        counted = (scores if valid is None else scores[valid]).double()
        counted = counted[counted.isfinite()]
        count_and_sum = torch.stack([counted.new_tensor(counted.numel()), counted.sum()])
        if all_reduce is not None:
            count_and_sum = all_reduce(count_and_sum)
        count, total = count_and_sum.tolist()
        if count == 0:
            return
        mean = total / count
        square_sum = (counted - mean).square().sum()
        if all_reduce is not None:
            square_sum = all_reduce(square_sum)
        delta = mean - self.mean
        new_count = self.count + count
        self._square_sum += square_sum.item() + delta**2 * self.count * count / new_count
        self.mean += delta * count / new_count
        self.count = new_count

    @property
    def factor(self) -> float:
        """What differences between scores are multiplied by."""
        return 1.0 / (self.std + self.eps)

    def scale(self, scores: Tensor) -> Tensor:
        """Scores [batch] in units of the running standard deviation."""
        shift = self.mean if self.shift_mean else 0.0
        return (scores - shift) / (self.std + self.eps)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"count": self.count, "mean": self.mean, "square_sum": self._square_sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a checkpoint's moments."""
        self.count = float(state["count"])
        self.mean = float(state["mean"])
        self._square_sum = float(state["square_sum"])


def _require_penalty(name: str, number: float) -> None:
    if not number >= 0:
        raise ValueError(
            f"{name}={number!r} must be >= 0: it is subtracted from the score. "
            "Use 0 to switch it off, or a reward function to reward the opposite."
        )
