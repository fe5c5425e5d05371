"""Rows of any data set: a file, a folder, a hub id, a function or a list, all read the same way.

Prompts, SFT texts, preference pairs and pretraining text all come through `load_rows`.
"""

from __future__ import annotations

import difflib
import glob
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_llm.dotted import import_dotted, looks_dotted

Source = str | Path | Mapping[str, Any] | Iterable[Any] | Callable[..., Any]

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")
_TEXT = (".txt", ".text", ".md")
_SUFFIXES = _JSON_LINES + _PARQUET + _TEXT
_SOURCE_KEYS = ("path", "name", "split", "revision", "columns", "limit", "kwargs")
_ALLOWED = (
    f"a file ({', '.join(_SUFFIXES)}; a pattern or a list of files), a data set folder, a Hugging "
    "Face hub id, a dotted path to a function returning rows, or the rows themselves"
)


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


def load_rows(source: Source | None, *, name: str = "data") -> Rows:
    """Returns the rows of `source`, at least one; `name` is the setting to blame in messages.

    Args:
        source: one of
            a file, pattern (`data/*.jsonl`) or list of files: JSON Lines (or one JSON array),
            Parquet, plain text (one row {"text": line} for each line that is not blank);
            a folder written by `datasets.save_to_disk`, or one `datasets.load_dataset` can read;
            a hub id such as "stanfordnlp/imdb" (its "train" split);
            a dotted path to a function returning dicts or strings, or such a function or
            iterable itself (a string becomes {"text": string});
            a dict {"path": any of these, "name": configuration of the hub data set, "split",
            "revision", "columns": {new name: old name}, "limit": first rows only, "kwargs":
            arguments of the function}.

    Raises:
        DataSourceError: nothing there, unknown format, a broken line (numbered), or no rows.
    """
    options: dict[str, Any] = {}
    if isinstance(source, Mapping):
        options = _source_options(source, name)
        source = options.pop("path")
    rows = _read(source, options, name)
    if options.get("columns"):
        rows = _rename(rows, options["columns"], name)
    if options.get("limit") is not None:
        rows = Rows(rows[: int(options["limit"])], rows.description)
    if len(rows) == 0:
        raise DataSourceError(
            f"{name}={rows.description} must hold at least one row: it is empty. "
            "Point it at a source with rows."
        )
    return rows


def _source_options(source: Mapping[str, Any], name: str) -> dict[str, Any]:
    for key in source:
        if key not in _SOURCE_KEYS:
            near = difflib.get_close_matches(str(key), _SOURCE_KEYS, n=1)
            hint = f"Did you mean {near[0]!r}" if near else "Remove it"
            raise DataSourceError(
                f"{name}[{key!r}] must be one of {list(_SOURCE_KEYS)}: unknown key. {hint}."
            )
    if "path" not in source:
        raise DataSourceError(
            f"{name}={dict(source)!r} must have a 'path': nothing says where the rows are. "
            f"Set it to {_ALLOWED}."
        )
    return dict(source)


def _read(source: Any, options: dict[str, Any], name: str) -> Rows:
    if isinstance(source, Rows):
        return source
    if isinstance(source, (str, Path)):
        return _read_named(str(source), options, name)
    if callable(source):
        described = getattr(source, "__qualname__", repr(source))
        return _from_iterable(source(**options.get("kwargs", {})), f"{described}()", name)
    if isinstance(source, (list, tuple)) and source and all(_is_file(item) for item in source):
        return _concatenate([_read_file(Path(item).expanduser(), name) for item in source], source)
    if hasattr(source, "column_names") and hasattr(source, "__getitem__"):
        return Rows(source, f"{type(source).__module__}.{type(source).__name__}")
    if isinstance(source, Iterable):
        return _from_iterable(source, f"a {type(source).__name__} of rows", name)
    raise DataSourceError(
        f"{name}={source!r} must be {_ALLOWED}: {type(source).__name__} is none of these. "
        "Pass a path or a list of rows."
    )


def _is_file(item: Any) -> bool:
    return isinstance(item, (str, Path)) and Path(item).expanduser().suffix in _SUFFIXES


def _read_named(text: str, options: dict[str, Any], name: str) -> Rows:
    path = Path(text).expanduser()
    if path.is_file():
        return _read_file(path, name)
    if path.is_dir():
        return _read_hugging_face(str(path), options, name)
    if any(character in text for character in "*?["):
        matches = sorted(glob.glob(str(path), recursive=True))
        if matches:
            return _concatenate([_read_file(Path(match), name) for match in matches], text)
    if path.suffix in _SUFFIXES or text.startswith((".", "/", "~")):
        raise DataSourceError(_missing_file(path, text, name))
    if looks_dotted(text):
        function = import_dotted(text, name=name)
        rows = function(**options.get("kwargs", {})) if callable(function) else function
        return _from_iterable(rows, text, name)
    return _read_hugging_face(text, options, name)


