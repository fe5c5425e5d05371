"""What a conversation is made of: nodes that know the one before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

NO_VERSION = -1  # of a token that no weights sampled


@dataclass
class Node:
    """What one append added.

    parent: index of the node before it; None: it begins a path. messages: what it says, as chat
    templates take it; a node that begins a later path repeats what was said before. token_ids:
    those that it adds. Of a sampled one: `logprobs` and weight `versions` of each token, `finish`,
    and the `reward` that it earned.
    """

    parent: int | None
    messages: tuple[Mapping[str, Any], ...]
    token_ids: tuple[int, ...]
    sampled: bool = False
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish: str = ""
    reward: float = 0.0

    @property
    def role(self) -> str:
        """Of its last message."""
        return str(self.messages[-1]["role"]) if self.messages else ""

    @property
    def version_spans(self) -> list[tuple[int, int]]:
        """(version of the weights, tokens in a row that they sampled)."""
        return [(version, len(list(run))) for version, run in groupby(self.versions)]


def path_to(nodes: Sequence[Node], leaf: int | None) -> list[Node]:
    """The nodes from the first to `leaf`; none where it is None."""
    place, path = leaf, []
    while place is not None:
        path.append(nodes[place])
        place = nodes[place].parent
    return path[::-1]
