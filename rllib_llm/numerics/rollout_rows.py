"""Rows that belong together: a conversation that was forked has several, and weighs as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rllib_llm.shared import columns


@dataclass(frozen=True)
class RolloutRows:
    """Which rows of a batch are of one rollout.

    owners [batch] int64: the first row of each row's rollout, in the order of the batch; lasts
    [batch] int64: the last one.
    """

    owners: Tensor
    lasts: Tensor

    @classmethod
    def of(cls, row_ids: Tensor) -> RolloutRows:
        """Rows alike in `row_ids` [batch] are of one rollout."""
        line = torch.unique(row_ids, return_inverse=True)[1]
        places = torch.arange(len(row_ids), device=row_ids.device)
        first = torch.full_like(places, len(row_ids)).scatter_reduce(0, line, places, "amin")
        last = torch.full_like(places, -1).scatter_reduce(0, line, places, "amax")
        return cls(first[line], last[line])

    @classmethod
    def of_batch(cls, batch: Mapping[str, Tensor]) -> RolloutRows:
        """Of a batch's columns: each row is a rollout, but where conversations fork."""
        if columns.ROW_WEIGHT in batch:
            return cls.of(batch[columns.ROW_ID])
        some = next(iter(batch.values()))
        return cls.alone(len(some), some.device)

    @classmethod
    def alone(cls, num_rows: int, device: torch.device) -> RolloutRows:
        """Each row is a rollout; nothing is asked of the device."""
        places = torch.arange(num_rows, device=device)
        return cls(places, places)

    @property
    def is_first(self) -> Tensor:
        """[batch] bool, True for one row of each rollout."""
        return self.owners == torch.arange(len(self.owners), device=self.owners.device)

    def total(self, per_row: Tensor) -> Tensor:
        """For each row the sum of `per_row` [batch] over all rows of its rollout, [batch]."""
        return torch.zeros_like(per_row).scatter_add(0, self.owners, per_row)[self.owners]

    def total_so_far(self, per_row: Tensor) -> Tensor:
        """For each row the sum of `per_row` [batch] over the rows of its rollout up to it, [batch].

        The rows of a rollout are adjacent.
        """
        running = per_row.cumsum(dim=0)
        return running - (running - per_row)[self.owners]

    def spread(self, per_rollout: Tensor) -> Tensor:
        """Gives all rows of a rollout what its first row has, [batch]."""
        return per_rollout[self.owners]

    def at_end(self, per_row: Tensor) -> Tensor:
        """Gives all rows of a rollout what its last row has, [batch]."""
        return per_row[self.lasts]


def with_turn_rewards(
    end_rewards: Tensor, earned: Tensor, mask: Tensor, rows: RolloutRows
) -> Tensor:
    """Token rewards in which what was earned at a turn stands there, float32 [batch, T].

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
