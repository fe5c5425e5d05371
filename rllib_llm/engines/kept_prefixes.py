"""KV caches of rows that have ended, for the next turn of their conversation.

turn 1:  [ prompt | sampled ]                       kept: all but the last token
turn 2:  [ prompt | sampled | result ][ sampled ]   prefilled: the last token and the result
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from rllib_llm.engines.kv_cache import SharedPromptCache

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, [heads, positions, head_dim]."""


@dataclass(frozen=True)
class Prefix:
    """Tokens, and what the model computed of them."""

    token_ids: list[int]
    layers: Layers

    @property
    def num_bytes(self) -> int:
        """That its keys and values take."""
        return sum(t.numel() * t.element_size() for pair in self.layers for t in pair)


class KeptPrefixes:
    """Prefixes by the name of their conversation; the one that waited longest goes first.

    Args:
        max_bytes: of keys and values together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._prefixes: OrderedDict[Hashable, Prefix] = OrderedDict()

    def put(self, name: Hashable, prefix: Prefix) -> None:
        """Keeps a prefix in the place of the one that has this name."""
        self._pop(name)
        self._prefixes[name] = prefix
        self._num_bytes += prefix.num_bytes
        while self._num_bytes > self._max_bytes:
            self._pop(next(iter(self._prefixes)))

    def take(self, name: Hashable, token_ids: Sequence[int]) -> Prefix | None:
        """What of the prefix `token_ids` begin with, at least one of them left to be computed; None
        where there is nothing."""
        found = self._pop(name)
        if found is None:
            return None
        alike = 0
        for one, other in zip(found.token_ids, token_ids[:-1], strict=False):
            if one != other:
                break
            alike += 1
        return Prefix(found.token_ids[:alike], found.layers) if alike else None

    def clear(self) -> None:
        """Forgets all: the weights have changed."""
        self._prefixes.clear()
        self._num_bytes = 0

    def _pop(self, name: Hashable) -> Prefix | None:
        prefix = self._prefixes.pop(name, None)
        if prefix is not None:
            self._num_bytes -= prefix.num_bytes
        return prefix


def row_of(cache: SharedPromptCache, row: int, start: int) -> Layers:
    """A copy of a row's keys and values, from the position `start` on."""
    return [
        (
            layer.keys[row, :, start : layer.length].clone(),
            layer.values[row, :, start : layer.length].clone(),
        )
        for layer in cache.layers
    ]


def fill(
    cache: SharedPromptCache,
    prefixes: Sequence[Prefix],
    lengths: Sequence[int],
    new: int,
    room: tuple[int, int],
) -> None:
    """Writes prefixes into a cache without rows, as rows that end at one position, `new` tokens
    before the ends of their prompts of `lengths` tokens; it gets `room` for rows and positions.

        longest:   [k k k k k k|n n]     k: kept, n: new, computed after this
        another:   [. . . k k k|n n]     .: padding, masked out

    Every row gets the same number of new tokens, so that none has a hole: of one whose prefix
    reaches further the last ones are computed again.
    """
    end = max(lengths) - new
    for place, layer in enumerate(cache.layers):
        layer.begin(len(prefixes), end, prefixes[0].layers[place][0], room)
        for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
            kept = max(0, length - new)
            for buffer, states in zip(
                (layer.keys, layer.values), prefix.layers[place], strict=True
            ):
                # What is masked out is multiplied by 0, which is not 0 for any leftover bits.
                buffer[row, :, : end - kept] = 0
                buffer[row, :, end - kept : end] = states[:, :kept]
