"""Files of rows: JSON Lines, CSV, TSV, Parquet and plain text."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rllib_llm.data.rows import Rows
from rllib_llm.shared.errors import Problems, nearest, require

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")
_TABLES = (".csv", ".tsv")
_TEXT = (".txt", ".text", ".md")
_LARGE_BYTES = 64 * 1024**2  # of a Parquet file, which is compressed
# Of a mapped file, which is opened by reading the head of every batch: of 1,000 rows by default.
_BATCH_ROWS = 2**16
SUFFIXES = _JSON_LINES + _TABLES + _PARQUET + _TEXT
# Columns of texts, which are not read as numbers: "7" is a prompt as well.
_ALWAYS_TEXT = (
    "prompt", "completion", "text", "chosen", "rejected", "question", "answer", "instruction",
)  # fmt: skip


def missing_file(path: Path, text: str, name: str) -> Problems:
    """The error for a file that is not there, with the nearest name that is."""
    parent = path.parent
    near = nearest(path.name, os.listdir(parent) if parent.is_dir() else [], 1)
    remedy = f"Check the path (relative paths start at {str(Path.cwd())!r})"
    if near:
        remedy = f"Did you mean {str(parent / near[0])!r}?"
    elif not parent.is_dir():
        remedy = f"The folder {str(parent.absolute())!r} does not exist either: check the path"
    return Problems(name, "be a file or folder that exists", "there is none", remedy, text)


def read_file(path: Path, name: str) -> Rows:
    """Rows of one file, its format known by its ending.

    Raises:
        Problems: no such file, another format, a broken line (numbered).
    """
    if not path.is_file():
        raise missing_file(path, str(path), name)
    suffix = path.suffix.lower()
    if suffix in _PARQUET:
        return _read_parquet(path, name)
    if suffix in _TEXT:
        return rows_of(filter(str.strip, text_of(path, name).split("\n")), str(path), name)
    if suffix in _TABLES:
        return _read_table(path, name)
    if suffix in _JSON_LINES:
        return rows_of(_json_values(path, name), str(path), name)
    rule = f"end in one of {list(SUFFIXES)}"
    raise Problems(name, rule, "", "Rename or convert it", str(path))


def text_of(path: Path, name: str = "file") -> str:
    """The text of a file in UTF-8, without the byte order mark that some editors put first."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        content = path.read_bytes()
        line = content.count(b"\n", 0, error.start) + 1
        utf_16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        likely = "UTF-16" if utf_16 else "Windows-1252 or Latin-1"
        raise Problems(
            name, "be text in UTF-8", f"line {line} holds the byte 0x{content[error.start]:02x}: "
            f"it is probably {likely}", "Convert it: iconv -f "
            f"{'UTF-16' if utf_16 else 'WINDOWS-1252'} -t UTF-8 {path.name}", str(path),
        ) from error  # fmt: skip


def _read_table(path: Path, name: str) -> Rows:
    """Rows of a table with a line of column names: separated by tabs, commas or semicolons."""
    text = text_of(path, name)
    header = text.partition("\n")[0]
    separator = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    table = iter((_rows_between_tabs(text) if separator == "\t" else None) or reader)
    rows: list[list[str]] = []
    try:
        names = [column.strip() for column in next(table, [])]
        for row in table:
            if any(row) and len(row) != len(names):
                rule = f"have as many values in each row as columns {names}"
                what = f"line {reader.line_num} has {len(row)}"
                remedy = "Put values that hold the separator into double quotes"
                raise Problems(name, rule, what, remedy, str(path))
            if any(row):
                rows.append(row)
    except csv.Error as error:
        raise Problems(
            name, f"be a table of values separated by {separator!r}",
            f"line {reader.line_num} is not ({error})", "Correct its quotation marks", str(path),
        ) from error  # fmt: skip
    # Tables of pandas whose columns have no names number them; another number is a value.
    has_values = any(_NUMBER.fullmatch(name) and name != str(i) for i, name in enumerate(names))
    is_quoted = any(re.fullmatch("'.*'", column) for column in names)
    require(
        all(names) and len({*names}) == len(names) and not has_values and not is_quoted, name,
        str(path), "begin with a line of different column names, without single quotes",
        f"it begins with {names}", "Add the line, such as prompt,answer, or rename a column",
    )  # fmt: skip
    columns = [_as_typed([row[i] for row in rows], column) for i, column in enumerate(names)]
    values = zip(*columns, strict=True)
    return Rows([dict(zip(names, row, strict=True)) for row in values], str(path))


