"""What may be wrong, as data: a problem, the exception that has a list of them, and the names that
may have been meant."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
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

    def within(self, place: str) -> Problem:
        """The same, its name with the place that it is in, if it does not begin with that."""
        if not place or self.name == place or self.name.startswith((f"{place}.", f"{place}:")):
            return self
        is_path = not re.search(r"\s", f"{place}{self.name}")
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
    """What is wrong in something that a user wrote: a line for each problem in `found`.

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


def require(
    holds: object, name: str, value: Any, rule: str, reason: object, remedy: str,
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


_NOTED: ContextVar[list[Problem] | None] = ContextVar("complaints", default=None)


@contextlib.contextmanager
def all_complaints() -> Iterator[list[Problem]]:
    """Gives the list to which problems of the block are added.

    What a rule finds after another was broken may be its consequence. An exception that is no
    ValueError ends the block and is dropped where there is a problem already; that something is
    missing is dropped where an unknown key may be what was to give it.
    """
    found: list[Problem] = []
    token = _NOTED.set(found)
    try:
        with noted():
            yield found
    except Exception:
        if not found:
            raise
    finally:
        _NOTED.reset(token)
        if any(problem.rule == KNOWN_KEY for problem in found):
            found[:] = [p for p in found if p.rule == KNOWN_KEY or p.value not in (..., None)]


def has_complaints() -> bool:
    """Whether something was noted within `all_complaints`."""
    return bool(_NOTED.get())


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Within `all_complaints`, records a ValueError of this block and continues; otherwise it
    propagates."""
    try:
        yield
    except ValueError as error:
        complain(error)


def complain(error: ValueError | Problem) -> None:
    """Notes `error` within `all_complaints`, unless one about the same name and value is there, or
    one that refused the value in whose place this one's default stands; else raises it."""
    found = _NOTED.get()
    if found is None:
        raise Problems([error]) if isinstance(error, Problem) else error
    for problem in [error] if isinstance(error, Problem) else problems_of(error):
        if not any(_is_same(problem, before) for before in found):
            found.append(problem)


def _is_same(problem: Problem, before: Problem) -> bool:
    if problem.found == before.found:
        return True
    return before.value is not ... and before.name.endswith(f".{problem.name}")


def in_place(error: ValueError, where: str) -> Problems:
    """`error`, of whatever class, as an error of `where`; one of another library is its text."""
    return Problems(problems_of(error)).within(where)
