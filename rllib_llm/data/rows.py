"""Rows of a data set, wherever they are kept."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


class DataSourceError(ValueError):
    """A data source that cannot be read, is empty, or lacks a column."""


class Rows(Sequence):
    """Rows of a data set: `rows[i]` is a dict, `rows.columns` the names, `len(rows)` the count.

    `backing` is a list of dicts, a `pyarrow.Table` or a `datasets.Dataset`; the latter two are
    read row by row and stay in Arrow memory. A row that lacks one of `columns` has None there.
    """

    def __init__(self, backing: Any, description: str) -> None:
        self.description = description
        self._backing = backing
        if isinstance(backing, list):
            self.columns = list(dict.fromkeys(key for row in backing for key in row))
        else:
            self.columns = list(backing.column_names)
        self._is_arrow_table = hasattr(backing, "to_pylist")

    def __len__(self) -> int:
        return self._backing.num_rows if self._is_arrow_table else len(self._backing)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.description}")
        index %= len(self)
        if self._is_arrow_table:
            return self._backing.slice(index, 1).to_pylist()[0]
        row = self._backing[index]
        return {column: row.get(column) for column in self.columns}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def column(self, name: str) -> list[Any]:
        """All values of one column, in order."""
        require_columns(self, [name])
        if isinstance(self._backing, list):
            return [row.get(name) for row in self._backing]
        if self._is_arrow_table:
            return self._backing.column(name).to_pylist()
        return list(self._backing[name])


def require_columns(rows: Rows, names: Iterable[str]) -> None:
    """Raises `DataSourceError`, naming the columns there are, where one of `names` is absent."""
    for name in names:
        if name in rows.columns:
            continue
        near = difflib.get_close_matches(name, rows.columns, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise DataSourceError(
            f"column={name!r} must be a column of {rows.description}: it has "
            f"{rows.columns}. {hint}Name another column, or rename this one."
        )
