"""Sections of settings: pydantic models whose fields declare name, type, range, meaning and when a
setting takes effect.

    class Rollouts(Settings):
        store_rollouts: bool = setting(True, "whether every completion is kept", short="store")

    ROLLOUTS = Section.of("rollouts", Rollouts)

Checks, warnings, YAML keys, signatures, `help()` and `rllib config` all come from these models. The
values are plain attributes of a config, so that Tune's search spaces can stand in their places.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Annotated, Any, Literal, Union

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from rllib_llm.shared.dotted import looks_dotted
from rllib_llm.shared.errors import Problem, nearest

# Where a setting is kept: in RLlib's config, in its `env_config`, or beside it in a YAML file.
IN_CONFIG, IN_ENV, OF_EXPERIMENT = "config", "env_config", "experiment"
DEFAULT_ENV = "rllib_llm/RLHF-v0"  # what settings in `env_config` are of unless they say so
LARGEST = 2**63 - 1  # tensors hold no larger whole number
UNSET = -1  # RLlib drops settings of this value


@dataclass(frozen=True)
class Condition:
    """When a setting acts."""

    text: str  # as documentation writes it, e.g. "critic is not 'none'"
    holds: Callable[[Any], bool]  # under a config
    otherwise: str  # why the setting has no effect where it does not, formatted with `config`
    remedy: str = "Remove it"


def when(
    name: str, text: str, holds: Callable[[Any], bool], remedy: str = "Remove it", why: str = ""
) -> Condition:
    """The condition that `holds(value)` is true of one setting; `text` describes it, and `why`
    follows the value in the warning where it is false."""
    otherwise = f"with {name}={{config.{name}!r}}{why}"
    return Condition(f"{name} {text}", lambda c: holds(getattr(c, name)), otherwise, remedy)


def is_set(value: Any) -> bool:
    """Whether a setting has a value."""
    return value is not None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row."""

    name: str  # in Python and YAML
    type: Any  # a Python annotation; a union with None allows None
    default: Any  # of the base class; an algorithm may have another
    meaning: str  # follows "it is", or "it says" where it begins with a question word
    note: str = ""  # further sentences of the documentation
    unit: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[Any, ...] = ()  # None aside
    or_dotted: bool = False  # whether a dotted path, to something of one's own, is allowed as well
    may_be_empty: bool = False  # whether "" is a text that switches it off
    acts: tuple[Condition, ...] = ()  # when it has an effect; always, if empty
    keys: tuple[str, ...] = ()  # that a mapping in its place may have beside its first key
    short: str = ""  # its name inside its section
    place: str = IN_CONFIG  # or IN_ENV, OF_EXPERIMENT
    env: str = DEFAULT_ENV  # of a setting in `env_config`, where no environment is named
    attribute: str = ""  # where the config keeps it, if not under `name`
    trl: tuple[str, ...] = ()  # what TRL calls it
    rllib: tuple[str, ...] = ()  # what RLlib's PPO does
    also: tuple[str, ...] = ()  # what others do
    reason: str = ""  # why it is checked; the meaning, if empty
    remedy: str = ""  # of a wrong value; its default, if empty

    @property
    def in_section(self) -> str:
        """Its name among the arguments of its section's method."""
        return self.short or self.name

    def value(self, config: Any) -> Any:
        """Its value in `config`."""
        if self.place == IN_ENV:
            return config.env_config.get(self.name, self.default)
        return getattr(config, self.attribute or self.name)

    def problem(self, value: Any, config: Any = None, place: str = "") -> Problem | None:
        """The problem that `value` is, or None.

        config: whose value is the default in the remedy; this row's where it is None. place: the
        setting whose mapping `value` stands in, such as "eval_envs.math".
        """
        if isinstance(value, str) and (not value and self.may_be_empty
                                       or self.or_dotted and looks_dotted(value)):  # fmt: skip
            return None
        rule, reason, remedy = self.rule, self.reason or self.says, self.remedy
        default = self.default if config is None else self.value(config)
        if not remedy:
            usual = f"Write {default!r}, its default{', or None' if self.is_optional else ''}"
            remedy = "Leave it out" if default is None else usual
        number = plain(value) if type(plain(value)) in (int, float) else 0
        try:
            _adapter(self.type, self.choices, self.least, self.above, self.most).validate_python(
                plain(value)
            )
            if number != UNSET or self.place != IN_CONFIG:
                return None
            rule = "another number than -1"
            reason = "RLlib takes -1 as 'not given' and would use the default"
            remedy = "Write -1.000001, which means the same here"
        except ValidationError:
            if space := _near_space(value):
                remedy = f"Did you mean {{{space}: ...}}?"
            elif is_search_space(value):
                remedy = "Give the config to ray.tune.Tuner, which draws the value of each trial"
            elif isinstance(number, float) and math.isinf(number):
                rule = "finite"
            elif number > LARGEST:
                rule = "below 2**63"
            elif isinstance(value, str) and not value.strip("\0 \t\n"):
                rule = "more than a blank"
            elif isinstance(value, dict) and not all(isinstance(key, str) for key in value):
                rule = f"{rule}, of names that are texts"
            elif isinstance(value, str) and not self.remedy:
                begun = [name for name in map(str, self.choices) if value.startswith(name)]
                near = nearest(value, map(str, self.choices), 1) or begun
                remedy = f"Did you mean {near[0]!r}?" if near else remedy
        path = (place, self.place if self.place == IN_ENV else "", self.name)
        return Problem(".".join(filter(None, path)), f"be {rule}", reason, remedy, value)

    @property
    def says(self) -> str:
        """The meaning as a clause: "it is the longest completion"."""
        asks = self.meaning.startswith(("whether", "which", "what", "who", "how", "where", "when"))
        return f"it {'says' if asks else 'is'} {self.meaning}"

    @property
    def rule(self) -> str:
        """The rule for a value, in words."""
        if self.choices:
            if len(self.choices) == 1:
                return f"{'None or ' if self.is_optional else ''}{self.choices[0]!r}"
            own = " or a dotted path" if self.or_dotted else ""
            return f"one of {(*self.choices, None) if self.is_optional else self.choices}{own}"
        words = [self._rule_of(kind) for kind in alternatives(self.type)]
        return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))

    def _rule_of(self, kind: Any) -> str:
        if kind is type(None):
            return "None"
        if typing.get_origin(kind) is Literal:
            return " or ".join(map(repr, typing.get_args(kind)))
        origin = typing.get_origin(kind) or kind
        if origin is type:
            return f"a class derived from {typing.get_args(kind)[0].__name__}"
        words = _KIND_WORDS.get(origin) or origin.__name__
        if kind in (int, float):
            of_unit = f" of {self.unit}" if self.unit and kind is float else ""
            return f"{words}{of_unit}{self._bounds()}"
        if typing.get_args(kind) == (int,):
            return f"{words} of {self.unit or 'whole numbers'}"
        if typing.get_args(kind) in ((float, float), (int, int)):
            return "a pair of numbers"
        return words

    def _bounds(self) -> str:
        bounds = {"of at least": self.least, "above": self.above, "at most": self.most}
        text = " and ".join(f"{word} {b:.10g}" for word, b in bounds.items() if b is not None)
        return f" {text}" if text else ""

    @property
    def is_optional(self) -> bool:
        """Whether None is allowed."""
        return type(None) in alternatives(self.type)

    @property
    def type_name(self) -> str:
        """The type as Python writes it."""
        kinds = [repr(choice) for choice in self.choices]
        kinds = kinds or [_name_of(kind) for kind in alternatives(self.type)]
        if self.or_dotted:
            kinds.append("str")
        if self.choices and self.is_optional:
            kinds.append("None")
        return " | ".join(kinds)

    @property
    def range(self) -> str:
        """The bounds of a number with its unit, "" where there are none."""
        bounds = self._bounds().strip().removeprefix("of ")
        return " ".join(filter(None, (bounds, self.unit))) if bounds else self.unit

    @property
    def effect(self) -> str:
        """When it has an effect, "" for always."""
        return "; ".join(condition.text for condition in self.acts)

    def unused(self, config: Any) -> tuple[str, str] | None:
        """(why it has no effect under `config`, remedy), or None where it has one."""
        for condition in self.acts:
            if not condition.holds(config):
                return condition.otherwise.format(config=config), condition.remedy
        return None

    @property
    def headline(self) -> str:
        """The meaning with a capital; a Greek letter stays as it is."""
        first = self.meaning[0]
        return (first.upper() if first.isascii() else first) + self.meaning[1:]

    @property
    def sentence(self) -> str:
        """One sentence: meaning, range, when it takes effect, and the peers' names."""
        parts = [f"{self.headline}{f' ({self.range})' if self.range else ''}.", self.note]
        if self.effect:
            parts.append(f"Acts where {self.effect}.")
        if self.trl and self.trl != (self.name,):
            parts.append(f"TRL: {', '.join(self.trl)}.")
        return " ".join(filter(None, parts))


