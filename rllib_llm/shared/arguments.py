"""Arguments of classes that users make themselves or name in settings: judges, tools, clients. They
are checked where they enter, in the words of settings.

    @checked
    class Client:
        def __init__(self, url: str, *, timeout_s: Seconds = 120.0, max_attempts: Count = 5): ...
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union

from rllib_llm.shared.errors import Problems, suggestion
from rllib_llm.shared.setting import OF_EXPERIMENT, Setting, alternatives, choices_of


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number, beside its type in a hint."""

    least: float | None = None
    above: float | None = None


Count = Annotated[int, Bounds(least=1)]
Seconds = Annotated[float, Bounds(above=0)]
Pause = Annotated[float, Bounds(least=0)]
Kind = TypeVar("Kind", bound=type)
_CHECKED = (int, float, str, bool, type(None))
_LONG = 40  # characters of a default that no remedy quotes


def checked(kind: Kind) -> Kind:
    """The class, which from now on checks what it is made with: numbers, texts, choices and
    switches, by the type hints of its `__init__`; others are left to it.

    Raises, when it is made:
        Problems: a value that its hint refuses, or a name that is no argument.
    """
    begin = vars(kind)["__init__"]
    parameters = [*inspect.signature(begin).parameters.values()][1:]
    names = [parameter.name for parameter in parameters]
    takes_any = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD

    @functools.wraps(begin)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        rows = _rows(kind, begin)
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            if name not in names and not takes_any:
                raise Problems(
                    name, f"be an argument of {kind.__name__}", "it has none of this name",
                    suggestion(name, names), value,
                )  # fmt: skip
            if name in rows and (error := rows[name].problem(value)) is not None:
                raise Problems([error])
        begin(self, *args, **kwargs)

    kind.__init__ = made  # type: ignore[misc]
    return kind


@functools.cache
def _rows(kind: type, begin: Callable[..., None]) -> dict[str, Setting]:
    """The rows of those arguments that are checked."""
    rows, hints = {}, typing.get_type_hints(begin, include_extras=True)
    for name, parameter in inspect.signature(begin).parameters.items():
        members = alternatives(hints.get(name))
        types = [getattr(member, "__origin__", member) for member in members]
        choices = choices_of(hints.get(name))
        if not choices and not {*types} <= {*_CHECKED}:
            continue
        bounds = [each for member in members for each in getattr(member, "__metadata__", ())]
        is_long = isinstance(parameter.default, str) and len(parameter.default) > _LONG
        has_none = parameter.default is parameter.empty
        rows[name] = Setting(
            name=name, default=parameter.default, choices=choices, place=OF_EXPERIMENT,
            type=hints[name] if choices else Union[tuple(types)],  # noqa: UP007  (of a list)
            meaning=f"an argument of {kind.__name__}",
            remedy="Correct it" if has_none or is_long else "", **vars((bounds or [Bounds()])[0]),
        )  # fmt: skip
    return rows
