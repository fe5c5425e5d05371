"""The rows of a decoder's batch: state on the host and on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rllib_llm.engines.kv_cache import Prefix
from rllib_llm.engines.params import SamplingParams
from rllib_llm.shared.padding import widen


@dataclass(frozen=True)
class Setting:
    """Settings of rows, and what of them is needed on the device."""

    params: SamplingParams
    stops: torch.Tensor | None
    """[k] int64, the stop tokens; None without."""
    bias: tuple[torch.Tensor, torch.Tensor] | None
    """Ids [b] int64, and what is added to their logits, [b] float32."""
    adjusts: bool
    """Whether they change logits before the temperature."""


class BatchRows:
    """Rows in the order in which they stand in the batch.

    A row's tokens are counted by the decoder's clock, which goes on by one with every step: its
    token at place p is sampled at the clock's `born + p`. So the host knows the places of all rows
    and when each is full without asking the device; only who was ended by a stop token it has to
    ask.

    Args:
        device: of the model.
        vocab_size: of the model.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self.device, self._vocab_size = device, vocab_size
        self.settings: list[Setting] = []  # distinct ones; that of a row is an index
        # On the host, of each row: the column of the buffers that it is written to, the clock of
        # its place 0 and of its last place, and its settings.
        self.columns, self.born, self.last, self.setting = (
            np.empty(0, dtype=np.int64) for _ in range(4)
        )
        # On the device: the same columns and births, the newest token, its position (that of rows
        # that have ended stays), and whether the row has not ended.
        none = torch.empty(0, dtype=torch.int64, device=device)
        self.lines, self.births, self.tokens, self.positions = none, none, none, none
        self.alive = none.bool()

    def __len__(self) -> int:
        return len(self.columns)

    def add(
        self,
        columns: list[int],
        params: list[SamplingParams],
        lengths: list[int],
        num_sampled: list[int],
        clock: int,
    ) -> None:
        """Appends rows that get their first token now.

        Args:
            columns: of the buffers.
            params: of each row.
            lengths: tokens of each row so far.
            num_sampled: how many of them were sampled.
            clock: now.
        """
        if not len(self):
            self.settings = []
        born = [clock - num for num in num_sampled]
        last = [b + p.max_new_tokens - 1 for b, p in zip(born, params, strict=True)]
        added = (columns, born, last, [self._index(p) for p in params])
        self.columns, self.born, self.last, self.setting = (
            np.concatenate([held, np.asarray(new, dtype=np.int64)])
            for held, new in zip(
                (self.columns, self.born, self.last, self.setting), added, strict=True
            )
        )
        self.lines, self.births, self.positions, self.tokens = (
            torch.cat([held, torch.tensor(new, dtype=torch.int64, device=self.device)])
            for held, new in zip(
                (self.lines, self.births, self.positions, self.tokens),
                (columns, born, lengths, [0] * len(columns)), strict=True,
            )
        )  # fmt: skip
        self.alive = torch.cat([self.alive, self.alive.new_ones(len(columns))])

    def _index(self, params: SamplingParams) -> int:
        # Rows that differ in nothing but their longest length are sampled together: `last` has it.
        if params.max_new_tokens != max(1, params.min_new_tokens):
            params = replace(params, max_new_tokens=max(1, params.min_new_tokens))
        for i, known in enumerate(self.settings):
            if known.params == params:
                return i
        self.settings.append(self._on_device(params))
        return len(self.settings) - 1

    def _on_device(self, params: SamplingParams) -> Setting:
        # Ids beyond the vocabulary are never sampled: some models name stop tokens of others.
        ids = [token for token in params.stop_token_ids if token < self._vocab_size]
        stops = torch.tensor(ids, device=self.device) if ids else None
        bias = None
        if params.logit_bias:
            tokens, values = zip(*params.logit_bias, strict=True)
            bias = (
                torch.tensor(tokens, device=self.device),
                torch.tensor(values, dtype=torch.float32, device=self.device),
            )
        return Setting(params, stops, bias, bool(params.adjustments))

    def keep(self, moves: Moves) -> None:
        """Removes finished rows."""
        targets, sources = moves.on_host
        for values in (self.columns, self.born, self.last, self.setting):
            values[targets] = values[sources]
        self.columns, self.born, self.last, self.setting = (
            values[: moves.num_rows]
            for values in (self.columns, self.born, self.last, self.setting)
        )
        self.lines, self.births, self.tokens, self.positions = (
            moves.apply(values) for values in (self.lines, self.births, self.tokens, self.positions)
        )
        self.alive = self.alive.new_ones(moves.num_rows)

    def by_settings(self, start: int) -> Iterator[tuple[Setting, np.ndarray | None]]:
        """Which settings rows `start` and following have, each with the rows that have them,
        counted from `start`; None where all have."""
        setting = self.setting[start:]
        if (setting == setting[0]).all():
            yield self.settings[setting[0]], None
            return
        for i in np.unique(setting):
            yield self.settings[i], (setting == i).nonzero()[0]

    def has_stops(self) -> bool:
        """Whether a row may end before its last place."""
        used = np.unique(self.setting) if len(self.settings) > 1 else range(len(self.settings))
        return any(self.settings[i].stops is not None for i in used)


