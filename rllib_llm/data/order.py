"""The order in which rows of a data set are handed out: a pure function of seed and position."""

from __future__ import annotations

import numpy as np


class EpochOrder:
    """Row indices by position: epoch after epoch, each shuffled anew by (seed, epoch).

    Nothing is stored but the position, so nothing is skipped or repeated across a restart.
    """

    def __init__(self, num_rows: int, seed: int = 0, *, shuffle: bool = True):
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self._cached: tuple[int, np.ndarray] | None = None

    def indices(self, position: int, count: int) -> np.ndarray:
        """Indices [count] int64 of the rows at `position` and the `count - 1` that follow."""
        epochs, places = np.divmod(np.arange(position, position + count), self.num_rows)
        indices = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = self._order(int(epoch))[places[here]]
        return indices

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        if self._cached is None or self._cached[0] != epoch:
            self._cached = epoch, permutation(self.num_rows, self.seed, epoch)
        return self._cached[1]


def permutation(size: int, seed: int, stream: int) -> np.ndarray:
    """A permutation of `range(size)`, int64 [size], the same in every process and NumPy version.

    It sorts 64-bit random keys of the counter-based Philox generator keyed by (seed, stream).
    """
    keys = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(size)
    return np.argsort(keys, kind="stable")
