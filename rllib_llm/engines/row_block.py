"""A block of the batch: rows of like length with a cache of their own, at whose newest position all
of them end. A row that is shorter than the longest of its block is one with padding before it.

    long   [ k k k k k k k k k|n ]      k: keys and values, n: the newest position
    short  [ . . . . . k k k k|n ]      .: padding, masked out: memory and time for nothing
             ^ first           ^ length

Only attention and its cache know of blocks: the linear layers, the head and the sampling take the
rows of all blocks together.
"""

from __future__ import annotations

import numpy as np
import torch

from rllib_llm.engines.batch_rows import Moves
from rllib_llm.engines.kept_prefixes import Layers, row_of
from rllib_llm.engines.kv_cache import RepeatedPromptCache, SharedPromptCache

# Fewer positions at the front than this, or than this share of a cache that may grow, are not worth
# moving the whole cache for.
_MIN_SHIFT, _SHIFTED_SHARE = 16, 0.25


class RowBlock:
    """Rows in the order in which they stand in their cache.

    Args:
        cache: without rows.
        device: of the model.
    """

    def __init__(
        self, cache: SharedPromptCache | RepeatedPromptCache, device: torch.device
    ) -> None:
        self.cache, self.device = cache, device
        # On the host, of each row: its column of the buffers, which names it, and where it starts.
        self.columns = self.starts = np.empty(0, dtype=np.int64)
        self.length = self.first = 0  # positions in use; those before `first` are padding only
        self.mask: torch.Tensor | None = None  # [rows, capacity], None while none has padding

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def lengths(self) -> np.ndarray:
        """Positions of each row's own, [rows]."""
        return self.length - self.starts

    @property
    def span(self) -> int:
        """Positions that the attention of every row goes over."""
        return self.length - self.first if len(self) else 0

    def seen(self) -> torch.Tensor | None:
        """Which of the positions from `first` on count, the one that comes next among them, [rows,
        span + 1] bool; None where all do."""
        return None if self.mask is None else self.mask[:, self.first : self.length + 1]

    # --- rows ----------------------------------------------------------------------------------

    def admit(
        self,
        prompts: SharedPromptCache | RepeatedPromptCache,
        copies: list[int],
        longest: int,
        room: tuple[int, int],
    ) -> None:
        """Puts the rows of prefilled prompts into the cache, unless it is their own: they end where
        the others end. `add` says next who they are.

        Args:
            prompts: end at one position; the longest has `longest`.
            copies: rows of each prompt.
            longest: positions.
            room: rows and positions to have room for.
        """
        if not len(self):
            self.length = longest
        elif self.length < longest:
            self._shift(self.length - longest)
        if isinstance(self.cache, SharedPromptCache) and prompts is not self.cache:
            assert isinstance(prompts, SharedPromptCache)
            self.cache.admit(prompts, copies, room)

    def add(self, columns: list[int], lengths: list[int], to_come: int) -> None:
        """Names the rows that were admitted.

        Args:
            columns: of the buffers.
            lengths: positions of each row.
            to_come: positions that the rows of this block may still get.
        """
        self.columns = np.concatenate([self.columns, np.asarray(columns, dtype=np.int64)])
        starts = self.length - np.asarray(lengths, dtype=np.int64)
        self.starts = np.concatenate([self.starts, starts])
        self.look_from(to_come)

    def take_in(self, other: RowBlock) -> None:
        """Moves the rows of another block here, none of which is longer than the longest."""
        assert isinstance(self.cache, SharedPromptCache)
        assert isinstance(other.cache, SharedPromptCache)
        rows = len(self) + len(other)
        self.cache.admit(other.cache, [1] * len(other), (rows, self.cache.capacity))
        self.add(other.columns.tolist(), other.lengths.tolist(), 0)

    def keep(self, moves: Moves) -> None:
        """Lets rows go."""
        targets, sources = moves.targets.cpu().numpy(), moves.sources.cpu().numpy()
        for values in (self.columns, self.starts):
            values[targets] = values[sources]
        self.columns, self.starts = (
            values[: moves.num_rows] for values in (self.columns, self.starts)
        )
        is_shared = isinstance(self.cache, SharedPromptCache)
        if moves.num_rows:
            self.cache.move_rows(moves.sources, moves.targets, moves.num_rows)
            if self.mask is not None:
                self.mask = moves.apply(self.mask)
            if is_shared and self.first < self.starts.min():  # the longest has left
                self.look_from(0)
        elif is_shared:
            self.cache.clear()

    def states_of(self, columns: set[int]) -> dict[int, Layers]:
        """Copies of the keys and values of rows, as far as they are here."""
        if not isinstance(self.cache, SharedPromptCache):
            return {}
        return {
            column: row_of(self.cache, row, int(self.starts[row]))
            for row, column in enumerate(self.columns.tolist())
            if column in columns
        }

    # --- positions -----------------------------------------------------------------------------

    def look_from(self, to_come: int) -> None:
        """Leaves out the positions that are padding in every row, and says where padding is."""
        self.first = int(self.starts.min())
        self.mask = None
        if self.first != self.starts.max():
            capacity = self.length + to_come
            if isinstance(self.cache, SharedPromptCache):
                capacity = self.cache.capacity
            columns = torch.arange(capacity, device=self.device)
            self.mask = columns >= torch.from_numpy(self.starts).to(self.device).unsqueeze(1)
        if isinstance(self.cache, SharedPromptCache):
            self.cache.look_from(self.first)

    def make_room(self, is_bounded: bool) -> None:
        """Has room for one more position: over those that are padding in every row, or more.

        Args:
            is_bounded: the cache has room for all that will come, so that it should not grow.
        """
        cache = self.cache
        if not isinstance(cache, SharedPromptCache) or self.length < cache.capacity:
            return
        first = int(self.starts.min())
        # Both move the whole cache, and have to pay for it by the room that they make.
        if first >= _MIN_SHIFT and (is_bounded or first >= cache.capacity * _SHIFTED_SHARE):
            self._shift(first)
        else:
            cache.grow(cache.capacity + max(cache.capacity // 2, _MIN_SHIFT))
        self.look_from(0)

    def _shift(self, positions: int) -> None:
        """Moves all rows so many positions to the front, or back."""
        assert isinstance(self.cache, SharedPromptCache)
        if self.length - positions > self.cache.capacity:
            self.cache.grow(self.length - positions)
        self.cache.shift(positions)
        self.length -= positions
        self.starts = self.starts - positions
