"""Prompt groups in flight: the ledger's record of each, the parts that travel between sampler,
ledger and driver, and the table of groups by position."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from rllib_llm.weights.published import PublishedWeights

UNJUDGED = "unjudged"  # reason for which a group is rejected

State = Literal["waiting", "leased", "partial", "judged", "ready", "taken"]
"""Nobody samples it yet; a sampler does; nobody does, but tokens of it are there; judged, and its
turn has not come; to be learnt from; being learnt from. Closed groups leave the table: they were
trained, rejected or failed."""


@dataclass(frozen=True)
class PartialCompletion:
    """The sampled tokens of one unfinished completion."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: str = "aborted"


@dataclass(frozen=True)
class JudgedGroup:
    """All completions of one prompt, as a sampler hands them in.

    payload: the rows (see `judged_groups.py`); the ledger never opens it.
    num_tokens: sampled tokens of all rows.
    num_lost: of them, those of rows that were not judged, which nobody learns from.
    oldest_version: of the weights that sampled any of the tokens.
    reason: why it is not to be learnt from, "" where it is; `UNJUDGED` where no row has a score.
    cause: what was raised where nothing could be judged.
    continues: whether it goes on with what there was of it when it was leased.
    """

    position: int
    payload: Any
    num_tokens: int
    num_lost: int
    oldest_version: int
    reason: str = ""
    continues: bool = False
    cause: str = ""


@dataclass(frozen=True)
class Lease:
    """Consecutive groups `position .. position + num_groups - 1`, to be sampled by one sampler.

    id: fences: what is handed in under a lease that has ended is refused.
    weights: to sample with. order: of their publication, which grows; calls overtake one another.
    partial: the partial output of each group, by position.
    """

    id: int
    position: int
    num_groups: int
    weights: PublishedWeights
    return_texts: bool = False
    partial: dict[int, tuple[PartialCompletion, ...]] = field(default_factory=dict)
    order: int = 0

    @property
    def positions(self) -> range:
        """The positions of its groups."""
        return range(self.position, self.position + self.num_groups)


