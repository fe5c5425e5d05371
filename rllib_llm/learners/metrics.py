"""Means of a learner's metrics over all mini-batches of one update."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class WeightedMeans:
    """Running means by name, weighted by counts.

    `add(name, total, count)`: `total` is a sum over this learner's share, `count` the number of
    items in all learners' shares, so that the learners' means add up to the global mean.
    """

    def __init__(self) -> None:
        self._totals: dict[str, list[torch.Tensor | float]] = {}  # to be added up by `pop`
        self._counts: dict[str, list[torch.Tensor | float]] = {}

    def add(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float) -> None:
        """Tensors are kept, not to be written to: nothing waits for the device before `pop`."""
        self.add_total(name, total)
        self.add_count(name, count)

    def add_count(self, name: str, count: torch.Tensor | float) -> None:
        """Counts `count` more items of `name`, whose totals are added by other calls."""
        self._counts.setdefault(name, []).append(count)

    def add_total(self, name: str, total: torch.Tensor | float) -> None:
        """Adds to the total of `name`, whose items are counted by other calls."""
        if isinstance(total, torch.Tensor):
            total = total.detach()
        self._totals.setdefault(name, []).append(total)

    def copy(self) -> WeightedMeans:
        """One with the same means, for `take`."""
        copied = WeightedMeans()
        copied.take(self)
        return copied

    def take(self, other: WeightedMeans) -> None:
        """Has the means of another from now on."""
        self._totals = {name: list(parts) for name, parts in other._totals.items()}
        self._counts = {name: list(parts) for name, parts in other._counts.items()}

    def pop(self) -> dict[str, float]:
        """All means, then forgets them; a name with nothing counted is left out."""
        number = _fetched([*self._totals.values(), *self._counts.values()])
        counts = {name: sum(map(number, parts)) for name, parts in self._counts.items()}
        means = {
            name: sum(map(number, self._totals.get(name, ()))) / count
            for name, count in counts.items()
            if count > 0
        }
        self._totals.clear()
        self._counts.clear()
        return means


def _fetched(
    lists: Iterable[list[torch.Tensor | float]],
) -> Callable[[torch.Tensor | float], float]:
    """The number in each part of the lists; those on a GPU have been fetched all at once."""
    remote = [p for parts in lists for p in parts if isinstance(p, torch.Tensor) and p.is_cuda]
    numbers = torch.stack([part.double() for part in remote]).tolist() if remote else []
    known = {id(part): number for part, number in zip(remote, numbers, strict=True)}
    return lambda part: known[id(part)] if id(part) in known else float(part)
