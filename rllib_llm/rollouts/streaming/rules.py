"""How far samplers may be ahead, and in which order groups are learnt from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    max_rejected: groups that may be rejected one after the other before a batch is full.
    max_failures: exceptions that may pass by themselves, after which a group has failed; in
        lockstep none does, since what takes its place would depend on the fault.
    returns_texts: whether texts are wanted that no reward function needs.
    timeout_s: of a lease, see `TimeLimit`.
    """

    num_groups: int
    max_staleness: int = 1
    schedule: Schedule = "lockstep"
    window: int = 1
    num_extra: int = 0
    on_stale: OnStale = "train"
    groups_per_lease: int = 1
    max_rejected: int = 1_000_000
    max_failures: int = 3
    returns_texts: bool = False
    timeout_s: float | str | None = "auto"

    @property
    def capacity(self) -> int:
        """Groups admitted and not yet learnt from, at most."""
        return (self.max_staleness + 1) * self.num_groups + self.num_extra

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
