"""Processing of scores before they become rewards: clipping, scaling, penalties; and the grouping
of rows, since the rows of a forked conversation weigh as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rllib_llm.shared import columns


def clip_scores(scores: Tensor, limit: float) -> Tensor:
    """Scores held to [-limit, limit], [batch]."""
    assert limit > 0, limit
    return scores.clamp(-limit, limit)


def missing_eos_penalty(scores: Tensor, finished: Tensor, penalty: float) -> Tensor:
    """Scores [batch], less `penalty` (>= 0) where no stop token ended the completion."""
    assert penalty >= 0, penalty
    return torch.where(finished, scores, scores - penalty)


def length_penalty(scores: Tensor, lengths: Tensor, coeff: float) -> Tensor:
    """Scores [batch], less `coeff` (>= 0) for each of the `lengths` [batch] completion tokens."""
    assert coeff >= 0, coeff
    return scores - coeff * lengths


def overlong_penalty(scores: Tensor, lengths: Tensor, max_len: int, buffer: int) -> Tensor:
    """Scores [batch] plus DAPO's soft overlong punishment (Yu et al. 2025, eq. 13).

    0 up to max_len - buffer tokens, then falling linearly to -1 at max_len, -1 beyond; `lengths` in
    tokens [batch].
    """
    assert 0 < buffer <= max_len, (buffer, max_len)
    return scores + ((max_len - buffer - lengths) / buffer).clamp(-1.0, 0.0)


_EPS = 1e-8


class RunningScoreScale:
    """Scores divided by the running standard deviation of all scores seen.

    Moments of batches are merged exactly (Chan, Golub, LeVeque 1979), so that many small batches
    give the mean and standard deviation (ddof = 1) of all scores at once. Until two different
    scores have been seen the scale is 1.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self._square_sum = 0.0

    @property
    def std(self) -> float:
        """Standard deviation of all scores seen; 1 until two of them differ."""
        if self.count < 2:
            return 1.0
        std = (self._square_sum / (self.count - 1)) ** 0.5
        # Equal scores have a mean that is rounded.
        return std if std > _EPS * max(1.0, abs(self.mean)) else 1.0

    def update(self, scores: Tensor, valid: Tensor | None = None) -> None:
        """Adds the (valid) scores [batch] of one batch.

        Scores that are not finite are left out: one would spoil the scale for good.
        """
        counted = (scores if valid is None else scores[valid]).double()
        counted = counted[counted.isfinite()]
        count = counted.numel()
        if not count:
            return
        mean = counted.sum().item() / count
        square_sum = (counted - mean).square().sum()
        delta = mean - self.mean
        new_count = self.count + count
        self._square_sum += square_sum.item() + delta**2 * self.count * count / new_count
        self.mean += delta * count / new_count
        self.count = new_count

    @property
    def factor(self) -> float:
        """The factor of differences between scores."""
        return 1.0 / (self.std + _EPS)

    def scale(self, scores: Tensor) -> Tensor:
        """Scores [batch] in units of the running standard deviation."""
        return scores / (self.std + _EPS)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"count": self.count, "mean": self.mean, "square_sum": self._square_sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint's moments."""
        self.count = float(state["count"])
        self.mean = float(state["mean"])
        self._square_sum = float(state["square_sum"])


@dataclass(frozen=True)
class RolloutRows:
    """The rows of a batch that are of one rollout.

    owners [batch] int64: the first row of each row's rollout, in the order of the batch; lasts
    [batch] int64: the last one. longest: most rows from the first of a rollout to one of it.
    """

    owners: Tensor
    lasts: Tensor
    longest: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether each row is a rollout, as nearly always: then nothing is computed."""
        return self.longest == 1

    @classmethod
    def of(cls, row_ids: Tensor) -> RolloutRows:
        """Rows alike in `row_ids` [batch] are of one rollout."""
        line = torch.unique(*columns.fetched([row_ids]), return_inverse=True)[1]
        places = torch.arange(len(row_ids))
        first = torch.full_like(places, len(row_ids)).scatter_reduce(0, line, places, "amin")
        last = torch.full_like(places, -1).scatter_reduce(0, line, places, "amax")
        owners, lasts = (each[line] for each in (first, last))
        longest = int((places - owners).max()) + 1 if len(places) else 1
        owners, lasts = (e.to(row_ids.device, non_blocking=True) for e in (owners, lasts))
        return cls(owners, lasts, longest)

    @classmethod
    def of_batch(cls, batch: Mapping[str, Tensor]) -> RolloutRows:
        """From a batch's columns: each row is a rollout, except where conversations fork."""
        if columns.ROW_WEIGHT in batch:
            return cls.of(batch[columns.ROW_ID])
        some = next(iter(batch.values()))
        return cls.alone(len(some), some.device)

    @classmethod
    def alone(cls, num_rows: int, device: torch.device) -> RolloutRows:
        """Groups of one row each, without reading the device."""
        places = torch.arange(num_rows, device=device)
        return cls(places, places)

    @property
    def is_first(self) -> Tensor:
        """[batch] bool, True for one row of each rollout."""
        if self.is_alone:
            return torch.ones_like(self.owners, dtype=torch.bool)
        return self.owners == torch.arange(len(self.owners), device=self.owners.device)

    def total(self, per_row: Tensor) -> Tensor:
        """For each row the sum of `per_row` [batch] over all rows of its rollout, [batch]."""
        if self.is_alone:
            return per_row
        return torch.zeros_like(per_row).scatter_add(0, self.owners, per_row)[self.owners]

    def total_so_far(self, per_row: Tensor) -> Tensor:
        """For each row the sum of `per_row` [batch] over the rows of its rollout up to it, [batch].

        The rows of a rollout are adjacent. Other rollouts' values are in no sum, not even to be
        taken off again: the rewards of a large batch would be lost in their rounding.
        """
        if self.is_alone:
            return per_row
        total = per_row.clone()
        places = torch.arange(len(per_row), device=per_row.device)
        for back in range(1, self.longest):
            earlier = per_row.roll(back).where(places - self.owners >= back, 0.0)
            total = total + earlier
        return total

    def spread(self, per_rollout: Tensor) -> Tensor:
        """The value of each rollout's first row for all of its rows, [batch]."""
        return per_rollout if self.is_alone else per_rollout[self.owners]

    def at_end(self, per_row: Tensor) -> Tensor:
        """The value of each rollout's last row for all of its rows, [batch]."""
        return per_row if self.is_alone else per_row[self.lasts]


def with_turn_rewards(
    end_rewards: Tensor, earned: Tensor, mask: Tensor, rows: RolloutRows
) -> Tensor:
    """Adds turn rewards at the tokens that end their turns, float32 [batch, T].

    end_rewards [batch, T]: the whole score at each row's last masked-in token. earned [batch, T]:
    the part of this score that single turns earned, in the score's own units (scaled and clipped
    as it is), at their last tokens. What is not yet earned at the end of a row, in rows before it
    neither, stays at its end.
    """
    earned = torch.where(mask, earned.float(), torch.zeros_like(end_rewards))
    so_far = rows.total_so_far(earned.sum(dim=1))
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, torch.zeros_like(places)).amax(dim=1)
    at_end = (places == last.unsqueeze(1)) & mask
    return end_rewards + earned - torch.where(at_end, so_far.unsqueeze(1), torch.zeros_like(earned))
