"""What a command says on stderr: a panel for a mistake (exit code 2), a line for a warning."""

from __future__ import annotations

import contextlib
import textwrap
import warnings
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

stderr = Console(stderr=True)


def show(message: str, title: str = "error") -> None:
    """Print `message` between two red rules on stderr, its words whole: a path can be copied, and
    so can what is indented, a command, which stays on one line."""
    width = max(20, stderr.width)
    lines = [
        line
        for paragraph in message.splitlines()
        for line in (
            [paragraph]
            if paragraph.startswith(" ")
            else textwrap.wrap(paragraph, width, break_long_words=False, break_on_hyphens=False)
            or [""]
        )
    ]
    stderr.print(Rule(title, align="left", style="red"))
    stderr.print(Text("\n".join(lines)), soft_wrap=True)
    stderr.print(Rule(style="red"))


@contextlib.contextmanager
def user_errors(verbosity: int = 0) -> Iterator[None]:
    """Turn mistakes of the user (ValueError, missing files and modules) into a panel and exit 2.

    With a `verbosity` above 0 the traceback comes first.
    """
    try:
        yield
    except (ValueError, FileNotFoundError, NotADirectoryError, ImportError) as error:
        if verbosity:
            stderr.print_exception()
        show(str(error) or type(error).__name__)
        raise typer.Exit(2) from error


@contextlib.contextmanager
def shown_warnings() -> Iterator[list[str]]:
    """Print each different `UserWarning` of the block once, when it has ended without an error, and
    add it to the list that is yielded."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield told
    texts = (str(w.message) for w in caught if issubclass(w.category, UserWarning))
    told += dict.fromkeys(texts)
    for text in told:
        line = Text.assemble(("warning: ", "yellow"), text)
        stderr.print(line, soft_wrap=True, highlight=False)
