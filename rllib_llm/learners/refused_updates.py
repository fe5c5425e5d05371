"""Updates whose loss or gradient is not finite: refused, counted, kept for inspection."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)
MAX_IN_A_ROW = 3


class RefusedUpdates:
    """Counts one learner's refused updates and gives up after several in a row."""

    def __init__(self, folder: str | None, rank: int):
        """`folder`: where mini-batches go; None: a new one among the system's temporary files."""
        self._folder = folder
        self._rank = rank
        self.num_refused = 0
        self.num_in_a_row = 0  # the learner sets it to 0 after every step it takes

    def refuse(
        self, loss: torch.Tensor, norm: torch.Tensor, minibatch: dict[str, torch.Tensor]
    ) -> None:
        """Writes the mini-batch to disk; the caller leaves weights and optimiser as they are.

        loss, norm: [], of the whole mini-batch.

        Raises:
            FloatingPointError: it happened `MAX_IN_A_ROW` times in a row.
        """
        self.num_refused += 1
        self.num_in_a_row += 1
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="rllib_llm_refused_")
        folder = Path(self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"refused_batch_{self.num_refused}_{self._rank}.pt"
        torch.save(minibatch, path)
        message = (
            f"loss={loss.item()} and gradient norm={norm.item()} must be finite: the update was "
            f"refused, weights and optimiser are unchanged. The mini-batch is in {path}."
        )
        logger.error(message)
        if self.num_in_a_row >= MAX_IN_A_ROW:
            raise FloatingPointError(
                f"{message} It happened {self.num_in_a_row} times in a row: "
                "lower lr, or look at the scores in that batch."
            )
