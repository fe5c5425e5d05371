"""Rows of a data set, wherever they are kept, and the order in which they are handed out: a pure
function of seed and position."""

from __future__ import annotations

import contextlib
import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rllib_llm.shared.errors import Problems, did_you_mean, require


class MadeRows(Sequence):
    """A sequence of `size` rows, each a function of its index alone."""

    description = "the rows made"  # where they come from, for messages

    def __init__(self, size: int) -> None:
        self._size = size

    @abstractmethod
    def make(self, index: int) -> dict[str, Any]:
        """The row at `index`, which is from 0 up and below the size."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[dict[str, Any]]:  # Sequence's own ends at any IndexError
        return map(self.make, range(self._size))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(f"row {index} of {self._size} in {self.description}")
        return self.make(int(index) % self._size)


class Rows(MadeRows):
    """Rows of a data set: `rows[i]` is a dict, `rows.columns` the names, `len(rows)` the count.

    `backing` is a list of dicts, a `pyarrow.Table` or a `datasets.Dataset`; the latter two are
    read row by row and stay where they are, in Arrow's memory or in a mapped file. A row that
    lacks one of `columns` has None there. Chats are lists of {"role", "content"}, also where they
    were written as ShareGPT's {"from", "value"}; those from Arrow hold no nulls. The index that
    pandas stores beside its columns is none of them.
    """

    def __init__(self, backing: Any, description: str) -> None:
        self.description, self._backing = description, backing
        self._is_list = isinstance(backing, list)
        self._is_arrow_table = hasattr(backing, "to_pylist")
        names = (key for row in backing for key in row) if self._is_list else backing.column_names
        stored = (name for name in names if self._is_list or not name.startswith("__index_level_"))
        self._stored_as = {name: name for name in stored}  # by the name that is shown
        super().__init__(len(backing))

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return [*self._stored_as]

    def make(self, index: int) -> dict[str, Any]:
        if self._is_arrow_table:
            row = self._backing.slice(index, 1).to_pylist()[0]
        else:
            row = self._backing[index]
        return {name: self._as_chat(name, row.get(at)) for name, at in self._stored_as.items()}

    def first(self, count: int) -> Rows:
        """The first `count` rows."""
        rows = copy.copy(self)
        rows._size = min(count, len(self))
        return rows

    def renamed(self, columns: Mapping[str, str]) -> Rows:
        """Columns {new name: old name}, the others as they are; one that already has a new name
        makes way."""
        require_columns(self, columns.values())
        is_unique = len({*columns.values()}) == len(columns)
        require(is_unique, "columns", dict(columns), "give each column one new name", "",
                "Write the column twice in the data set")  # fmt: skip
        old_to_new = {old: new for new, old in columns.items()}
        rows = copy.copy(self)
        rows._stored_as = {
            old_to_new.get(name, name): at
            for name, at in self._stored_as.items()
            if name in old_to_new or name not in columns
        }
        return rows

    def column(self, name: str) -> list[Any]:
        """All values of one column, in order."""
        require_columns(self, [name])
        if self._is_list:
            values = [row.get(self._stored_as[name]) for row in self._backing]
        else:
            values = self._backing[self._stored_as[name]]
            values = values.to_pylist() if self._is_arrow_table else values
        return [self._as_chat(name, value) for value in values[: len(self)]]

    def _as_chat(self, name: str, value: Any) -> Any:
        """A value of a row; of chats and tool schemas as templates read them. Arrow gives every
        struct the fields of all, so a call would get the arguments of every other call: its nulls
        are removed, those of the original data among them."""
        if name in OF_TEMPLATES and not self._is_list:
            return _without_nulls(value)
        is_list = isinstance(value, list) and bool(value)
        if not is_list or not all(isinstance(e, dict) and _CHAT_KEYS & e.keys() for e in value):
            return value
        chat = value if self._is_list else _without_nulls(value)
        if not all("role" not in e and isinstance(e.get("value"), str)
                   and str(e.get("from")) in _ROLES for e in chat):  # fmt: skip
            return chat
        return [  # ShareGPT's
            {"role": _ROLES[each["from"]], "content": each["value"]}
            | {key: rest for key, rest in each.items() if key not in ("from", "value")}
            for each in chat
        ]


def concatenated(parts: Sequence[Rows], description: str) -> Rows:
    """The rows of all parts in order; parts in Arrow stay there, where all have the same columns of
    the same kinds."""
    is_arrow = not any(part._is_list for part in parts)
    if is_arrow and len({tuple(sorted(part.columns)) for part in parts}) == 1:
        import pyarrow as pa

        tables = [part._backing for part in parts]
        with contextlib.suppress(pa.ArrowException, ValueError):  # a column of two kinds
            if all(part._is_arrow_table for part in parts):
                return Rows(pa.concat_tables(tables, promote_options="permissive"), description)
            import datasets

            return Rows(datasets.concatenate_datasets([
                datasets.Dataset(datasets.table.InMemoryTable(table)) if part._is_arrow_table
                else table for part, table in zip(parts, tables, strict=True)
            ]), description)  # fmt: skip
    return Rows([row for part in parts for row in part], description)


OF_TEMPLATES = ("tools", "chat_template_kwargs")  # columns that chat templates read
_CHAT_KEYS = {"role", "from", "function"}  # of a message, ShareGPT's, a tool's schema
_ROLES = {
    "human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool",
    "function": "tool", "ipython": "tool",
    **{role: role for role in ("system", "user", "assistant", "tool")},
}  # fmt: skip


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def require_columns(rows: Rows, names: Iterable[str], setting: str = "column") -> None:
    """Raises Problems, naming the columns there are, where one of `names`, which `setting` gives,
    is absent."""
    for name in names:
        if name not in rows.columns:
            meant = did_you_mean(str(name), rows.columns, otherwise="Name another, or rename one")
            rule, what = f"be a column of {rows.description}", f"it has {rows.columns}"
            raise Problems(setting, rule, what, meant, name)


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
    """Raises Problems where it is no seed of a cipher."""
    is_seed = isinstance(seed, (int, np.integer)) and 0 <= seed < 2**64
    require(is_seed, name, seed, "be a whole number from 0 to 2^64 - 1", "", "")


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
