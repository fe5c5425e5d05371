"""What is in the table for a config class: its rows, their defaults, and the names it knows."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_llm.algorithms.settings.setting import IN_CONFIG, Section, Setting


@functools.cache
def defaults(config_class: type) -> Any:
    """A config of the class as it is made; nobody changes it."""
    return config_class()


@functools.cache
def table(config_class: type) -> Mapping[str, Setting]:
    """Our rows by name, those kept in `env_config` among them."""
    return {row.name: row for section in config_class.sections for row in section.settings}


@functools.cache
def rllib_table(config_class: type) -> Mapping[str, Setting]:
    """RLlib's own settings that act under this class, by name."""
    return {row.name: row for section in config_class.rllib_sections for row in section.settings}


@functools.cache
def section_names(config_class: type) -> tuple[str, ...]:
    """Names of the sections, each once, ours first."""
    sections = (*config_class.sections, *config_class.rllib_sections)
    return tuple(dict.fromkeys(section.name for section in sections))


@functools.cache
def section_rows(config_class: type, name: str) -> Mapping[str, Setting]:
    """The rows that the section's method takes, by the name it shows; ours first."""
    rows: dict[str, Setting] = {}
    parts = [s for s in config_class.sections if s.name == name]
    for section in parts:
        rows |= {row.in_section: row for row in section.settings}
    for section in (s for part in parts for s in _named(config_class, part.also)):
        rows |= {row.name: row for row in section.settings if row.place == IN_CONFIG}
    for section in config_class.rllib_sections:
        if section.name == name:
            rows |= {row.name: row for row in section.settings}
    return rows


def _named(config_class: type, names: tuple[str, ...]) -> Iterator[Section]:
    return (section for section in config_class.sections if section.name in names)


@functools.cache
def row_called(config_class: type, section: str, name: str) -> Setting | None:
    """The row that `name` means in a section: by its short name or the one it has everywhere."""
    rows = section_rows(config_class, section)
    by_name = {row.name: row for row in rows.values()} | rows
    return by_name.get(name)


@functools.cache
def _rllib_attributes() -> frozenset[str]:
    return frozenset(vars(AlgorithmConfig()))


@functools.cache
def plain_fields(config_class: type) -> frozenset[str]:
    """Attributes that a subclass has added without a row."""
    rows = table(config_class).values()
    known = {row.attribute or row.name for row in rows} | _rllib_attributes()
    own = (name for name in vars(defaults(config_class)) if not name.startswith("_"))
    return frozenset(name for name in own if name not in known)


@functools.cache
def known_names(config_class: type) -> frozenset[str]:
    """Every key that a user may set at the top of a config, by its name in YAML."""
    rows = {name for name, row in table(config_class).items() if row.place == IN_CONFIG}
    names = rows | set(rllib_table(config_class)) | plain_fields(config_class)
    return frozenset(names | ({"lambda"} if "lambda_" in names else set()))


@functools.cache
def other_names(config_class: type) -> Mapping[str, Setting]:
    """What TRL, RLlib's PPO and others call our settings -> our row."""
    found: dict[str, Setting] = {}
    known = known_names(config_class)
    for kind in ("trl", "rllib", "also"):
        for row in table(config_class).values():
            for name in getattr(row, kind):
                if name not in known:
                    found.setdefault(name, row)
    return found


@functools.cache
def sections_of(config_class: type) -> Mapping[str, str]:
    """The name of every setting -> the method that sets it."""
    sections = (*config_class.rllib_sections, *config_class.sections)
    return {row.name: section.name for section in sections for row in section.settings}
