"""All that is wrong, not the first thing only: a block in which complaints are noted, not raised.

    with all_complaints() as found:
        config.validate()      # each broken rule is noted in `found`
    config.validate()          # raises the first one

The same rules so serve `validate()`, the check before a run, and `rllib doctor`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

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