def _rows_between_tabs(text: str) -> list[list[str]] | None:
    """The rows of a table of several columns between tabs, as its quotation marks say where all of
    them enclose values, else one of each line, None where that is no table either. A mark is then
    part of the value, as in texts that begin with one, unless marks enclose that value."""
    with contextlib.suppress(csv.Error):
        whole = [*filter(None, csv.reader(io.StringIO(text, newline=""), "excel-tab", strict=True))]
        if len({*map(len, whole)}) == 1:
            return whole
    rows = [line.split("\t") for line in text.split("\n") if line] or [[""]]
    if {len(row) for row in rows} - {len(rows[0])} or len(rows[0]) == 1:
        return None
    return [
        [v[1:-1].replace('""', '"') if _QUOTED.fullmatch(v) else v for v in row] for row in rows
    ]


def _as_typed(values: list[str], column: str) -> list[Any]:
    """A column's values as numbers or bools if all can be converted without loss ("007" stays
    text); None for empty cells."""
    given = {value for value in values if value}
    if column in _ALWAYS_TEXT:
        return list(values)
    if given and given <= {"true", "false", "True", "False", "TRUE", "FALSE"}:
        return [value.lower() == "true" if value else None for value in values]
    for kind, pattern in ((int, _INTEGER), (float, _NUMBER)):
        if given and all(pattern.fullmatch(value) for value in given):
            return [kind(value) if value else None for value in values]
    return [value or None for value in values]


_QUOTED = re.compile(r'"(?:[^"]|"")*"')
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,17})")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,17})(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")


def _read_parquet(path: Path, name: str) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    failures: tuple[type[Exception], ...] = (pa.ArrowException, OSError)
    try:
        if path.stat().st_size <= _LARGE_BYTES:
            return Rows(pq.read_table(path), str(path))
        # Converted once into the cache on disk (HF_DATASETS_CACHE) and memory-mapped, so that it
        # uses no memory of a process.
        import datasets

        failures = (*failures, datasets.exceptions.DatasetGenerationError)
        with contextlib.ExitStack() as stack:
            if datasets.is_progress_bar_enabled():
                datasets.disable_progress_bars()
                stack.callback(datasets.enable_progress_bars)
            mapped = datasets.Dataset.from_parquet(str(path), writer_batch_size=_BATCH_ROWS)
        return Rows(mapped, str(path))
    except failures as error:
        remedy = "Write it again as Parquet, or give it the ending of its format"
        rule = "be a Parquet file that can be read"
        why = error.__cause__ or error
        raise Problems(name, rule, why, remedy, str(path)) from error


def _json_values(path: Path, name: str) -> Iterator[Any]:
    text = text_of(path, name)
    is_array = text.lstrip().startswith("[")
    for number, line in enumerate([text] if is_array else text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number of too many digits
            rule = "hold a JSON array" if is_array else "hold one JSON object for each line"
            what = str(error)
            if not is_array:
                column = f" at character {error.colno}" if hasattr(error, "colno") else ""
                what = f"line {number} is {line[:80]!r} ({getattr(error, 'msg', error)}{column})"
            raise Problems(name, rule, what, "Correct it", str(path)) from error
        yield from found if is_array else [found]


def rows_of(values: Any, description: str, name: str) -> Rows:
    """Rows of an iterable of dicts or strings (a string becomes {"text": string}).

    Raises:
        Problems: it is no iterable, or a row is neither.
    """
    if hasattr(values, "column_names") and hasattr(values, "__len__"):
        return Rows(values, description)
    if hasattr(values, "__arrow_c_stream__"):  # a data frame of pandas, polars or DuckDB
        import pyarrow as pa

        return Rows(pa.table(values), description)
    is_iterable = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping))
    require(is_iterable, name, description, "give an iterable of dicts or strings",
            f"it gave {type(values).__name__}", "Return a list of rows")  # fmt: skip
    rows = []
    for number, value in enumerate(values):
        row = {"text": value} if isinstance(value, str) else value
        if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
            what = f"row {number} is {type(row).__name__} {str(row)[:80]!r}"
            rule = "give strings, or dicts with texts as keys"
            raise Problems(name, rule, what, "Make each row a dict of columns", description)
        rows.append(dict(row))
    return Rows(rows, description)
