"""A mistake of the user, the names that may have been meant, and all complaints at once.

    with all_complaints() as found:
        config.validate()      # each broken rule is noted in `found`
    config.validate()          # raises the first one

The same rules so serve `validate()`, the check before a run, and `rllib doctor`.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar


class UserError(ValueError):
    """Something the user wrote that cannot work; the message says what to do instead."""


def unknown_key(where: str, key: str, allowed: Iterable[str], hint: str = "") -> UserError:
    """Return the error for a key that is not in `allowed`, naming the nearest valid ones."""
    return UserError(f"{where}: unknown key {key!r}. {hint or suggestion(str(key), allowed)}")


def nearest(name: str, allowed: Iterable[str], num: int = 3) -> list[str]:
    """Return up to `num` of `allowed` that look like `name`, whatever the case, the best first."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(set(allowed))}
    close = difflib.get_close_matches(name.lower(), by_lower, n=num, cutoff=0.6)
    return [by_lower[match] for match in close]


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """Return a sentence with the names of `allowed` nearest to `name`, or all if they are few."""
    return closest(name, {candidate: candidate for candidate in allowed})


def closest(name: str, called: Mapping[str, str]) -> str:
    """Return `suggestion`'s sentence where names have other names as well.

    Args:
        called: every name that counts -> the one to suggest for it.
    """
    close = list(dict.fromkeys(called[match] for match in nearest(name, called)))
    if close:
        return f"Did you mean {' or '.join(repr(match) for match in close)}?"
    allowed = sorted(set(called.values()))
    if len(allowed) <= 40:
        return f"Allowed: {', '.join(allowed)}."
    return "Nothing similar is known."


_NOTED: ContextVar[list[ValueError] | None] = ContextVar("complaints", default=None)


@contextlib.contextmanager
def all_complaints() -> Iterator[list[ValueError]]:
    """Gives the list to which complaints of the block are added.

    What a rule finds after another was broken may be its consequence: an exception that is no
    ValueError ends the block and is dropped where there is a complaint already.
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


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Within `all_complaints`, a ValueError of this block is noted and what follows goes on; else
    it passes through."""
    try:
        yield
    except ValueError as error:
        complain(error)


def complain(error: ValueError) -> None:
    """Notes `error` within `all_complaints`, else raises it."""
    found = _NOTED.get()
    if found is None:
        raise error
    if str(error) not in [str(other) for other in found]:
        found.append(error)
