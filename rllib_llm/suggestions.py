"""The names that somebody may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


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
