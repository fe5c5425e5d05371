"""Files of rows: JSON Lines, Parquet and plain text."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rllib_llm.data.rows import DataSourceError, Rows

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")
_TEXT = (".txt", ".text", ".md")
SUFFIXES = _JSON_LINES + _PARQUET + _TEXT


def missing_file(path: Path, text: str, name: str) -> str:
    """The message for a file that is not there, with the nearest name that is."""
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


def read_file(path: Path, name: str) -> Rows:
    """Rows of one file, its format known by its ending.

    Raises:
        DataSourceError: no such file, another format, a broken line (numbered).
    """
    if not path.is_file():
        raise DataSourceError(missing_file(path, str(path), name))
    if path.suffix in _PARQUET:
        return _read_parquet(path, name)
    if path.suffix in _TEXT:
        lines = path.read_text(encoding="utf-8").split("\n")
        return Rows([{"text": line} for line in lines if line.strip()], str(path))
    if path.suffix in _JSON_LINES:
        return rows_of(_json_values(path, name), str(path), name)
    raise DataSourceError(
        f"{name}={str(path)!r} must end in one of {list(SUFFIXES)}: the format of "
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


def rows_of(values: Any, description: str, name: str) -> Rows:
    """Rows of an iterable of dicts or strings (a string becomes {"text": string}).

    Raises:
        DataSourceError: it is no iterable, or a row is neither.
    """
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
