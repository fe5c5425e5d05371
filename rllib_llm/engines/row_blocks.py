"""The blocks of a batch, and where its rows stand in them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from transformers import PretrainedConfig

from rllib_llm.engines.batch_rows import Moves, fill_gaps
from rllib_llm.engines.kv_cache import make_cache
from rllib_llm.engines.like_lengths import is_alike
from rllib_llm.engines.row_block import RowBlock


class RowBlocks:
    """Blocks that each have rows; one block, perhaps without, where nobody is in the batch.

    Args:
        config: the model's.
        device: of the model.
        cost: row positions that one more block has to save; infinite for one block of all rows.
    """

    def __init__(self, config: PretrainedConfig, device: torch.device, cost: float) -> None:
        self._config, self._device, self.cost = config, device, cost
        self._blocks = [self._new_block()]
        # Where the rows of the blocks, one after the other, stand in the batch, and where the rows
        # of the batch stand there, [rows] int64 each; None where both are one and the same.
        self.order: tuple[torch.Tensor, torch.Tensor] | None = None

    def __iter__(self) -> Iterator[RowBlock]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def _new_block(self) -> RowBlock:
        return RowBlock(make_cache(self._config, 1, 0), self._device)

    def block_for(self, lengths: np.ndarray, copies: np.ndarray) -> RowBlock:
        """The block whose attention costs least more with rows of prompts that are alike, if they
        are alike with those in it, too; else a new one.

        Args:
            lengths: [n] positions of the prompts.
            copies: [n] rows of each.
        """
        longest = lengths.max()
        fitting: list[tuple[float, RowBlock]] = []
        for block in self._blocks:
            ones = np.ones(len(block), dtype=np.int64)
            both = np.concatenate([lengths, block.lengths]), np.concatenate([copies, ones])
            if not len(block) or is_alike(*both, self.cost):
                span = max(block.span, longest)
                more = copies.sum() * span + len(block) * (span - block.span)
                fitting.append((more, block))
        if not fitting:
            self._blocks.append(self._new_block())
            return self._blocks[-1]
        return min(fitting, key=lambda found: found[0])[1]

    def clear(self) -> None:
        """Forgets all rows and frees the memory of their caches."""
        self._blocks, self.order = [self._new_block()], None

    def keep(self, moves: Moves, columns: np.ndarray, left: np.ndarray) -> None:
        """Lets rows go, then blocks that have none, or too few to be worth their cost.

        Args:
            moves: of the batch.
            columns: of the batch, of the rows that stay.
            left: columns of those that leave.
        """
        if self.order is None:
            self._blocks[0].keep(moves)
            return
        for block in self._blocks:
            stays = torch.from_numpy(~np.isin(block.columns, left))
            own = fill_gaps(stays, self._device)
            if own is not None:
                block.keep(own)
        self._join()
        self.find_order(columns)

    def _join(self) -> None:
        """Moves the rows of blocks to longer ones where a length of their own saves too little."""
        longer: list[RowBlock] = []
        for block in sorted(self._blocks, key=lambda block: -block.span):
            if not len(block):
                continue
            if longer and self._may_join(block, longer[-1]):
                longer[-1].take_in(block)
            else:
                longer.append(block)
        self._blocks = longer or [self._new_block()]

    def _may_join(self, block: RowBlock, longer: RowBlock) -> bool:
        """Whether a block saves too little: half of what a new one has to, so that rows do not go
        to and fro, and not more than that with the short rows that the longer one has already."""
        lengths = np.concatenate([longer.lengths, block.lengths])
        saved = len(block) * (longer.span - block.span)
        return 2 * saved <= self.cost and is_alike(lengths, np.ones_like(lengths), self.cost)

    def find_order(self, columns: np.ndarray) -> None:
        """Finds where the rows of the batch, which has these columns, stand in the blocks."""
        named = np.concatenate([block.columns for block in self._blocks])
        if len(self._blocks) == 1 and np.array_equal(named, columns):
            self.order = None
            return
        order = np.empty(len(named), dtype=np.int64)
        order[named.argsort()] = columns.argsort()
        there, back = torch.from_numpy(order), torch.from_numpy(order.argsort())
        self.order = there.to(self._device), back.to(self._device)