def _missing_file(path: Path, text: str, name: str) -> str:
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    if near:
        remedy = f"Did you mean {str(parent / near[0])!r}"
    elif not parent.is_dir():
        remedy = f"The folder {str(parent.absolute())!r} does not exist either: check the path"
    else:
        remedy = f"Check the path (relative paths start at {str(Path.cwd())!r})"
    return f"{name}={text!r} must be a file or folder that exists: there is none. {remedy}."


def _read_file(path: Path, name: str) -> Rows:
    if not path.is_file():
        raise DataSourceError(_missing_file(path, str(path), name))
    if path.suffix in _PARQUET:
        return _read_parquet(path, name)
    if path.suffix in _TEXT:
        lines = path.read_text(encoding="utf-8").split("\n")
        return Rows([{"text": line} for line in lines if line.strip()], str(path))
    if path.suffix in _JSON_LINES:
        return _from_iterable(_json_values(path, name), str(path), name)
    raise DataSourceError(
        f"{name}={str(path)!r} must end in one of {list(_SUFFIXES)}: the format of "
        f"{path.suffix or 'a name without an ending'!r} is not known. Rename or convert it."
    )


def _read_parquet(path: Path, name: str) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return Rows(pq.read_table(path), str(path))
    except pa.ArrowInvalid as error:
        raise DataSourceError(
            f"{name}={str(path)!r} must be a Parquet file: {error}. Write it again as Parquet, "
            "or give it the ending of its format."
        ) from error


def _json_values(path: Path, name: str) -> Iterator[Any]:
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        try:
            yield from json.loads(text)
        except json.JSONDecodeError as error:
            raise DataSourceError(
                f"{name}={str(path)!r} must hold a JSON array or one JSON object for each line: "
                f"{error}. Correct the file."
            ) from error
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise DataSourceError(
                f"{name}={str(path)!r} must hold one JSON object for each line: line {number} is "
                f"{line[:80]!r} ({error}). Correct or remove the line."
            ) from error


def _from_iterable(values: Any, description: str, name: str) -> Rows:
    if hasattr(values, "column_names") and hasattr(values, "__getitem__"):
        return Rows(values, description)
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise DataSourceError(
            f"{name}={description} must give an iterable of dicts or strings: it gave "
            f"{type(values).__name__}. Return a list of rows."
        )
    rows = []
    for number, value in enumerate(values):
        if isinstance(value, str):
            value = {"text": value}
        if not isinstance(value, Mapping):
            raise DataSourceError(
                f"{name}={description} must give dicts or strings: row {number} is "
                f"{type(value).__name__} {str(value)[:80]!r}. Make each row a dict of columns."
            )
        rows.append(dict(value))
    return Rows(rows, description)


def _concatenate(parts: Sequence[Rows], source: Any) -> Rows:
    if len(parts) == 1:
        return parts[0]
    return Rows([row for part in parts for row in part], f"{len(parts)} files ({source})")


def _rename(rows: Rows, columns: Mapping[str, str], name: str) -> Rows:
    require_columns(rows, columns.values())
    old_to_new = {old: new for new, old in columns.items()}
    renamed = [{old_to_new.get(key, key): value for key, value in row.items()} for row in rows]
    return Rows(renamed, rows.description)


def _read_hugging_face(text: str, options: dict[str, Any], name: str) -> Rows:
    """A folder or hub id, through the `datasets` library (imported only here)."""
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    split = options.get("split")
    try:
        if (Path(text) / "state.json").exists() or (Path(text) / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(text)
        else:
            loaded = datasets.load_dataset(
                text, options.get("name"), revision=options.get("revision")
            )
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise DataSourceError(
            f"{name}={text!r} must be {_ALLOWED}: there is no such file or folder, and reading it "
            f"as a data set failed ({type(error).__name__}: {str(error)[:300]}). Check the "
            "spelling, or the connection where it is a hub id."
        ) from error
    if isinstance(loaded, Mapping):
        wanted = split or ("train" if "train" in loaded or len(loaded) > 1 else next(iter(loaded)))
        if wanted not in loaded:
            raise DataSourceError(
                f"{name} split={wanted!r} must be a split of {text!r}: it has {list(loaded)}. "
                f"Write {{'path': {text!r}, 'split': ...}}."
            )
        loaded = loaded[wanted]
    return Rows(loaded, text)