@dataclass(frozen=True)
class Moves:
    """Rows `sources` [moved] int64 go to the places `targets`; the first `num_rows` stay.

    on_host: (targets, sources) for arrays of the host, so that nothing is fetched from a device.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    num_rows: int
    on_host: tuple[np.ndarray, np.ndarray]

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """The rows that stay, [num_rows, ...]; `values` is written to."""
        values[self.targets] = values[self.sources]
        return values[: self.num_rows]


def fill_gaps(stays: torch.Tensor, device: torch.device) -> Moves | None:
    """Moves, as few as can be, that put the rows that stay first; None where all do.

    Args:
        stays: [rows] bool, on the host.
        device: of the rows.
    """
    num_rows = int(stays.sum())
    if num_rows == len(stays):
        return None
    targets = (~stays[:num_rows]).nonzero().squeeze(1)
    sources = stays[num_rows:].nonzero().squeeze(1) + num_rows
    on_host = targets.numpy(), sources.numpy()
    return Moves(sources.to(device), targets.to(device), num_rows, on_host)


# --- Prompts that wait for a place in the batch, first come, first served


@dataclass(frozen=True)
class Prompts:
    """Prompts on the model's device, [groups, P] int64 and bool, left-padded."""

    ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Group:
    """Rows that share a prompt, and the place of the prompt in its batch."""

    prompts: Prompts
    index: int
    length: int
    """Tokens of the prompt, those that were sampled before among them."""
    columns: list[int]
    """Of the buffers, one per row."""
    params: list[SamplingParams]
    num_sampled: list[int]
    prefix: Prefix | None = None
    """What is computed already of the prompt of a single row."""


class PromptQueue:
    """Groups in the order in which they will be let in."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_rows(self) -> int:
        """Rows that wait."""
        return sum(len(group.columns) for group in self._groups)

    def put(self, groups: Sequence[Group], first: bool = False) -> None:
        """Appends groups, or puts them `first`."""
        if first:
            self._groups.extendleft(reversed(groups))
        else:
            self._groups.extend(groups)

    def remove(self, columns: set[int]) -> None:
        """Removes rows, given by their columns of the buffers."""
        kept: deque[Group] = deque()
        for group in self._groups:
            stays = [i for i, column in enumerate(group.columns) if column not in columns]
            if len(stays) == len(group.columns):
                kept.append(group)
            elif stays:
                kept.append(
                    Group(
                        group.prompts,
                        group.index,
                        group.length,
                        [group.columns[i] for i in stays],
                        [group.params[i] for i in stays],
                        [group.num_sampled[i] for i in stays],
                    )
                )
        self._groups = kept

    def forget_prefixes(self) -> None:
        """Invalidates all cached prefixes after a change of weights."""
        self._groups = deque(replace(group, prefix=None) for group in self._groups)

    def are_turns(self) -> bool:
        """Whether all rows are later turns of conversations with cached prefixes."""
        return all(group.prefix is not None for group in self._groups)

    def fitting(self, free: float, whatever: bool) -> int:
        """How many of the first groups have together at most `free` rows; one at least if
        `whatever`."""
        count = 0
        for group in self._groups:
            free -= len(group.columns)
            if free < 0 and not (whatever and not count):
                break
            count += 1
        return count

    def rows_of(self, count: int) -> int:
        """Rows of the first `count` groups."""
        return sum(len(self._groups[i].columns) for i in range(count))

    def take(self, count: int) -> list[Group]:
        """Removes and returns the first groups."""
        return [self._groups.popleft() for _ in range(count)]


def padded(groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [groups, longest] of prompts, which need not be of one batch."""
    longest = max(group.length for group in groups)
    parts, start = [], 0
    for end in range(1, len(groups) + 1):
        # Neighbours of one batch are cut out of it together.
        if end < len(groups) and groups[end].prompts is groups[start].prompts \
                and groups[end].index == groups[end - 1].index + 1:  # fmt: skip
            continue
        held = groups[start].prompts
        rows = slice(groups[start].index, groups[end - 1].index + 1)
        width = min(longest, held.ids.shape[1])
        cut = (held.ids[rows, -width:], held.mask[rows, -width:])
        parts.append([widen(tensor, longest, left=True) for tensor in cut])
        start = end
    ids, mask = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return ids, mask
