"""A mistake of the user, the names that may have been meant, and all complaints at once.

    with all_complaints() as found:
        config.validate()      # each broken rule is noted in `found`
    config.validate()          # raises the first one

The same rules so serve `validate()`, the check before a run, and `rllib doctor`.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

MAX_SHOWN = 200  # characters of a value in a message


Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Problem:
    """Something that a user should know of, as data; `str()` is its sentence.

    name: the place as the user wrote it, such as "my-run: top_p", or what there is, as a clause.
    rule: what follows "must", such as "be at most 1"; "" where no rule is broken.
    reason, remedy: why, a clause (of a value that breaks no rule what it does, as "has no effect");
        what to do instead.
    value: what is there; `...` where the rule is not about a value.
    severity: "error": it cannot run, or not as it was meant; "warning": somebody should look;
        "note": a fact worth knowing.
    """

    name: str
    rule: str = ""
    reason: str = ""
    remedy: str = ""
    value: Any = ...
    severity: Severity = "error"

    def __str__(self) -> str:
        return " ".join(filter(None, (self.sentence, ended(self.remedy))))

    @property
    def found(self) -> str:
        """The name, and the value where there is one."""
        return self.name if self.value is ... else f"{self.name}={shown(self.value)}"

    @property
    def sentence(self) -> str:
        """The problem, without the remedy."""
        if self.value is ... or self.rule:
            return sentence(self.found, self.rule, self.reason)
        return ended(f"{self.found} {self.reason}")

    def within(self, place: str) -> Problem:
        """The same, its name with the place that it is in, if it does not begin with that."""
        is_named = self.name == place or self.name.startswith((f"{place}.", f"{place}:"))
        return self if is_named else replace(self, name=f"{place}: {self.name}")


def warning(
    name: str, rule: str = "", reason: str = "", remedy: str = "", value: Any = ...
) -> Problem:
    """A problem that somebody should look at."""
    return Problem(name, rule, reason, remedy, value, "warning")


def note(fact: str, remedy: str = "") -> Problem:
    """A fact worth knowing."""
    return Problem(fact, remedy=remedy, severity="note")


def problems_of(error: BaseException) -> Iterator[Problem]:
    """The problem of an exception, and those of the others that it has."""
    if not isinstance(error, SettingError):
        yield Problem(" ".join(str(error).split()))
        return
    yield error.problem
    for other in error.others:
        yield from problems_of(other)


class SettingError(ValueError):
    """A broken rule of a setting, or of something else that a user wrote, as an object.

    Programs and tests read its fields; `str()` renders them, for people:
    `where: name=value must rule: reason. remedy.`

    Attributes:
        name: what the rule is about, such as "top_p" or "ppo.config.top_p"; "" in an error that is
            text alone.
        value: what it is; `...` where the rule is not about a value.
        rule: what follows "must", such as "be at most 1"; "" where no rule is broken.
        reason: why, a clause.
        remedy: what to do instead, a sentence.
        where: the place that it is in, such as "ppo.config".
        unknown: there is no setting of that name.
        others: further errors, found with it.
    """

    others: tuple[SettingError, ...] = ()

    def __init__(
        self, text: str = "", *, name: str = "", value: Any = ..., rule: str = "",
        reason: object = "", remedy: str = "", where: str = "", unknown: bool = False,
    ):  # fmt: skip
        super().__init__(text)
        self.name, self.value, self.rule = name, value, rule
        self.reason, self.remedy = str(reason), remedy
        self.where, self.unknown = where, unknown

    def __str__(self) -> str:
        return "\n".join(map(str, (self.problem, *self.others)))

    @property
    def problem(self) -> Problem:
        """The error as data, without the others."""
        here = self._here
        return replace(here, name=f"{self.where}: {here.name}") if self.where else here

    @property
    def found(self) -> str:
        """The value found: the setting's name and value, or the text of an error without fields."""
        return self._here.found

    @property
    def _here(self) -> Problem:
        """The error as data, without its place."""
        name, value = (self.name, self.value) if self.rule else (str(self.args[0]), ...)
        return Problem(name, self.rule, self.reason, self.remedy, value)

    @property
    def setting(self) -> tuple[str, ...]:
        """The path of the setting in its config, ("env_config", "seed") of
        "ppo.config.env_config.seed" and of "env_config['seed']"; of the place where the name is no
        path; empty where neither is."""
        for text in (self.name, *self.where.split(": ")):
            if re.fullmatch(r"[\w.-]*\w(\['\w+'\])?", text):
                path = re.sub(r"\['(\w+)'\]", r".\1", text).split(".")
                return tuple(path[path.index("config") + 1 :] if "config" in path[:-1] else path)
        return ()

    @property
    def subject(self) -> str:
        """The last part of `setting`: "top_p" of "ppo.config.top_p" and of "x['top_p']"."""
        return re.split(r"\W", self.setting[-1])[-1] if self.setting else ""

    def __reduce__(self) -> Any:
        return _restored, (type(self), self.args, vars(self))

    def at(self, where: str) -> SettingError:
        """The same error at `where`, a place that contains its own."""
        error = copy.copy(self)
        error.where = f"{where}: {self.where}" if self.where else where
        error.others = tuple(other.at(where) for other in self.others)
        return error