class Settings(BaseModel):
    """Base of the models of sections; the docstring of a subclass is the section's meaning."""

    model_config = ConfigDict(protected_namespaces=(), arbitrary_types_allowed=True)


def setting(default: Any, meaning: str, **row: Any) -> Any:
    """Returns the field of one setting; `row`: further attributes of `Setting`, of peers' names
    (trl, rllib, also) also a text with spaces between them."""
    for kind in ("trl", "rllib", "also"):
        names = row.get(kind, ())
        row[kind] = tuple(names.split() if isinstance(names, str) else names)
    return Field(default, description=meaning, json_schema_extra=row)


@dataclass(frozen=True)
class Section:
    """Settings that one method, of the same name, sets."""

    name: str  # of the method, and of the key in YAML
    meaning: str  # a sentence
    settings: tuple[Setting, ...]
    also: tuple[str, ...] = ()  # sections whose settings the method takes as well
    positional: str = ""  # the setting that a value without a name is; the first, if empty

    @classmethod
    def of(
        cls, name: str, model: type[Settings], *, also: tuple[str, ...] = (), positional: str = "",
        **row: Any,
    ) -> Section:  # fmt: skip
        """The section of a model; `row`: attributes that all its settings have."""
        meaning = " ".join((inspect.getdoc(model) or "").split())
        settings = []
        for setting_name, field in model.model_fields.items():
            further: Any = {"choices": choices_of(field.annotation), **row}
            further |= field.json_schema_extra
            settings.append(Setting(
                name=setting_name, type=field.annotation, default=field.default,
                meaning=str(field.description), **further,
            ))  # fmt: skip
        return cls(name, meaning, tuple(settings), also, positional)


