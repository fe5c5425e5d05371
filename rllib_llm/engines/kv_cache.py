"""Key-value caches of the decode loop: completions share their prompt, rows can be dropped."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from rllib_llm.modules.model_source import text_config

# Layer types whose attention pattern lives in the mask alone, so that keys and values of all
# positions, in order, are a correct cache for them.
_MASKED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
KeysValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]
# Buffers without rows may grow to so many times what new rows need, so as to fit what was needed
# before, too.
_MOST_EXCESS = 4


class SharedPromptLayer(CacheLayerMixin):
    """Keys and values of one layer in two preallocated buffers [rows, heads, capacity, head_dim].

    The first update is the prefill of prompts, a row each. Every later update appends positions to
    the rows in use, which are always the first `num_rows` of the buffers. Completions of prompts
    are let in by `admit`, at any time. Positions before `first` are padding in every row: they are
    not looked at.
    """

    is_sliding = False
    is_initialized: bool

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.num_rows = 0
        self.first = 0
        self.length = 0  # positions in use, those before `first` among them

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Writes the prompts' keys and values, [rows, heads, P, head_dim], to new buffers."""
        self.grow((key_states, value_states), len(key_states), self.capacity)
        self.num_rows, self.length = len(key_states), key_states.shape[2]
        self.keys[:, :, : self.length] = key_states
        self.values[:, :, : self.length] = value_states

    def begin(self, num_rows: int, length: int, like: KeysValues, room: tuple[int, int]) -> None:
        """Initialises an empty cache with `num_rows` rows and `length` positions, which the caller
        fills.

        Args:
            num_rows: at most those of `room`.
            length: at most the positions of `room`.
            like: [heads, positions, head_dim] each, whose shapes and dtype new buffers take.
            room: rows and positions to have room for.
        """
        self.num_rows = 0
        self.grow((like[0].unsqueeze(0), like[1].unsqueeze(0)), *room)
        self.num_rows, self.length, self.first = num_rows, length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the new states and returns all that the new queries may look at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        end = self.length + key_states.shape[2]
        keys = self.keys[: self.num_rows, :, self.first : end]
        values = self.values[: self.num_rows, :, self.first : end]
        keys[:, :, self.length - self.first :] = key_states
        values[:, :, self.length - self.first :] = value_states
        self.length = end
        return keys, values

    def first_in_window(self, window: int | None) -> int:
        """Place, among the positions that `update` returned, of the first that a query at the last
        of them looks at; `window` counts the positions it looks at, itself among them."""
        return 0 if window is None else max(0, self.length - self.first - window)

    def move_rows(self, sources: torch.Tensor, targets: torch.Tensor, num_rows: int) -> None:
        """Copies rows onto rows and keeps the first `num_rows`; index tensors are [moved] int64."""
        for buffer in (self.keys, self.values):
            buffer[targets, :, : self.length] = buffer[sources, :, : self.length]
        self.num_rows = num_rows

    def admit(self, prompts: SharedPromptLayer, copies: list[int], room: tuple[int, int]) -> None:
        """Appends rows for prompts prefilled elsewhere, at most as long as this cache is; they end
        where the other rows end. Where there are none, the cache becomes as long as the prompts.

        Args:
            prompts: with one row per prompt, which end at one position.
            copies: rows of each prompt.
            room: rows and positions to have room for, more than are in use afterwards.
        """
        prompt_len, start = prompts.length - prompts.first, self.num_rows
        if not start:
            self.length, self.first = prompt_len, 0
        self.grow((prompts.keys, prompts.values), *room)
        end = start + sum(copies)
        before = self.length - prompt_len
        used = (slice(prompts.num_rows), slice(None), slice(prompts.first, prompts.length))
        for buffer, states in (
            (self.keys, prompts.keys[used]),
            (self.values, prompts.values[used]),
        ):
            # What is masked out is multiplied by 0, which is not 0 for any leftover bits.
            buffer[start:end, :, :before] = 0
            rows = buffer[start:end, :, before : self.length]
            if len(set(copies)) == 1:
                rows.unflatten(0, (len(copies), copies[0])).copy_(states.unsqueeze(1))
            else:
                index = torch.tensor(copies, device=states.device)
                rows.copy_(states.repeat_interleave(index, dim=0))
        self.num_rows = end

    def grow(self, like: KeysValues, rows: int, positions: int) -> None:
        """Grows the buffers to at least so many rows and positions, keeping their contents."""
        held = len(self.keys) if self.is_initialized else 0
        if rows <= held and positions <= self.capacity:
            return
        most = max(rows, held), max(positions, self.capacity)
        # Buffers that were made for a few long rows do not grow for many short ones.
        if self.num_rows or most[0] * most[1] <= _MOST_EXCESS * rows * positions:
            rows, positions = most
        self.capacity = positions
        for name, states in zip(("keys", "values"), like, strict=True):
            # Values may be narrower than keys (multi-head latent attention).
            buffer = states.new_empty(rows, states.shape[1], self.capacity, states.shape[3])
            if self.num_rows:
                part = (slice(self.num_rows), slice(None), slice(self.length))
                buffer[part] = getattr(self, name)[part]
            setattr(self, name, buffer)
        self.is_initialized = True

    def shift(self, positions: int) -> None:
        """Drops so many positions at the front, at most `first`, to have room at the end; a
        negative number puts so many more there, to let a longer prompt in."""
        end = self.length - positions
        for buffer in (self.keys, self.values):
            if positions > 0:
                kept = buffer[: self.num_rows, :, positions : self.length].clone()
                buffer[: self.num_rows, :, :end] = kept
            else:
                kept = buffer[: self.num_rows, :, : self.length].clone()
                buffer[: self.num_rows, :, -positions:end] = kept
                # Masked out, and multiplied by 0: what was never written may be NaN.
                buffer[: self.num_rows, :, :-positions] = 0
        self.length = end
        self.first -= positions

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(positions the next queries see, position of the first of them)."""
        return self.length - self.first + query_length, 0

    def get_seq_length(self) -> int:
        """Positions that are looked at."""
        return self.length - self.first

    def get_max_length(self) -> int:
        """Positions that fit."""
        return self.capacity


class StaticLayer:
    """The first rows and positions of a layer's buffers, for a step that is recorded once and then
    repeated: shapes and addresses stay, and where to write is a tensor.

    Args:
        layer: the layer, which still counts its positions itself.
        column: [1] int64, the position that `update` writes to.
        rows: rows that are looked at, some of them perhaps no longer in use.
        positions: positions that are looked at, those not written yet among them.
    """

    def __init__(
        self, layer: SharedPromptLayer, column: torch.Tensor, rows: int, positions: int
    ) -> None:
        self.keys = layer.keys[:rows, :, :positions]
        self.values = layer.values[:rows, :, :positions]
        self.column, self.num_rows = column, rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes states [rows, heads, 1, head_dim]; returns all, which a mask must choose from."""
        self.keys.index_copy_(2, self.column, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.column, value_states.to(self.values.dtype))
        return self.keys, self.values

    def first_in_window(self, window: int | None) -> int:
        """0: the mask hides what lies outside."""
        return 0


