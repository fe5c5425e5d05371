"""Means of a learner's metrics over all mini-batches of one update."""

from __future__ import annotations

import torch


class WeightedMeans:
    """Running means by name, weighted by counts.

    `add(name, total, count)`: `total` is a sum over this learner's share, `count` the number of
    items in all learners' shares, so that the learners' means add up to the global mean.
    """

    def __init__(self) -> None:
        self._totals: dict[str, torch.Tensor | float] = {}
        self._counts: dict[str, torch.Tensor | float] = {}

    def add(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float) -> None:
        """Tensors are kept as tensors: nothing waits for the device before `pop`."""
        if isinstance(total, torch.Tensor):
            total = total.detach()
        self._totals[name] = self._totals.get(name, 0.0) + total
        self._counts[name] = self._counts.get(name, 0.0) + count

    def add_count(self, name: str, count: torch.Tensor | float) -> None:
        """Counts `count` more items of `name`, whose totals are added by other calls."""
        self.add(name, 0.0, count)

    def add_total(self, name: str, total: torch.Tensor | float) -> None:
        """Adds to the total of `name`, whose items are counted by other calls."""
        self.add(name, total, 0.0)

    def copy(self) -> WeightedMeans:
        """One with the same means, for `take`."""
        copied = WeightedMeans()
        copied.take(self)
        return copied

    def take(self, other: WeightedMeans) -> None:
        """Has the means of another from now on."""
        self._totals, self._counts = dict(other._totals), dict(other._counts)

    def pop(self) -> dict[str, float]:
        """All means, then forgets them; a name with nothing counted is left out."""
        means = {
            name: float(total) / float(self._counts[name])
            for name, total in self._totals.items()
            if float(self._counts[name]) > 0
        }
        self._totals.clear()
        self._counts.clear()
        return means
