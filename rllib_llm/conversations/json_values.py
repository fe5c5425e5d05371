"""JSON values in conversations: what can be written, what a tool's schema objects to."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from pydantic_core import SchemaError, SchemaValidator, core_schema

from rllib_llm.data.encoding import broken_up

_HALVES = re.compile("[\ud800-\udfff]")  # of characters, which JSON can name
_MOST_LEVELS = 64  # of objects and lists in arguments, which templates and tools walk by recursion
_LARGEST = 10**4300  # of integers: Python reads and writes no more digits


def _unless(passes: Callable[[Any, Any], bool], keyword: str) -> Callable[..., Iterator[Any]]:
    """A keyword of JSON Schema that lets a value pass where `passes(value, schema)`."""
    check = Draft202012Validator.VALIDATORS[keyword]

    def checked(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[Any]:
        if not passes(value, schema):
            yield from check(validator, wanted, value, schema) or ()

    return checked


@functools.lru_cache(1024)
def _expression(pattern: str) -> SchemaValidator | None:
    """Rust's regular expression, whose search takes linear time: ^(a+)+$ takes Python for ever on
    what a policy may write. None: it has what Rust's have not, such as looking ahead."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError:
        return None


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    expression = _expression(pattern) if isinstance(value, str) else None
    if expression is not None and not expression.isinstance_python(value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


Arguments = extend(Draft202012Validator, {
    "pattern": _pattern,
    # transformers writes `X | None` as X that is `nullable`, a word of OpenAPI's.
    **{word: _unless(lambda value, schema: value is None and bool(schema.get("nullable")), word)
       for word in ("type", "enum")},
    # Patterns that tell names apart, with which Python may take for ever, are left to the tool.
    **{word: _unless(lambda _, schema: "patternProperties" in schema, word)
       for word in ("patternProperties", "additionalProperties")},
    "unevaluatedProperties": lambda *_: (),  # in parts of the schema there may be patterns, too
})  # fmt: skip


def objection(schema: Mapping[str, Any], value: Any, part: Any = None) -> str:
    """The objection of a tool's schema, or of a part of it, to a value; "" where it fits, or where
    the schema cannot be checked (references to other sites)."""
    try:
        validator = Arguments(schema)
        (validator if part is None else validator.evolve(schema=part)).validate(value)
    except ValidationError as error:
        return str(error.message)
    except Exception:  # noqa: BLE001  (of a user's schema: the tool says what is wrong)
        return ""
    return ""


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
