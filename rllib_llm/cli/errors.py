"""The error a user sees: one panel, no traceback, exit code 2."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

stderr = Console(stderr=True)


class UserError(ValueError):
    """Something the user wrote that cannot work; the message says what to do instead."""


def nearest(name: str, allowed: Iterable[str], num: int = 3) -> list[str]:
    """Return up to `num` of `allowed` that look like `name`, the best first."""
    candidates = sorted(set(allowed))
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=num, cutoff=0.6)
    return [by_lower[match] for match in close]


def unknown_key(where: str, key: str, allowed: Iterable[str], hint: str = "") -> UserError:
    """Return the error for a key that is not in `allowed`, naming the nearest valid ones."""
    allowed = sorted(set(allowed))
    if not hint:
        close = nearest(key, allowed)
        if close:
            hint = f"Did you mean {' or '.join(repr(name) for name in close)}?"
        elif len(allowed) <= 40:
            hint = f"Allowed: {', '.join(allowed)}."
        else:
            hint = "Nothing similar is known."
    return UserError(f"{where}: unknown key {key!r}. {hint}")


def show(message: str, title: str = "error") -> None:
    """Print `message` in a red panel on stderr."""
    stderr.print(Panel(Text(message), title=title, title_align="left", border_style="red"))


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn mistakes of the user (ValueError, missing files and modules) into a panel and exit 2."""
    try:
        yield
    except (ValueError, FileNotFoundError, NotADirectoryError, ImportError) as error:
        show(str(error) or type(error).__name__)
        raise typer.Exit(2) from error
