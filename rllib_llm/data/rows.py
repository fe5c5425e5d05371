"""Rows of a data set, wherever they are kept."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rllib_llm.shared.errors import SettingError


class DataSourceError(SettingError):
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
            return _without_fillers(self._backing.slice(index, 1).to_pylist()[0])
        row = {column: self._backing[index].get(column) for column in self.columns}
        return row if isinstance(self._backing, list) else _without_fillers(row)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def column(self, name: str) -> list[Any]:
        """All values of one column, in order."""
        require_columns(self, [name])
        if isinstance(self._backing, list):
            return [row.get(name) for row in self._backing]
        if self._is_arrow_table:
            return [_as_chat(value) for value in self._backing.column(name).to_pylist()]
        return [_as_chat(value) for value in self._backing[name]]


def _without_fillers(row: dict[str, Any]) -> dict[str, Any]:
    return {column: _as_chat(value) for column, value in row.items()}


def _as_chat(value: Any) -> Any:
    """A value from an Arrow table: of chats and schemas of tools without the nulls that stand for
    keys of other rows. Arrow gives each struct the fields of all, so that a call would have the
    arguments of every other call; what was null in the data is lost with them."""
    is_list = isinstance(value, list) and bool(value)
    if is_list and all(isinstance(each, dict) and _CHAT_KEYS & each.keys() for each in value):
        return _without_nulls(value)
    return value


_CHAT_KEYS = {"role", "from", "function"}  # of a message, ShareGPT's, a tool's schema


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def require_columns(rows: Rows, names: Iterable[str]) -> None:
    """Raises `DataSourceError`, naming the columns there are, where one of `names` is absent."""
    for name in names:
        if name in rows.columns:
            continue
        near = difflib.get_close_matches(name, rows.columns, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise DataSourceError(
            name="column",
            value=name,
            rule=f"be a column of {rows.description}",
            reason=f"it has {rows.columns}",
            remedy=f"{hint}Name another column, or rename this one",
        )
