"""The rows of a decoder's batch: what is known of them on the host, and what on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from rllib_llm.engines.params import SamplingParams


class BatchRows:
    """Rows in the order in which they stand in the batch.

    A row's tokens are counted by the decoder's clock, which goes on by one with every step: its
    token at place p is sampled at the clock's `born + p`. So the host knows the places of all rows
    and when each is full without asking the device; only who was ended by a stop token it has to
    ask.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Distinct settings, and their stop tokens on the device; those of a row are an index.
        self.settings: list[SamplingParams] = []
        self.stops: list[torch.Tensor] = []
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
            self.settings, self.stops = [], []
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
            if known == params:
                return i
        self.settings.append(params)
        stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=self.device)
        self.stops.append(stops)
        return len(self.settings) - 1

    def keep(self, moves: Moves) -> None:
        """Lets rows go. Those that stay have not ended."""
        targets, sources = moves.targets.cpu().numpy(), moves.sources.cpu().numpy()
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

    def by_settings(self, start: int) -> Iterator[tuple[int, np.ndarray | None]]:
        """Which settings rows `start` and following have, each with the rows that have them,
        counted from `start`; None where all have."""
        setting = self.setting[start:]
        if (setting == setting[0]).all():
            yield int(setting[0]), None
            return
        for i in np.unique(setting):
            yield int(i), (setting == i).nonzero()[0]

    def has_stops(self) -> bool:
        """Whether a row may end before its last place."""
        used = np.unique(self.setting) if len(self.settings) > 1 else range(len(self.settings))
        return any(self.settings[i].stop_token_ids for i in used)


@dataclass(frozen=True)
class Moves:
    """Rows `sources` [moved] int64 go to the places `targets`; the first `num_rows` stay."""

    sources: torch.Tensor
    targets: torch.Tensor
    num_rows: int

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
    return Moves(sources.to(device), targets.to(device), num_rows)
