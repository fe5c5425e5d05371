"""Lookup of settings by config class: rows of the tables, defaults, known names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_llm.config.setting import IN_CONFIG, Section, Setting

ConfigClass = Any  # a subclass of TabledConfig, which imports this module
Function = TypeVar("Function", bound=Callable[..., Any])


def cached(function: Function) -> Function:
    """`functools.cache` with the wrapped function's annotations, which mypy would otherwise
    lose."""
    return cast(Function, functools.cache(function))


@cached
def defaults(config_class: ConfigClass) -> Any:
    """A config of the class as it is made; nobody changes it."""
    return config_class()


@cached
def table(config_class: ConfigClass) -> Mapping[str, Setting]:
    """Our rows by name, those kept in `env_config` among them."""
    return {row.name: row for section in config_class.sections for row in section.settings}


@cached
def rllib_table(config_class: ConfigClass) -> Mapping[str, Setting]:
    """RLlib's own settings that act under this class, by name."""
    return {row.name: row for section in config_class.rllib_sections for row in section.settings}


@cached
def section_names(config_class: ConfigClass) -> tuple[str, ...]:
    """Names of the sections, each once, ours first."""
    sections = (*config_class.sections, *config_class.rllib_sections)
    return tuple(dict.fromkeys(section.name for section in sections))


@cached
def section_rows(config_class: ConfigClass, name: str) -> Mapping[str, Setting]:
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


def _named(config_class: ConfigClass, names: tuple[str, ...]) -> Iterator[Section]:
    return (section for section in config_class.sections if section.name in names)


@cached
def row_called(config_class: ConfigClass, section: str, name: str) -> Setting | None:
    """The row that `name` means in a section: by its short name or the one it has everywhere."""
    rows = section_rows(config_class, section)
    return rows.get(name) or {row.name: row for row in rows.values()}.get(name)


@cached
def _rllib_attributes() -> frozenset[str]:
    return frozenset(vars(AlgorithmConfig()))


@cached
def plain_fields(config_class: ConfigClass) -> frozenset[str]:
    """Attributes that a subclass has added without a row."""
    rows = table(config_class).values()
    known = {row.attribute or row.name for row in rows} | _rllib_attributes()
    own = (name for name in vars(defaults(config_class)) if not name.startswith("_"))
    return frozenset(name for name in own if name not in known)


@cached
def known_names(config_class: ConfigClass) -> frozenset[str]:
    """Every key that a user may set at the top of a config, by its name in YAML."""
    rows = {name for name, row in table(config_class).items() if row.place == IN_CONFIG}
    names = rows | set(rllib_table(config_class)) | plain_fields(config_class)
    return frozenset(names | ({"lambda"} if "lambda_" in names else set()))


@cached
def other_names(config_class: ConfigClass) -> Mapping[str, Setting]:
    """Names of our settings in TRL, RLlib's PPO and others -> our row."""
    found: dict[str, Setting] = {}
    known = known_names(config_class)
    for kind in ("trl", "rllib", "also"):
        for row in table(config_class).values():
            for name in getattr(row, kind):
                if name not in known:
                    found.setdefault(name, row)
    return found


@cached
def sections_of(config_class: ConfigClass) -> Mapping[str, str]:
    """The name of every setting -> the method that sets it."""
    sections = (*config_class.rllib_sections, *config_class.sections)
    return {row.name: section.name for section in sections for row in section.settings}
