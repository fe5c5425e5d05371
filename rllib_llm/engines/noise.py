"""Sampling noise as a pure function of (seed, row): no generator state to carry or to restore."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def uniform_noise(
    seed: int,
    row_ids: torch.Tensor | np.ndarray | Sequence[int],
    length: int,
    turn: int = 0,
) -> torch.Tensor:
    """Uniforms in [0, 1), one counter-based stream per row id and turn.

    A row's numbers depend on the seed and its id alone: not on the rows beside it, and not on
    `length` (a longer draw starts with the shorter one). Only the raw words of Philox4x64-10 are
    used (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; key = (seed, row id),
    the counter's highest word = turn), whose stream NumPy keeps stable between versions; each
    32-bit half gives the 24 bits that float32 holds exactly, so 1.0 is never drawn.

    Args:
        seed: 0 .. 2**64 - 1.
        row_ids: [batch] integers, >= 0.
        length: numbers per row, >= 0.
        turn: 0 .. 2**64 - 1, of a conversation.

    Returns:
        [batch, length] float32.

    Raises:
        ValueError: a seed, row id, length or turn out of range.
    """
    rows = np.asarray(row_ids, dtype=np.int64)
    _check(seed, rows, length)
    if not 0 <= turn < 2**64:
        raise ValueError(
            f"turn={turn!r} must be within 0 and 2**64 - 1: it counts turns. Count from 0."
        )
    halves = _words(seed, rows, (length + 1) // 2, turn).view("<u4")[:, :length] >> np.uint32(8)
    return torch.from_numpy(halves.astype(np.float32) * np.float32(2.0**-24))


def row_seeds(
    seed: int, row_ids: torch.Tensor | np.ndarray | Sequence[int], turn: int = 0
) -> list[int]:
    """One seed per row, 0 .. 2**63 - 1, for engines that draw their own numbers.

    A function of seed, row id and turn alone, as `uniform_noise`.

    Raises:
        ValueError: a seed or row id out of range.
    """
    rows = np.asarray(row_ids, dtype=np.int64)
    _check(seed, rows, 1)
    return [int(word) >> 1 for word in _words(seed, rows, 1, turn)[:, 0]]


def _words(seed: int, rows: np.ndarray, count: int, turn: int = 0) -> np.ndarray:
    """The first `count` raw words of each row's stream, [rows, count] uint64."""
    words = np.empty((len(rows), count), dtype="<u8")
    start = np.array([0, 0, 0, turn], dtype=np.uint64)
    bits = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=start)
    state = bits.state  # a copy at the start; assigning it back rewinds the stream
    key = state["state"]["key"]
    for i, row in enumerate(rows):
        key[1] = row
        bits.state = state
        words[i] = bits.random_raw(count)
    return words


def _check(seed: int, rows: np.ndarray, length: int) -> None:
    if not 0 <= seed < 2**64:
        raise ValueError(
            f"seed={seed!r} must be within 0 and 2**64 - 1: it is one word of the generator's key. "
            "Take a non-negative integer."
        )
    if rows.ndim != 1:
        raise ValueError(
            f"row_ids={rows.shape!r} must be one-dimensional: there is one stream per row. "
            "Pass a flat list of ids."
        )
    if rows.size and rows.min() < 0:
        raise ValueError(
            f"row_ids={int(rows.min())!r} must be 0 or more: a row id counts completions. "
            "Count rows from 0."
        )
    if length < 0:
        raise ValueError(
            f"length={length!r} must be 0 or more: it counts numbers per row. Pass max_new_tokens."
        )
