"""Problems as data, the exception that has a list of them, and the names that
may have been meant."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

MAX_SHOWN = 200  # characters of a value in a message
KNOWN_KEY = "be a known key"  # the rule that a misspelt setting breaks

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Problem:
    """Something that a user should know of, as data; `str()` is its sentence.

    name: the place as the user wrote it, such as "my-run.config.top_p", or what there is, as a
        clause.
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

    @property
    def is_missing(self) -> bool:
        """Whether the rule wants something that was not given."""
        return self.rule not in ("", KNOWN_KEY) and (self.value is ... or self.value is None)

    def is_of(self, place: str) -> bool:
        """Whether its name is `place`, or begins with it."""
        return self.name == place or self.name.startswith(tuple(f"{place}{each}" for each in ".[:"))

    def moved(self, place: str, to: str) -> Problem:
        """The same, its name with `to` for `place` where it begins with that, else within `to`."""
        if self.is_of(place):
            return replace(self, name=to + self.name[len(place) :])
        return self.within(to)

    def within(self, place: str) -> Problem:
        """The same, its name with the place that it is in, if it does not begin with that."""
        if not place or self.is_of(place) and self.name != place:
            return self
        own = self.name.partition(": ")[0]
        is_path = " " not in place and " " not in own and own[:1].isidentifier()
        return replace(self, name=f"{place}{'.' if is_path else ': '}{self.name}")


def warning(
    name: str, rule: str = "", reason: str = "", remedy: str = "", value: Any = ...
) -> Problem:
    """A problem that somebody should look at."""
    return Problem(name, rule, reason, remedy, value, "warning")


def note(fact: str, remedy: str = "") -> Problem:
    """A fact worth knowing."""
    return Problem(fact, remedy=remedy, severity="note")




class Problems(ValueError):
    """Mistakes in something that a user wrote: a line for each problem in `found`.

    Made from problems, or from the fields of one: `Problems("top_p", "be at most 1", value=2)`.
    """

    def __init__(
        self, name: str | Iterable[Problem], rule: str = "", reason: object = "",
        remedy: str = "", value: Any = ...,
    ):  # fmt: skip
        self.found: list[Problem] = (
            [Problem(name, rule, str(reason), remedy, value)] if isinstance(name, str) else [*name]
        )
        super().__init__(self.found)

    def __str__(self) -> str:
        return "\n".join(map(str, self.found))

    def __reduce__(self) -> Any:
        return type(self), (self.found,)

    @property
    def problem(self) -> Problem:
        """The first one."""
        return self.found[0]

    def moved(self, place: str, to: str) -> Any:
        """The same error, as `Problem.moved`."""
        return type(self)([problem.moved(place, to) for problem in self.found])

    def within(self, place: str) -> Any:
        """The same error about a place that contains its own."""
        return type(self)([problem.within(place) for problem in self.found])


def problems_of(error: BaseException) -> list[Problem]:
    """The problems of an exception; one of another library is its text."""
    return error.found if isinstance(error, Problems) else [Problem(" ".join(str(error).split()))]


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


def unknown_key(where: str, key: str, allowed: Iterable[str], hint: str = "") -> Problem:
    """The problem of a key that is not in `allowed`; the remedy names the nearest valid ones."""
    allowed, name = list(allowed), re.split(r"[\s{\[]", str(key))[0]
    if name != key and name in allowed:  # `stop {a: 1}`
        hint = f"Write a colon and a space after {name!r}."
    return Problem(str(key), KNOWN_KEY, "", hint or suggestion(str(key), allowed)).within(where)


@contextmanager
def called(name: str, place: str) -> Iterator[None]:
    """Renames problems that are raised in a block: what they call `name` is at `place`."""
    try:
        yield
    except Problems as error:
        raise error if place == name else error.moved(name, place) from error.__cause__


def require(
    holds: object, name: str, value: Any, rule: str, reason: object = "", remedy: str = "",
    kind: type[Problems] = Problems,
) -> None:  # fmt: skip
    """Raises an error of the class `kind` with these fields unless the rule `holds`."""
    if not holds:
        raise kind(name, rule, reason, remedy, value)


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


def problems_in(
    check: Callable[..., Iterable[Problem] | None],
    *args: Any,
    into: list[Problem] | None = None,
    **kwargs: Any,
) -> list[Problem]:
    """The problems that `check` returns, or raises as a ValueError; `into`: the list that they are
    added to, which has the first of them also where `check` fails otherwise."""
    found: list[Problem] = [] if into is None else into
    try:
        for problem in check(*args, **kwargs) or ():
            found.append(problem)
    except ValueError as error:
        found += problems_of(error)
    return found


def refusals(function: Callable[..., object], *args: Any, **kwargs: Any) -> list[Problem]:
    """The problems that a function raises which returns something else."""
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return problems_of(error)
    return []


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Each broken rule of a name once, of a wrong value the first one; errors first."""
    kept: dict[tuple[str, str], Problem] = {}
    order = ("error", "warning", "note")
    for problem in sorted(problems, key=lambda problem: order.index(problem.severity)):
        is_of_value = problem.severity == "error" and problem.value is not ...
        kept.setdefault((problem.found, "" if is_of_value else problem.rule), problem)
    return [*kept.values()]


def without_consequences(problems: Iterable[Problem]) -> list[Problem]:
    """Those that are left where an unknown key may be what was to give something missing."""
    problems = [*problems]
    is_unknown = any(problem.rule == KNOWN_KEY for problem in problems)
    return [problem for problem in problems if not (is_unknown and problem.is_missing)]


def errors_of(problems: Iterable[Problem]) -> list[Problem]:
    """Those that are errors."""
    return [problem for problem in problems if problem.severity == "error"]


def report(problems: Iterable[Problem]) -> None:
    """Warns of warnings; raises Problems where something is an error."""
    problems = distinct(problems)
    for problem in problems:
        if problem.severity == "warning":
            warnings.warn(SettingWarning(problem), stacklevel=3)
    if errors := errors_of(problems):
        raise Problems(errors)
