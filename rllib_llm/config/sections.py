"""The sections of a config class: rows, defaults, known names; the methods made from them, such as
`.training(...)`; all of it as plain data, for the command line and documentation.

Also problems of rules between settings, and warnings of settings that do nothing under the others:
a typo in a plan costs a night.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, cast

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_llm.shared.errors import Problem, Problems, warning
from rllib_llm.shared.setting import IN_CONFIG, Setting

ConfigClass = Any  # a subclass of TabledConfig, which imports this module
Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value")
Rule = Callable[[Any], Iterable[Problem]]  # of a config: what of it breaks the rule


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


def same(value: Any, other: Any) -> bool:
    """Whether two values of a setting are equal; those that cannot be compared are not."""
    if value is other:
        return True
    try:
        return bool(value == other)
    except (ValueError, RuntimeError):  # arrays and tensors
        return False


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
    for section in (s for part in parts for s in config_class.sections if s.name in part.also):
        rows |= {row.name: row for row in section.settings if row.place == IN_CONFIG}
    for section in config_class.rllib_sections:
        if section.name == name:
            rows |= {row.name: row for row in section.settings}
    return rows


@cached
def row_called(config_class: ConfigClass, section: str, name: str) -> Setting | None:
    """The row that `name` means in a section: by its short name or the one it has everywhere."""
    rows = section_rows(config_class, section)
    return rows.get(name) or {row.name: row for row in rows.values()}.get(name)


@cached
def plain_fields(config_class: ConfigClass) -> frozenset[str]:
    """Attributes that a subclass has added without a row."""
    rows = table(config_class).values()
    known = {row.attribute or row.name for row in rows} | vars(AlgorithmConfig()).keys()
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
    sections = (*config_class.rllib_sections, *reversed(config_class.sections))
    return {row.name: section.name for section in sections for row in section.settings}


WIDTH = 96


class SectionMethod:
    """A config method that sets one section; signature and documentation show the defaults of the
    class on which it is looked up."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.section = name

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
    def method(*args: Any, **settings: Any):
        if not args or not isinstance(args[0], AlgorithmConfig):
            made = f"{config_class.__name__}()"
            raise TypeError(f"{section} is a method of a config: write {made}.{section}(...).")
        return cast(Any, args[0]).set_section(section, args[1:], settings)

    method.__name__ = section
    method.__qualname__ = f"{config_class.__name__}.{section}"
    method.__module__ = config_class.__module__
    method.__doc__ = documentation(config_class, section)
    # The settings as keyword arguments; what RLlib takes by position as it does.
    by_rllib = rllib_parameters(section)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, row in shown_rows(config_class, section).items():
        kind: Any = by_rllib[name].kind if name in by_rllib else inspect.Parameter.KEYWORD_ONLY
        annotation: Any = inspect.Parameter.empty if row.type is Any else row.type
        if row.choices:
            values: Any = (*row.choices, None) if row.is_optional else row.choices
            annotation = Literal[values]
        default = Default(config_class, row)
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    parameters.sort(key=lambda parameter: parameter.kind)
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method


def shown_rows(config_class: ConfigClass, section: str) -> dict[str, Setting]:
    """The section's rows that have an effect under the class."""
    rows = section_rows(config_class, section).items()
    ignored = config_class.ignored_settings
    return {name: row for name, row in rows if row.name not in ignored}


def first_setting(config_class: ConfigClass, section: str) -> str:
    """The setting of the section that a value without a name is; its first, if it takes none."""
    named = [one.positional for one in config_class.sections if one.name == section]
    named += positional(rllib_parameters(section))
    return next(filter(None, named), next(iter(shown_rows(config_class, section))))


def positional(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Names of the parameters that may be given without a name."""
    return [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]


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
    home, found = sections_of(config_class), []
    for section in section_names(config_class):
        for name, row in shown_rows(config_class, section).items():
            default = row.value(defaults(config_class))
            if home[row.name] == section:
                found.append({
                    "section": section, "name": name, "flat": row.name, "place": row.place,
                    "type": row.type_name,
                    "default": default.__name__ if callable(default) else repr(default),
                    "range": row.range, "unit": row.unit, "meaning": row.headline,
                    "note": row.note, "acts": row.effect, "trl": list(row.trl),
                    "rllib": list(row.rllib), "also": list(row.also),
                })  # fmt: skip
    return found


# --- what is wrong, or does nothing ---------------------------------------------------------------


def wrong(
    config: Any, name: str, rule: str, reason: str, remedy: str = "Leave it out"
) -> Problem:
    """The problem of a setting of `config`, which must "be `rule`"."""
    return Problem(name, f"be {rule}", reason, remedy, getattr(config, name))


def given(value: Value | None, name: str, rule: str, reason: str, remedy: str) -> Value:
    """Returns `value`; where it is None, raises Problems, without the None, which mostly nobody has
    written."""
    if value is None:
        raise Problems(name, f"be {rule}", reason, remedy)
    return value


def no_effect(config: Any) -> Iterator[Problem]:
    """A warning for every setting that was changed from its default and is not used, and for every
    range that does not suit the loss that was chosen."""
    yield from idle(config, defaults(type(config)))
    loss, low = getattr(config, "policy_loss", None), getattr(config, "clip_param", 0.0)
    if loss == "gspo" and low >= 0.1:
        yield warning("clip_param", "be smaller with policy_loss='gspo'", "it hardly ever clips: "
                      "the ratio of a whole completion is its tokens' geometric mean, near 1",
                      "Zheng et al. 2025 use clip_param=3e-4 and clip_param_high=4e-4 for "
                      "completions of thousands of tokens; about 0.03 suits short ones", low
                      )  # fmt: skip
    if loss == "cispo" and low < 1:
        yield warning("clip_param", "be 1 with policy_loss='cispo'", "it holds weights from below, "
                      "which its paper does not (MiniMax-M1 2025)",
                      "Bound them from above with clip_param_high", low)  # fmt: skip


def idle(config: Any, other: Any) -> Iterator[Problem]:
    """Warnings of settings that `config` does not use, where they differ from `other`'s."""
    why = f"in {config.algo_class.__name__}"
    unused: dict[str, tuple[str, str]] = dict.fromkeys(config.ignored_settings, (why, "Remove it"))
    rows = {**table(type(config)), **rllib_table(type(config))}
    for row in rows.values():
        if row.place == IN_CONFIG and row.name not in unused and (idle := row.unused(config)):
            unused[row.name] = idle
    for name, (reason, remedy) in unused.items():
        value, usual = (
            rows[name].value(each) if name in rows else getattr(each, name)
            for each in (config, other)
        )
        if not same(value, usual):
            yield warning(name, "", f"has no effect {reason}", remedy, value)
