"""Which rows stand in one block, and which in blocks of their own: the attention of a row, and its
part of the cache, cost what the longest of its block costs.

    one block:   rows x longest                      (row positions a step and layer)
    two blocks:  rows x longest + rows x longest + what a further call costs
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PretrainedConfig

from rllib_llm.engines.row_budget import numbers_of_position

# Keys and values that attention reads on a CPU while one more call of it, and what goes with it, is
# made. That takes some 100 us, in which it reads 1.6 MB in float32 and 2 MB in bfloat16 (one core
# with AMX, 16 to 64 rows, 2 to 12 heads of 64); doubled, so that a block pays for sure.
_BYTES_OF_A_CALL = 4_000_000


def cost_of_block(config: PretrainedConfig, itemsize: int, device: torch.device) -> float:
    """Row positions that one more block has to save. Infinite except on a CPU: a GPU is bound by
    the launches of a step, and its graphs hold one cache.

    Args:
        config: the model's.
        itemsize: bytes of one number in the model's dtype.
        device: of the model.
    """
    if device.type != "cpu":
        return float("inf")
    layers = config.get_text_config(decoder=True).num_hidden_layers
    return _BYTES_OF_A_CALL * layers / (numbers_of_position(config) * itemsize)


def is_alike(lengths: np.ndarray, rows: np.ndarray, cost: float) -> bool:
    """Whether prompts belong into one block: no cut in two would save more than `cost`.

    Then no cut in more blocks would, either: k of them save sums of k - 1 terms of which each is
    at most what one of the cuts in two saves.

    Args:
        lengths: [n] positions.
        rows: [n] of each.
        cost: row positions.
    """
    order = np.argsort(-lengths, kind="stable")
    lengths, rows = lengths[order], rows[order]
    shorter = rows[::-1].cumsum()[::-1]  # rows of this length and of the shorter ones behind it
    return bool(((lengths[0] - lengths) * shorter <= cost).all())


def alike(lengths: np.ndarray, rows: np.ndarray, cost: float) -> list[list[int]]:
    """Parts of which each belongs into one block, as indices in order; the shortest part first.
    They make the sum over parts of `cost` + rows * longest least.

    Args:
        lengths: [n] positions.
        rows: [n] of each.
        cost: row positions.
    """
    if is_alike(lengths, rows, cost):
        return [list(range(len(lengths)))]
    distinct = np.unique(lengths)[::-1]
    held = np.array([rows[lengths == length].sum() for length in distinct])
    before = np.concatenate([[0], held.cumsum()])  # rows of the longer ones
    # least[j]: the cost of the j longest, of which the last part begins at begins[j].
    least, begins = np.zeros(len(distinct) + 1), np.zeros(len(distinct) + 1, dtype=np.int64)
    for j in range(1, len(distinct) + 1):
        costs = least[:j] + cost + distinct[:j] * (before[j] - before[:j])
        begins[j] = costs.argmin()
        least[j] = costs[begins[j]]
    parts, end = [], len(distinct)
    while end:
        part = np.isin(lengths, distinct[begins[end] : end])
        parts.append(part.nonzero()[0].tolist())
        end = int(begins[end])
    return parts