def _restored(kind: type[SettingError], args: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


class UserError(SettingError):
    """A mistake of the user; the message says what to do instead."""


class SettingWarning(UserWarning):
    """A warning about a setting that works but not as it seems to; `problem` has it as data."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.problem = problem


def sentence(found: str, rule: str = "", reason: str = "") -> str:
    """One sentence of what there is, the rule that it breaks, if any, and why that matters."""
    text = f"{found} must {rule}" if rule else found
    return ended(f"{text}: {reason}" if reason else text)


def ended(text: str) -> str:
    """`text` with a full stop where nothing ends it."""
    return text if not text or text.endswith((".", "?", "!")) else f"{text}."


def shown(value: Any) -> str:
    """A readable `repr` of a value; a summary of models and long lists."""
    text = re.sub(r" at 0x[0-9a-f]+>", ">", repr(value))
    if len(text) <= MAX_SHOWN and "\n" not in text:
        return text
    if isinstance(value, str | list | tuple | Mapping):
        return f"{' '.join(text[:MAX_SHOWN].split())}..."
    return f"<{type(value).__name__}>"


def unknown_key(
    where: str, key: str, allowed: Iterable[str], hint: str = "", kind: Any = UserError
) -> Any:
    """Return the error for a key that is not in `allowed`, naming the nearest valid ones."""
    allowed, name = list(allowed), re.split(r"[\s{\[]", str(key))[0]
    if name != key and name in allowed:  # `stop {a: 1}`
        hint = f"Write a colon and a space after {name!r}."
    return kind(
        f"unknown key {key!r}", name=str(key), remedy=hint or suggestion(str(key), allowed),
        where=where, unknown=True,
    )  # fmt: skip


def require(
    holds: object, name: str, value: Any, rule: str, reason: object, remedy: str,
    kind: type[SettingError] = SettingError,
) -> None:  # fmt: skip
    """Raises an error of the class `kind` with these fields unless the rule `holds`."""
    if not holds:
        raise kind(name=name, value=value, rule=rule, reason=reason, remedy=remedy)


Broken = TypeVar("Broken", bound=SettingError)


def together(errors: Sequence[Broken]) -> Broken:
    """Return the first of several errors, which tells the others as well."""
    first, *others = errors
    first.others += (*others,)
    return first


_LONGEST_NAME = 255  # of a file


def nearest(name: str, allowed: Iterable[str], num: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return up to `num` of `allowed` that look like `name`, whatever the case, the best first;
    none for what is too long for a name, which would take long."""
    if len(name) > _LONGEST_NAME:
        return []
    by_lower = {candidate.lower(): candidate for candidate in sorted(set(allowed))}
    close = difflib.get_close_matches(name.lower(), by_lower, n=num, cutoff=cutoff)
    return [by_lower[match] for match in close]


def did_you_mean(
    name: str, allowed: Iterable[str], num: int = 1, *, cutoff: float = 0.6, otherwise: str
) -> str:
    """Return a question with the names of `allowed` nearest to `name`, else `otherwise`."""
    near = nearest(name, allowed, num, cutoff)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """Return a sentence with the names of `allowed` nearest to `name`, or all if they are few."""
    return closest(name, {candidate: candidate for candidate in allowed})


def closest(name: str, called: Mapping[str, str]) -> str:
    """Return `suggestion`'s sentence; `called`: every name that counts -> the one to suggest."""
    close = list(dict.fromkeys(called[match] for match in nearest(name, called)))
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    allowed = sorted(set(called.values()))
    if len(allowed) <= 40:
        return f"Allowed: {', '.join(allowed)}."
    return "Nothing similar is known."


_NOTED: ContextVar[list[ValueError] | None] = ContextVar("complaints", default=None)


@contextlib.contextmanager
def all_complaints() -> Iterator[list[ValueError]]:
    """Gives the list to which complaints of the block are added.

    What a rule finds after another was broken may be its consequence. An exception that is no
    ValueError ends the block and is dropped where there is a complaint already; that something is
    missing is dropped where an unknown key may be what was to give it.
    """
    found: list[ValueError] = []
    token = _NOTED.set(found)
    try:
        with noted():
            yield found
    except Exception:
        if not found:
            raise
    finally:
        _NOTED.reset(token)
        if any(getattr(error, "unknown", False) for error in found):
            found[:] = [error for error in found if not _is_about_nothing(error)]


def has_complaints() -> bool:
    """Whether something was noted within `all_complaints`."""
    return bool(_NOTED.get())


def _is_about_nothing(error: ValueError) -> bool:
    """Whether the rule that it breaks wants something that was not given."""
    return (
        isinstance(error, SettingError)
        and bool(error.rule)
        and (error.value is ... or error.value is None)
    )


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Within `all_complaints`, records a ValueError of this block and continues; otherwise it
    propagates."""
    try:
        yield
    except ValueError as error:
        complain(error)


def complain(error: ValueError) -> None:
    """Notes `error` within `all_complaints`, unless one about the same name and value is there, or
    one that refused the value in whose place this one's default stands; else raises it."""
    found = _NOTED.get()
    if found is None:
        raise error
    others = getattr(error, "others", ())
    if others:
        error = copy.copy(error)
        error.others = ()  # type: ignore[attr-defined]
    if not any(_is_same(error, other) for other in found):
        found.append(error)
    for other in others:
        complain(other)


def _is_same(error: ValueError, before: ValueError) -> bool:
    if _about(error) == _about(before):
        return True
    if not isinstance(error, SettingError) or not isinstance(before, SettingError):
        return False
    elsewhere = (error.name, error.where) != (before.name, before.where)
    return (
        before.value is not ...
        and elsewhere
        and bool(error.setting)
        and error.setting == before.setting
    )


def _about(error: ValueError) -> str:
    told = isinstance(error, SettingError) and error.rule and error.value is not ...
    return error.found if told else str(error)  # type: ignore[attr-defined]


def in_place(error: ValueError, where: str) -> SettingError:
    """`error`, of whatever class, as an error of `where`; one of another library is its text."""
    if isinstance(error, SettingError):
        return error.at(where)
    return SettingError(str(error), where=where)
