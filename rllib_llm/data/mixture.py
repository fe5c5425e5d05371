"""Several data sets in one, each by its weight: a pure function of the position, so that nothing
is skipped or repeated across a restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rllib_llm.data.sources import entries_of, is_mixture
from rllib_llm.data.texts import BatchSource
from rllib_llm.shared.errors import called


def places_of(weights: Sequence[float], positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The source of each of `positions` [n] int64 and its place there, both int64 [n].

    The first source takes a position wherever floor((p + 1) w) is above floor(p w), with w its
    share; the others share what it leaves in the same way (Bresenham's line, nested). Of any number
    of positions a source so has its share to within one position for each source before it.
    """
    sources, places = np.full(len(positions), len(weights) - 1), positions.astype(np.int64)
    is_free = np.ones(len(positions), dtype=bool)
    for source, weight in enumerate(weights[:-1]):
        share = weight / sum(weights[source:])
        before = np.floor(places * share).astype(np.int64)
        own = is_free & (np.floor((places + 1) * share) > before)
        sources[own] = source
        places = np.where(own, before, np.where(is_free, places - before, places))
        is_free &= ~own
    return sources, places


class MixedSource:
    """Batches of several sources of one kind by position, each with its order, its epochs and its
    share."""

    def __init__(self, sources: Sequence[BatchSource], weights: Sequence[float]) -> None:
        self._sources, self._weights = sources, weights
        self.is_unpaired = any(source.is_unpaired for source in sources)

    def __len__(self) -> int:
        """Rows of all sources."""
        return sum(map(len, self._sources))

    @property
    def truncated_share(self) -> float:
        """As that of a source, of all texts read so far."""
        read = sum(source.num_read for source in self._sources)
        return sum(source.num_cut for source in self._sources) / max(1, read)

    def batch(self, position: int, count: int) -> dict[str, Any]:
        """Columns [count, ...] of the rows from `position` on."""
        numbers, places = places_of(self._weights, np.arange(position, position + count))
        rows: list[Any] = [None] * count
        for number, source in enumerate(self._sources):
            mine = np.flatnonzero(numbers == number)
            if len(mine):  # what is its own lies at consecutive places
                encoded = source.encoded(int(places[mine[0]]), len(mine))
                for at, row in zip(mine, encoded, strict=True):
                    rows[at] = row
        return self._sources[0].columns(rows)


def batches_of(
    source_class: Callable[..., BatchSource], data: Any, *, name: str = "data", seed: int = 0,
    **settings: Any,
) -> BatchSource | MixedSource:  # fmt: skip
    """The batches of `data`, a data set or a list of {"path": ..., "weight": ...}; `settings`: of
    `source_class`."""
    if not is_mixture(data):
        return source_class(data, seed=seed, **settings)
    entries = entries_of(data, name)
    sources = []
    for number, (entry, _) in enumerate(entries):
        with called(name, f"{name}[{number}]"):
            sources.append(source_class(entry, seed=seed + number, **settings))
    return MixedSource(sources, [weight for _, weight in entries])
