"""JSON values in conversations: what can be written, copies, what a tool's schema objects to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

_HALVES = re.compile("[\ud800-\udfff]")  # of characters, which JSON can name
_MOST_LEVELS = 64  # of objects and lists in arguments, which templates and tools walk by recursion
_FLAT = (int, str, float)  # most parts of lists, as of token ids
_LARGEST = 10**4300  # of integers: Python reads and writes no more digits


def _or_null(keyword: str) -> Callable[..., Iterator[Any]]:
    """A keyword of JSON Schema that lets null pass where the schema is also `nullable`."""
    check = Draft202012Validator.VALIDATORS[keyword]

    def checked(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[Any]:
        if value is not None or not schema.get("nullable"):
            yield from check(validator, wanted, value, schema) or ()

    return checked


# transformers writes `X | None` as X that is `nullable`, a word of OpenAPI's. A `pattern` is left
# to the tool: ^(a+)+$ takes Python for ever on what a policy may write, and all others wait for it.
Arguments = extend(
    Draft202012Validator,
    {"pattern": lambda *_: (), **{word: _or_null(word) for word in ("type", "enum")}},
)


def objection(schema: Mapping[str, Any], value: Any, part: Any = None) -> str:
    """The objection of a tool's schema, or of a part of it, to a value; "" where it fits, or where
    the schema cannot be checked (references to other sites)."""
    try:
        validator = Arguments(schema)
        (validator if part is None else validator.evolve(schema=part)).validate(value)
    except ValidationError as error:
        return str(error.message)
    except Exception:  # noqa: BLE001  (of somebody's schema: the tool says what is wrong)
        return ""
    return ""


def broken_up(value: Any, special: Sequence[str] = ()) -> Any:
    """The value, no text in it one of `special`, or with half of a character (a lone surrogate)."""
    if isinstance(value, str):
        value = value.encode(errors="replace").decode()
        for token in special:
            value = value.replace(token, f"{token[0]} {token[1:]}")
        return value
    if isinstance(value, Mapping):
        return {broken_up(key, special): broken_up(part, special) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [broken_up(part, special) for part in value]
    return value


def copied(value: Any, levels: int = _MOST_LEVELS) -> Any:
    """A deep copy of containers and arrays, for a user's function that may change what it is given;
    other objects, and parts deeper than `levels`, are shared."""
    if isinstance(value, dict) and levels:
        return {key: copied(part, levels - 1) for key, part in value.items()}
    if (isinstance(value, list) or type(value) is tuple) and levels:
        parts = [part if type(part) in _FLAT else copied(part, levels - 1) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value.copy() if isinstance(value, (set, bytearray, np.ndarray)) else value


def as_json(value: Any) -> Any:
    """The value as one of JSON: NaN and infinity are null, dates and other objects their texts."""
    if isinstance(value, Mapping):
        return {str(key): as_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(part) for part in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return broken_up(str(value))


def is_json(value: Any, levels: int = _MOST_LEVELS) -> bool:
    """Whether a value is one of JSON, with finite numbers and whole characters, and nested no
    deeper than `levels`."""
    if isinstance(value, Mapping):
        return levels > 0 and all(
            isinstance(key, str) and is_json(key) and is_json(each, levels - 1)
            for key, each in value.items()
        )
    if isinstance(value, list):
        return levels > 0 and all(is_json(each, levels - 1) for each in value)
    if isinstance(value, str):
        return not _HALVES.search(value)
    return (
        value is None
        or (isinstance(value, int) and abs(value) < _LARGEST)
        or (isinstance(value, float) and math.isfinite(value))
    )