class SharedPromptCache(Cache):
    """One `SharedPromptLayer` per attention layer of the model.

    keeps_experts: whether there is one more, whose keys are the experts of each position, [rows, 1,
    positions, layers * k] int16: what moves, shares or keeps a token's states does so with them.
    """

    def __init__(self, num_layers: int, capacity: int, keeps_experts: bool = False) -> None:
        count = num_layers + keeps_experts
        super().__init__(layers=[SharedPromptLayer(capacity) for _ in range(count)])
        self.keeps_experts = keeps_experts

    def move_rows(self, sources: torch.Tensor, targets: torch.Tensor, num_rows: int) -> None:
        """See `SharedPromptLayer.move_rows`."""
        for layer in self.layers:
            layer.move_rows(sources, targets, num_rows)

    @property
    def length(self) -> int:
        """Positions in use."""
        return self.layers[0].length

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.layers[0].capacity

    def admit(self, prompts: SharedPromptCache, copies: list[int], room: tuple[int, int]) -> None:
        """See `SharedPromptLayer.admit`."""
        for layer, prompt_layer in zip(self.layers, prompts.layers, strict=True):
            layer.admit(prompt_layer, copies, room)

    def grow(self, positions: int) -> None:
        """See `SharedPromptLayer.grow`."""
        for layer in self.layers:
            layer.grow((layer.keys, layer.values), 0, positions)

    def shift(self, positions: int) -> None:
        """See `SharedPromptLayer.shift`."""
        for layer in self.layers:
            layer.shift(positions)

    def clear(self) -> None:
        """Forgets all rows."""
        for layer in self.layers:
            layer.num_rows = 0

    def look_from(self, first: int) -> int:
        """Marks the positions before `first` as padding in every row; the first looked at."""
        for layer in self.layers:
            layer.first = first
        return first

    def states_of(self, row: int, start: int, first_layer: int = 0) -> Layers:
        """A copy of a row's keys and values, from the position `start` on."""
        return [
            (
                layer.keys[row, :, start : layer.length].clone(),
                layer.values[row, :, start : layer.length].clone(),
            )
            for layer in self.layers[first_layer:]
        ]


