"""YAML as people write it: `1e-5` is a number, a key written twice is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rllib_llm.shared.errors import UserError

# YAML 1.1 wants a dot and a sign (1.0e-5); this is the float of YAML 1.2, which needs neither.
FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")


class Loader(yaml.SafeLoader):
    """The safe YAML loader with YAML 1.2 floats and unique keys."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """As PyYAML's. Keys are looked at here, where they stand as the file has them: merge keys
        (`<<: *other`) add to a mapping later."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key != "<<":
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is written twice", key_node.start_mark
                    )
                seen.add(key)
        return node


Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def parse(text: str, where: str) -> Any:
    """Return the value that the YAML (or JSON) `text` holds.

    Raises:
        UserError: `text` is not YAML; the message names line and column.
    """
    try:
        return yaml.load(text, Loader)  # noqa: S506 - Loader is a SafeLoader
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {error}") from error


def read(path: Path) -> Any:
    """Return what the YAML file at `path` holds.

    Raises:
        UserError: no such file, or not YAML.
    """
    if not path.is_file():
        near = (
            sorted(str(p) for p in path.parent.glob("*.y*ml"))[:8] if path.parent.is_dir() else []
        )
        hint = (
            f"Files there: {', '.join(near)}." if near else "`rllib example list` names ready ones."
        )
        raise UserError(f"file={str(path)!r} must be a YAML file: there is none. {hint}")
    return parse(path.read_text(encoding="utf-8"), str(path))


def parse_mapping(text: str, option: str) -> dict[str, Any]:
    """Return the mapping that the option's value `text` holds: JSON, YAML, or a file with either.

    Raises:
        UserError: it is something else.
    """
    value = read(Path(text)) if text.endswith((".yaml", ".yml", ".json")) else parse(text, option)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(
            f"{option}={text!r} must be a mapping: it is {type(value).__name__}. "
            f"Write it as JSON: {option} '{{\"lr\": 1e-5}}'."
        )
    return value
