"""The order in which rows of a data set are handed out: a pure function of seed and position."""

from __future__ import annotations

from typing import Any

import numpy as np

from rllib_llm.shared.errors import SettingError

_NUM_ROUNDS = 8  # of the cipher; four suffice for large sets, small ones want more


class EpochOrder:
    """Row indices by position, shuffled in each epoch by (seed, epoch).

    Nothing is stored but the position, so nothing is skipped or repeated across a restart, and a
    hundred million rows take no more memory than ten.
    """

    def __init__(self, num_rows: int, seed: int = 0, *, shuffle: bool = True):
        check_seed(seed)
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle

    def indices(self, position: int, count: int) -> np.ndarray:
        """Indices [count] int64 of the rows at `position` and the `count - 1` that follow."""
        epochs, places = np.divmod(np.arange(position, position + count), self.num_rows)
        if not self.shuffle:
            return places
        indices = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permuted(places[here], self.num_rows, self.seed, int(epoch))
        return indices


def check_seed(seed: Any, name: str = "seed") -> None:
    """Raises SettingError where it is no seed of a cipher."""
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
        raise SettingError(
            name=name,
            value=seed,
            rule="be a whole number from 0 to 2^64 - 1",
            reason="the order of rows is a function of it",
            remedy="Choose another",
        )


def permuted(places: np.ndarray, size: int, seed: int, stream: int) -> np.ndarray:
    """Where `places` [n] of `range(size)` stand in the permutation of (seed, stream), int64 [n].

    The permutation is a Feistel cipher on the smallest square 4^w >= size; a value outside of the
    range is enciphered again until it lies inside (Black and Rogaway 2002, "Ciphers with Arbitrary
    Finite Domains"). It costs the places that are asked for, whatever the size, and is the same
    in every process and NumPy version.
    """
    half_bits = np.uint64(((size - 1).bit_length() + 1) // 2)
    keys = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(_NUM_ROUNDS)
    values = _encipher(np.asarray(places, dtype=np.uint64), half_bits, keys)
    while (outside := values >= size).any():
        values[outside] = _encipher(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _encipher(values: np.ndarray, half_bits: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return left << half_bits | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014) of uint64 [n]."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
