"""How far samplers may be ahead, in which order groups are learnt from, how they are sampled."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # a ledger starts without torch
    from rllib_llm.engines.protocol import InFlight

Schedule = Literal["lockstep", "free"]
OnStale = Literal["train", "drop"]


@dataclass(frozen=True)
class StreamRules:
    """What a ledger goes by. A group is all completions of one prompt; P is `num_groups`.

    num_groups: that one update learns from.
    max_staleness: S, updates that a group may be older than the weights it is learnt with, as long
        as groups are taken in their order.
    schedule: "lockstep": the weights that sample a group follow from outcomes alone, never from
        time; "free": the newest.
    window: groups, among which the next may be taken; 1 is strict order.
    num_extra: groups beyond (S+1)·P that are on their way at once.
    on_stale: whether a group that is older than S after all is learnt from or dropped.
    groups_per_lease: consecutive groups that are sampled as one batch.
    num_parts: batches that the groups admitted together are cut into, instead; they are dealt to
        samplers, each a call that is waited for. What takes the place of rejected groups is
        admitted at once, when all others are decided. None: samplers lease by themselves.
    max_rejected: groups that may be rejected one after the other before a batch is full.
    max_failures: exceptions that may pass by themselves, after which a group has failed; in
        lockstep none does, since what takes its place would depend on the fault.
    texts_every: weights from those whose completions come with texts that no reward function needs
        to the next; 0: none do.
    bounds_age: whether ages are asserted: not where a server samples with weights from elsewhere.
    timeout_s: of a lease, see `TimeLimit`.
    """

    num_groups: int
    max_staleness: int = 1
    schedule: Schedule = "lockstep"
    window: int = 1
    num_extra: int = 0
    on_stale: OnStale = "train"
    groups_per_lease: int = 1
    num_parts: int | None = None
    max_rejected: int = 1_000_000
    max_failures: int = 3
    texts_every: int = 0
    bounds_age: bool = True
    timeout_s: float | str | None = "auto"

    @property
    def capacity(self) -> int:
        """Groups admitted and not yet learnt from, at most."""
        return (self.max_staleness + 1) * self.num_groups + self.num_extra

    def sizes(self, num_groups: int) -> list[int]:
        """Of the batches that so many groups are sampled in, which are admitted together. Not of
        who is there to sample them: what is computed together decides the round-off."""
        if self.num_parts is None:
            full, rest = divmod(num_groups, self.groups_per_lease)
            return [self.groups_per_lease] * full + [rest] * bool(rest)
        count = min(self.num_parts, num_groups)
        bounds = [num_groups * i // count for i in range(count + 1)]
        return [high - low for low, high in itertools.pairwise(bounds)]

    @property
    def order(self) -> tuple[str | int, ...]:
        """What a table depends on: one that was filled under others is fitted to these."""
        return (self.schedule, self.num_groups, self.max_staleness, self.window, self.num_extra)

    @property
    def largest_age(self) -> int:
        """Updates, what no group that is learnt from exceeds.

        A group waits for at most `capacity - 1` groups admitted before it and for `window - 1`
        that overtake it: S + ⌈(W-1)/P⌉ where nothing is over-sampled.
        """
        return (self.capacity + self.window - 2) // self.num_groups


@dataclass(frozen=True)
class ServingSettings:
    """What every sampler of a stream goes by.

    num_completions: of each prompt.
    groups_per_lease: that it asks for at once.
    min_valid: completions with a score that a group needs.
    filters: see `Filters`.
    by_row: whether groups are sampled row by row, in an engine that new weights reach between two
        steps, where the sampler can.
    max_groups: that a sampler is at work on at once, row by row.
    in_flight: see `Engine.load`.
    masks_stale_prefix: see `RowStream`.
    explore: whether completions are drawn, or greedy.
    """

    num_completions: int
    groups_per_lease: int = 1
    min_valid: int = 1
    filters: tuple[str | Mapping[str, Any], ...] = ()
    by_row: bool = False
    max_groups: int = 1
    in_flight: InFlight = "finish"
    masks_stale_prefix: bool = False
    explore: bool = True


def texts_are_due(version: int, every: int) -> bool:
    """Whether the texts of the batch that weights of `version` sampled are logged: every `every`-th
    batch, and of those before the first ones after 1, 2, 4, 8, ... updates; with 0 none."""
    return every > 0 and (
        version % every == 0 or (version < every and version & (version - 1) == 0)
    )
