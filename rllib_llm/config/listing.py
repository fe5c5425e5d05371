"""The table of an algorithm's settings as plain data, for the command line and documentation."""

from __future__ import annotations

from typing import Any

from rllib_llm.config.lookup import ConfigClass, defaults, section_names, sections_of
from rllib_llm.config.section_method import shown_rows
from rllib_llm.config.setting import Setting


def settings_of(config_class: ConfigClass) -> list[dict[str, Any]]:
    """One mapping for each setting that has an effect under the class, section by section.

    Keys: section, name (in its section), flat (its name everywhere else), place ("config" or
    "env_config"), type, default (as Python writes it), range, unit, meaning, note, acts (when it
    has an effect, "" for always), trl, rllib and also (names elsewhere).
    """
    home = sections_of(config_class)
    return [
        _described(config_class, section, name, row)
        for section in section_names(config_class)
        for name, row in shown_rows(config_class, section).items()
        if home[row.name] == section
    ]


def _described(config_class: ConfigClass, section: str, name: str, row: Setting) -> dict[str, Any]:
    return {
        "section": section,
        "name": name,
        "flat": row.name,
        "place": row.place,
        "type": row.type_name,
        "default": _shown(row.value(defaults(config_class))),
        "range": row.range,
        "unit": row.unit,
        "meaning": row.headline,
        "note": row.note,
        "acts": row.effect,
        "trl": list(row.trl),
        "rllib": list(row.rllib),
        "also": list(row.also),
    }


def _shown(value: Any) -> str:
    """A default as Python writes it; of a class or function its name."""
    return value.__name__ if isinstance(value, type) or callable(value) else repr(value)