@dataclass(eq=False)
class Entry:
    """A group in the table.

    turn: batch that was being filled when it was admitted, in lockstep; see `Lockstep`.
    unit: groups alike in it were admitted together and are sampled as one batch.
    num_updates_extra: updates that were made without a batch of the table while it was in it.
    """

    position: int
    turn: int | None
    unit: int
    state: State = "waiting"
    lease: int = 0
    sampler: str = ""
    leased_at: float = 0.0
    lease_size: int = 1  # groups that were leased with it
    deadline: float = float("inf")
    num_expired: int = 0
    num_failures: int = 0
    num_updates_extra: int = 0
    group: JudgedGroup | None = None
    partial: tuple[PartialCompletion, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that are there of it."""
        if self.group is not None:
            return self.group.num_tokens
        return sum(len(tokens.token_ids) for tokens in self.partial)

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled any of its tokens; -1 without any."""
        if self.group is not None:
            return self.group.oldest_version
        return min((v for tokens in self.partial for v in tokens.versions if v >= 0), default=-1)


@dataclass(frozen=True)
class Closed:
    """A group that is not learnt from, on its way to the driver; there are no rows of one that
    failed."""

    position: int
    status: Literal["rejected", "failed"]
    reason: str
    group: JudgedGroup | None = None


@dataclass(frozen=True)
class Ending:
    """Why no batch gets full: too many groups in a row were rejected, failed, or not judged.

    counts: groups by reason. limit: that it went beyond. cause: what was raised last where a group
    could not be judged.
    """

    kind: Literal["rejected", "failed", "unjudged"]
    counts: dict[str, int]
    limit: int
    cause: str = ""


@dataclass(frozen=True)
class Answer:
    """The ledger's answer to a driver that asks for a batch.

    groups: the batch, in order; None while it is not there.
    closed: groups rejected or failed that the driver has not said it has seen.
    num_closed: of all such groups so far, for it to say so.
    num_judged: of the oldest groups, as many as a batch has, those that are judged.
    failures: (sampler, exception as text) since the last answer.
    expired: (sampler, why) of leases that ended without an answer.
    missing: versions of weights that leases wait for and the ledger does not have.
    ending: why no batch gets full, if none does.
    """

    groups: list[JudgedGroup] | None = None
    closed: tuple[Closed, ...] = ()
    num_closed: int = 0
    num_judged: int = 0
    failures: tuple[tuple[str, Any], ...] = ()
    expired: tuple[tuple[str, str], ...] = ()
    missing: tuple[int, ...] = ()
    ending: Ending | None = None


class GroupTable:
    """Open groups by position. Those that are closed leave it; positions are never used twice."""

    def __init__(self) -> None:
        self.next = 0  # position admitted next
        self._entries: dict[int, Entry] = {}  # in the order of their positions
        self._waiting: list[int] = []  # heap of positions that nobody samples, among others

    def begin(self, position: int) -> None:
        """Empties it; the next group has `position`."""
        self.next = position
        self._entries, self._waiting = {}, []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __getitem__(self, position: int) -> Entry:
        return self._entries[position]

    def get(self, position: int) -> Entry | None:
        """The group at a position; None where it is closed, or not yet admitted."""
        return self._entries.get(position)

    def admit(self, num_groups: int, turn: int | None) -> None:
        """The next groups, which are sampled as one batch, and wait from now on."""
        unit = self.next
        for position in range(unit, unit + num_groups):
            self.put(Entry(position, turn, unit))
        self.next = unit + num_groups

    def put(self, entry: Entry) -> None:
        """Takes a group in; it waits unless it is judged."""
        self._entries[entry.position] = entry
        if entry.group is None:
            self.wait(entry)
        else:
            entry.state = "judged"

    def wait(self, entry: Entry) -> None:
        """Nobody samples the group any more."""
        entry.state = "partial" if entry.partial else "waiting"
        entry.lease, entry.sampler = 0, ""
        heapq.heappush(self._waiting, entry.position)

    def first_waiting(self) -> Entry | None:
        """The first group that nobody samples."""
        while self._waiting:
            entry = self._entries.get(self._waiting[0])
            if entry is not None and entry.state in ("waiting", "partial"):
                return entry
            heapq.heappop(self._waiting)
        return None

    def take_unit(
        self, room: int, *, whole: bool, can_sample: Callable[[Entry], bool]
    ) -> list[Entry]:
        """The first groups that wait and were admitted together, [] where they cannot be sampled.

        Args:
            room: groups at most.
            whole: all that were admitted together, whatever the room.
            can_sample: whether there are the weights for a group.
        """
        entries: list[Entry] = []
        while (entry := self.first_waiting()) is not None and can_sample(entry):
            fits = not entries or (
                entry.unit == entries[0].unit
                and entry.position == entries[-1].position + 1
                and (whole or len(entries) < room)
            )
            if not fits:
                break
            heapq.heappop(self._waiting)
            entries.append(entry)
        return entries

    def rank(self, entry: Entry) -> int:
        """Groups before this one."""
        return next(i for i, each in enumerate(self) if each is entry)

    def close(self, entry: Entry) -> None:
        """Takes a group out."""
        del self._entries[entry.position]

    @property
    def position(self) -> int:
        """All groups before it are closed."""
        return next(iter(self._entries), self.next)

    @property
    def num_tokens(self) -> int:
        """Tokens of all groups in the table."""
        return sum(entry.num_tokens for entry in self)

    def num_judged(self, num_oldest: int) -> int:
        """How many of the `num_oldest` oldest groups are judged."""
        oldest = itertools.islice(self, num_oldest)
        return sum(entry.group is not None for entry in oldest)

    def counts(self) -> Counter[State]:
        """Groups by state."""
        return Counter(entry.state for entry in self)