def choices_of(kind: Any) -> tuple[Any, ...]:
    """The values that a type names, None aside; () of one that does not."""
    known = [member for member in alternatives(kind) if member is not type(None)]
    if all(typing.get_origin(member) is Literal for member in known):
        return tuple(choice for member in known for choice in typing.get_args(member))
    return ()


@functools.cache
def _adapter(
    kind: Any, choices: tuple[Any, ...], least: float | None, above: float | None,
    most: float | None,
) -> TypeAdapter[Any]:  # fmt: skip
    """The strict validator of a value: no text is a number, no number a bool."""
    if choices:
        members: list[Any] = [Literal[choices]]
        members += [None] if type(None) in alternatives(kind) else []
    else:
        members = [_strict(member, least, above, most) for member in alternatives(kind)]
    union: Any = Union[tuple(members)]  # noqa: UP007  (of a list)
    return TypeAdapter(union, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def _strict(kind: Any, least: float | None, above: float | None, most: float | None) -> Any:
    origin = typing.get_origin(kind) or kind
    if origin in (int, float):
        finite = False if origin is float else None
        most = LARGEST if most is None and origin is int else most
        bounds = Field(ge=least, gt=above, le=most, allow_inf_nan=finite)
        return Annotated[kind, bounds, only(int, float)]  # pydantic takes arrays of one
    if kind is str:
        return Annotated[str, AfterValidator(_text)]
    if kind is Any:
        return Annotated[Any, BeforeValidator(_object)]
    if origin is dict:  # its values are checked by its readers
        return Annotated[dict, Field(strict=False), AfterValidator(_named)]
    if origin in (list, tuple):  # one stands for the other; YAML has lists alone
        return Annotated[kind, Field(strict=False), only(list, tuple)]
    return kind


# Functions of `ray.tune` with numbers as arguments. `choice` and `grid_search` take one list.
SAMPLERS = (
    "uniform", "quniform", "loguniform", "qloguniform", "randn", "qrandn", "randint", "qrandint",
    "lograndint", "qlograndint",
)  # fmt: skip
LISTS = ("grid_search", "choice")


def _near_space(value: Any) -> str:
    """The name of the search space in YAML that a value may be meant as; "" where it is none."""
    name = str(next(iter(value))) if isinstance(value, Mapping) and len(value) == 1 else ""
    known = (*SAMPLERS, *LISTS)
    return "" if name in known else next(iter(nearest(name, known, 1, cutoff=0.75)), "")


def is_search_space(value: Any) -> bool:
    """Whether a value is a search space of Tune's, from which each trial draws its own."""
    from ray.tune.search.sample import Domain

    return isinstance(value, Domain) or (isinstance(value, Mapping) and "grid_search" in value)


def plain(value: Any) -> Any:
    """The number of Python that a scalar of numpy is; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def only(*kinds: type) -> BeforeValidator:
    """A validator that refuses values of other types before pydantic converts them."""

    def check(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise ValueError("of another type")
        return value

    return BeforeValidator(check)


def _text(value: str) -> str:
    if not value.strip("\0 \t\n"):
        raise ValueError("blank")
    return value


def _named(value: dict) -> dict:
    if not all(isinstance(key, str) for key in value):
        raise ValueError("without names")
    return value


def _object(value: Any) -> Any:
    if isinstance(value, Number | bytes):
        raise ValueError("a number")
    return _text(value) if isinstance(value, str) else value


_KIND_WORDS: Mapping[Any, str] = types.MappingProxyType({
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Any: "a name, a mapping, a list, an object of Python or None",
    Callable: "a function (in YAML its dotted path)",
    list: "a list",
    tuple: "a tuple",
    dict: "a dictionary",
})  # fmt: skip


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union, None last; a type that is no union is the only one."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return tuple(sorted(typing.get_args(kind), key=lambda member: member is type(None)))
    return (kind,)


def _name_of(kind: Any) -> str:
    if kind is type(None):
        return "None"
    if typing.get_origin(kind) is Literal:
        return " | ".join(map(repr, typing.get_args(kind)))
    return (
        kind.__name__
        if isinstance(kind, type) and not typing.get_args(kind)
        else str(kind).replace("typing.", "")
    )
