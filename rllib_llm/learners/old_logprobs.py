"""Old log-probs in half precision: whose rounding they have decides what the loss learns.

Two passes of the same weights differ by their rounding, in bfloat16 by some hundredths of a nat per
token. As a ratio that is noise at the first mini-batch, where nothing has changed yet, and where
the ratio of a whole completion is meant it is more than the clip range of GSPO. So the rows of the
first mini-batch are compared with that very pass, detached: their ratio is 1. The rest of the
batch is scored by the learner before the update.

    mini-batch 1  old = its own log-probs ── kept for the epochs to come
    mini-batch 2  old = of a pass before the update
    ...
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rllib_llm.shared import columns

Batch = dict[str, Tensor]
NUMBER = "number_in_update"  # column [rows] int64: which row of the update it is


class OldLogprobs:
    """The old log-probs of one update.

    Args:
        rows: the update's rows; gets the column `NUMBER`.
        first: numbers of the rows of the first mini-batch.
        all_reduce: sums over learners, of which each computes some of the rows.
    """

    def __init__(self, rows: Batch, first: Tensor, all_reduce: Callable[[Tensor], Tensor]) -> None:
        old = rows[columns.OLD_LOGPROBS]
        rows[NUMBER] = torch.arange(len(old), device=old.device)
        self._own = torch.zeros_like(old)
        self._is_first = torch.zeros(len(old), dtype=torch.bool, device=old.device)
        self._is_first[first.to(old.device)] = True
        self._all_reduce: Callable[[Tensor], Tensor] | None = all_reduce

    @property
    def later(self) -> Tensor:
        """Numbers of the rows that are not in the first mini-batch."""
        return (~self._is_first).nonzero().squeeze(1)

    def of_this_pass(self, micro_batch: Batch, logprobs: Tensor) -> Batch:
        """A micro-batch of the first mini-batch; its old log-probs are its `logprobs` [rows, T]."""
        own = logprobs.detach()
        self._own[micro_batch[NUMBER], : own.shape[1]] = own
        return {**micro_batch, columns.OLD_LOGPROBS: own}

    def recall(self, minibatch: Batch) -> None:
        """Puts into a later mini-batch what `of_this_pass` was given of its rows."""
        again = self._is_first[minibatch[NUMBER]]
        if not bool(again.any()):
            return
        if self._all_reduce is not None:
            self._all_reduce(self._own)
            self._all_reduce = None
        own = self._own[minibatch[NUMBER]]
        minibatch[columns.OLD_LOGPROBS] = torch.where(
            again.unsqueeze(1), own, minibatch[columns.OLD_LOGPROBS]
        )
