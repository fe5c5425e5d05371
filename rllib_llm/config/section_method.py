"""The methods of a config, made from the table: `.training(...)`, `.sampling(...)`, ...; and the
table as plain data, for the command line and documentation."""

from __future__ import annotations

import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any, Literal

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_llm.config.lookup import (
    ConfigClass,
    cached,
    defaults,
    section_names,
    section_rows,
    sections_of,
)
from rllib_llm.config.setting import Setting

WIDTH = 96


class SectionMethod:
    """A config method that sets one section; signature and documentation show the defaults of the
    class on which it is looked up."""

    def __init__(self, section: str = ""):
        self.section = section

    def __set_name__(self, owner: type, name: str) -> None:
        self.section = self.section or name

    def __get__(self, config: Any, owner: type) -> Callable[..., Any]:
        method = _method(owner, self.section)
        return method if config is None else types.MethodType(method, config)


class Default:
    """Prints as the default that a class has for a setting. It is looked up when it is printed: a
    class can be asked for its methods while it is still being made."""

    def __init__(self, config_class: ConfigClass, row: Setting):
        self.config_class, self.row = config_class, row

    @property
    def value(self) -> Any:
        return self.row.value(defaults(self.config_class))

    def __repr__(self) -> str:
        return repr(self.value)


@cached
def _method(config_class: ConfigClass, section: str) -> Callable[..., Any]:
    def method(self, *args: Any, **settings: Any):
        return self.set_section(section, args, settings)

    method.__name__ = section
    method.__qualname__ = f"{config_class.__name__}.{section}"
    method.__module__ = config_class.__module__
    method.__doc__ = documentation(config_class, section)
    method.__signature__ = signature(config_class, section)  # type: ignore[attr-defined]
    return method


def shown_rows(config_class: ConfigClass, section: str) -> dict[str, Setting]:
    """The section's rows that have an effect under the class."""
    rows = section_rows(config_class, section).items()
    ignored = config_class.ignored_settings
    return {name: row for name, row in rows if row.can_act and row.name not in ignored}


def signature(config_class: ConfigClass, section: str) -> inspect.Signature:
    """The section's settings as keyword arguments, what RLlib takes by position as it does."""
    by_rllib = rllib_parameters(section)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, row in shown_rows(config_class, section).items():
        kind: Any = inspect.Parameter.KEYWORD_ONLY
        if name in by_rllib:
            kind = by_rllib[name].kind
        annotation: Any = row.type
        if row.choices:
            annotation = Literal[(*row.choices, *((None,) if row.is_optional else ()))]
        parameters.append(
            inspect.Parameter(
                name,
                kind,
                default=Default(config_class, row),
                annotation=inspect.Parameter.empty if annotation is Any else annotation,
            )
        )
    return inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))


@functools.cache
def rllib_parameters(section: str) -> dict[str, inspect.Parameter]:
    """The parameters of RLlib's method of that name, if there is one."""
    method = getattr(AlgorithmConfig, section, None)
    if method is None:
        return {}
    return {k: v for k, v in inspect.signature(method).parameters.items() if k != "self"}


def documentation(config_class: ConfigClass, section: str) -> str:
    """The method's docstring: the section's description and a paragraph for each setting."""
    sections = (*config_class.sections, *config_class.rllib_sections)
    meanings = dict.fromkeys(part.meaning for part in sections if part.name == section)
    rows = shown_rows(config_class, section)
    lines = [" ".join(meanings), "", "Args:"]
    for name, row in rows.items():
        text = f"{name}: {row.sentence}"
        lines += textwrap.wrap(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"


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
