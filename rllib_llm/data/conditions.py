"""Simple SQL conditions on rows, for machines without DuckDB.

status = 'trained' AND (score > 0.5 OR tokens BETWEEN 3 AND 9) AND reason IS NOT NULL
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?)|'(?P<text>(?:[^']|'')*)'"
    r"|(?P<word>[A-Za-z_]\w*)|\"(?P<quoted>[^\"]+)\"|(?P<sign><=|>=|<>|!=|=|<|>|\(|\)|,))"
)
_COMPARE = {
    "=": pc.Expression.__eq__,
    "!=": pc.Expression.__ne__,
    "<>": pc.Expression.__ne__,
    "<": pc.Expression.__lt__,
    "<=": pc.Expression.__le__,
    ">": pc.Expression.__gt__,
    ">=": pc.Expression.__ge__,
}
GRAMMAR = (
    "a condition of columns, numbers and 'texts' with =, !=, <, <=, >, >=, BETWEEN, IN, LIKE, IS "
    "[NOT] NULL, AND, OR, NOT and parentheses"
)


class ConditionError(ValueError):
    """A condition that cannot be read, or that names no column."""


def parse_condition(text: str, schema: pa.Schema) -> pc.Expression:
    """The condition as pyarrow's, over the columns of `schema`.

    Raises:
        ConditionError: saying where it cannot be read.
    """
    return _Parser(text, schema).parse()


class _Parser:
    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = text
        self._schema = schema
        self._tokens = self._tokenize(text)
        self._next = 0

    def parse(self) -> pc.Expression:
        found = self._any()
        if self._next < len(self._tokens):
            raise self._error(f"{self._tokens[self._next][1]!r} stands where the end should be")
        return found

    def _tokenize(self, text: str) -> list[tuple[str, Any]]:
        tokens, at = [], 0
        stripped = text.rstrip()
        while at < len(stripped):
            match = _TOKEN.match(stripped, at)
            if match is None:
                raise self._error(f"{stripped[at : at + 12]!r} is nothing it can hold")
            kind = match.lastgroup or ""
            tokens.append((kind, match[kind]))
            at = match.end()
        return tokens

    def _error(self, reason: str) -> ConditionError:
        return ConditionError(
            f"where={self._text!r} must be {GRAMMAR}: {reason}. Correct it, or pip install duckdb "
            "for any SQL."
        )

    def _peek(self, *words: str) -> bool:
        if self._next >= len(self._tokens):
            return False
        kind, value = self._tokens[self._next]
        return kind in ("word", "sign") and value.upper() in words

    def _skip(self, *words: str) -> bool:
        found = self._peek(*words)
        self._next += found
        return found

    def _require(self, word: str) -> None:
        if not self._skip(word):
            raise self._error(f"{word} is missing")

    def _any(self) -> pc.Expression:
        found = self._all()
        while self._skip("OR"):
            found = found | self._all()
        return found

    def _all(self) -> pc.Expression:
        found = self._one()
        while self._skip("AND"):
            found = found & self._one()
        return found

    def _one(self) -> pc.Expression:
        if self._skip("NOT"):
            return ~self._one()
        if self._skip("("):
            found = self._any()
            self._require(")")
            return found
        return self._comparison()

    def _comparison(self) -> pc.Expression:
        column = self._column()
        if self._skip("IS"):
            is_not = self._skip("NOT")
            self._require("NULL")
            return ~column.is_null() if is_not else column.is_null()
        negated = self._skip("NOT")
        if self._skip("IN"):
            found = column.isin(self._values())
        elif self._skip("LIKE"):
            found = pc.match_like(column, str(self._value()))
        elif self._skip("BETWEEN"):
            low = self._value()
            self._require("AND")
            found = (column >= low) & (column <= self._value())
        elif negated or not self._peek(*_COMPARE):
            return self._truth(column, negated)
        else:
            sign = self._tokens[self._next][1]
            self._next += 1
            found = _COMPARE[sign](column, pc.scalar(self._value()))
        return ~found if negated else found

    def _truth(self, column: pc.Expression, negated: bool) -> pc.Expression:
        """A column of True and False by itself: `valid`."""
        name = str(self._tokens[self._next - 1][1])
        if negated or name not in self._schema.names or self._schema.field(name).type != pa.bool_():
            raise self._error(f"a comparison should follow {name!r}")
        return column

    def _column(self) -> pc.Expression:
        if self._next >= len(self._tokens):
            raise self._error("it ends where a column should stand")
        kind, name = self._tokens[self._next]
        if kind not in ("word", "quoted") or name not in self._schema.names:
            raise self._error(f"{name!r} is no column; there are {', '.join(self._schema.names)}")
        self._next += 1
        return pc.field(name)

    def _values(self) -> list[Any]:
        self._require("(")
        values = [self._value()]
        while self._skip(","):
            values.append(self._value())
        self._require(")")
        return values

    def _value(self) -> Any:
        if self._next >= len(self._tokens):
            raise self._error("it ends where a value should stand")
        kind, value = self._tokens[self._next]
        self._next += 1
        if kind == "number":
            return float(value) if re.search(r"[.eE]", value) else int(value)
        if kind == "text":
            return value.replace("''", "'")
        if kind == "word" and value.upper() in ("TRUE", "FALSE"):
            return value.upper() == "TRUE"
        raise self._error(f"{value!r} stands where a number or 'text' should")
