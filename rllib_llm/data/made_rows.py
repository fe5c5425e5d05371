"""Rows that are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any


class MadeRows(Sequence):
    """A sequence of `size` rows, each a function of its index alone."""

    def __init__(self, size: int) -> None:
        self._size = size

    @abstractmethod
    def make(self, index: int) -> dict[str, Any]:
        """The row at `index`, which is from 0 up and below the size."""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(f"row {index} of {self._size}")
        return self.make(int(index) % self._size)