class RepeatedPromptCache(DynamicCache):
    """transformers' own cache, whatever its layers are (linear attention, shared or indexed keys).

    Slower: prompts are prefilled once per completion, and each step copies what it holds. It grows
    by itself, no rows come to those that are there, and all positions are looked at.
    """

    capacity = sys.maxsize

    def look_from(self, first: int) -> int:
        """See `SharedPromptCache.look_from`."""
        return 0

    def clear(self) -> None:
        """Does nothing: the next prompts come with another cache."""

    def move_rows(self, sources: torch.Tensor, targets: torch.Tensor, num_rows: int) -> None:
        """See `SharedPromptLayer.move_rows`."""
        order = torch.arange(num_rows, device=sources.device)
        order[targets] = sources
        self.reorder_cache(order)


PromptCache: TypeAlias = Any
"""A `SharedPromptCache` or a `RepeatedPromptCache`, as the plan of a model says."""


def num_shared_layers(config: PretrainedConfig) -> int | None:
    """Layers of a `SharedPromptCache` of the model; None where one is not right for its layers."""
    layer_types, _ = get_layer_types_and_kwargs(text_config(config))
    return len(layer_types) if _MASKED_LAYER_TYPES.issuperset(layer_types) else None


# --- KV caches of rows that have ended, for the next turn of their conversation

Layers = list[KeysValues]
"""Keys and values of each layer, [heads, positions, head_dim]."""


@dataclass(frozen=True)
class Prefix:
    """Tokens with their cached keys and values."""

    token_ids: list[int]
    layers: Layers

    @property
    def num_bytes(self) -> int:
        """Bytes of its keys and values."""
        return sum(t.numel() * t.element_size() for pair in self.layers for t in pair)


class KeptPrefixes:
    """Prefixes by the name of their conversation; the one that waited longest goes first."""

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
        """The longest cached prefix of `token_ids`, leaving at least one token to compute; None
        without one."""
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


def fill(
    cache: SharedPromptCache, prefixes: Sequence[Prefix], lengths: Sequence[int], new: int,
    room: tuple[int, int],
) -> None:  # fmt: skip
    """Writes prefixes into a cache without rows, as rows that end at one position, `new` tokens
    before the ends of their prompts of `lengths` tokens; it gets `room` for rows and positions.

        longest:   [k k k k k k|n n]     k: kept, n: new, computed after this
        another:   [. . . k k k|n n]     .: padding, masked out

    Every row gets the same number of new tokens, so that none has a hole: of one whose prefix
    reaches further the last ones are computed again.
    """
    end = max(lengths) - new
    for place, layer in enumerate(cache.layers):
        layer.begin(len(prefixes), end, prefixes[0].layers[place], room)
        for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
            kept = max(0, length - new)
            for buffer, states in zip(
                (layer.keys, layer.values), prefix.layers[place], strict=True
            ):
                # What is masked out is multiplied by 0, which is not 0 for any leftover bits.
                buffer[row, :, : end - kept] = 0
                buffer[row, :, end - kept : end] = states[:, :kept]
