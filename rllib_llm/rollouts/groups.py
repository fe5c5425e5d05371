"""Prompt groups in flight: the ledger's record of each, the parts that travel between sampler,
ledger and driver, and the table of groups by position."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rllib_llm.rollouts.mixture import Place
from rllib_llm.shared.process import TimeLimit
from rllib_llm.weights.published import PublishedWeights

UNJUDGED = "unjudged"  # reason for which a group is rejected

State = Literal["waiting", "leased", "partial", "judged", "ready", "taken"]
"""No sampler has it yet; a sampler does; none does, but tokens of it are there; judged, and its
turn has not come; to be learnt from; being learnt from. Closed groups leave the table: they were
trained, rejected or failed."""


@dataclass(frozen=True)
class PartialCompletion:
    """The sampled tokens of one unfinished completion.

    prompt: checksum of the prompt's tokens; 0 if unknown. experts: of a row that has ended, see
    `engines.protocol.Ended`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: str = "aborted"
    prompt: int = 0
    experts: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class JudgedGroup:
    """All completions of one prompt, as a sampler hands them in.

    payload: the rows (see `judged_batch.py`); the ledger never opens it.
    num_tokens: sampled tokens of all rows.
    num_lost: of them, those of rows that were not judged, which are not learnt from.
    oldest_version: of the weights that sampled any of the tokens.
    reason: why it is not to be learnt from, "" where it is; `UNJUDGED` where no row has a score.
    cause: what was raised where nothing could be judged.
    continues: whether it continues the partial output that it was leased with.
    merit: the largest are kept where more groups are begun than learnt from.
    """

    position: int
    payload: Any
    num_tokens: int
    num_lost: int
    oldest_version: int
    reason: str = ""
    continues: bool = False
    cause: str = ""
    merit: float = 0.0


@dataclass(frozen=True)
class Lease:
    """Groups to be sampled by one sampler: `position .. position + num_groups - 1`, or `groups`,
    where those between are of environments that it does not open.

    id: fences: what is handed in under a lease that has ended is refused.
    weights: to sample with. order: of their publication, which grows; calls overtake one another.
    partial: the partial output of each group, by position.
    places: of each group, the environment and the position there.
    """

    id: int
    position: int
    num_groups: int
    weights: PublishedWeights
    return_texts: bool = False
    partial: dict[int, tuple[PartialCompletion, ...]] = field(default_factory=dict)
    order: int = 0
    places: tuple[Place, ...] = ()
    groups: tuple[int, ...] = ()

    @property
    def positions(self) -> Sequence[int]:
        """The positions of its groups."""
        return self.groups or range(self.position, self.position + self.num_groups)


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

    def put_off(self, seconds: float) -> None:
        """Takes seconds in which its sampler could not work out of the time of its lease."""
        self.leased_at += seconds
        self.deadline += seconds

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
        self._waiting: list[int] = []  # heap of positions that no sampler has, among others

    def begin(self, position: int) -> None:
        """Empties it; the next group has `position`."""
        self.next, self._entries, self._waiting = position, {}, []

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
        """Takes the next groups in, which are sampled as one batch, and wait from now on."""
        unit, self.next = self.next, self.next + num_groups
        for position in range(unit, self.next):
            self.put(Entry(position, turn, unit))

    def put(self, entry: Entry) -> None:
        """Takes a group in; it waits unless it is judged."""
        self._entries[entry.position] = entry
        if entry.group is None:
            self.wait(entry)
        else:
            entry.state = "judged"

    def wait(self, entry: Entry) -> None:
        """Marks a group that no sampler has any more."""
        entry.state = "partial" if entry.partial else "waiting"
        entry.lease, entry.sampler = 0, ""
        heapq.heappush(self._waiting, entry.position)

    def first_waiting(self) -> Entry | None:
        """The first group that no sampler has."""
        while self._waiting:
            entry = self._entries.get(self._waiting[0])
            if entry is not None and entry.state in ("waiting", "partial"):
                return entry
            heapq.heappop(self._waiting)
        return None

    def take_unit(
        self, room: int, *, whole: bool, can_sample: Callable[[Entry], bool],
        env_of: Callable[[int, int | None], int], envs: Collection[int] | None,
    ) -> list[Entry]:  # fmt: skip
        """The first groups that wait and were admitted together, [] where they cannot be sampled;
        of a sampler that does not open all environments, those of its own among them. Those of an
        environment have consecutive positions there.

        Args:
            whole: all that were admitted together, whatever the room.
            can_sample: whether there are the weights for a group.
            env_of: the environment of a position, given its turn.
            envs: the environments that the sampler opens; None: all.
        """
        entries: list[Entry] = []
        skipped: list[int] = []
        last: dict[int, int] = {}  # position that was taken of each environment
        while (entry := self.first_waiting()) is not None and can_sample(entry):
            position, env = entry.position, env_of(entry.position, entry.turn)
            if envs is not None and env not in envs:
                skipped.append(heapq.heappop(self._waiting))
                continue
            # Others of its environment in between are in flight or judged; those of another
            # environment say nothing: they may have come without an error, and these not.
            if entries and not (
                entry.unit == entries[0].unit
                and (whole or len(entries) < room)
                and not any(env_of(p, None) == env
                            for p in range(last.get(env, position) + 1, position))
            ):  # fmt: skip
                break
            heapq.heappop(self._waiting)
            entries.append(entry)
            last[env] = position
        for position in skipped:
            heapq.heappush(self._waiting, position)
        return entries

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

    def counts(self) -> Counter[State]:
        """Groups by state."""
        return Counter(entry.state for entry in self)


_GENERATION = 1_000_000_000  # leases of one ledger before it is restored


def _deadline(entry: Entry, limit: float | None, now: float) -> float:
    """When a lease of a group ends: it may be the group that is slow, not the sampler."""
    return float("inf") if limit is None else now + limit * 2**entry.num_expired


def _first(held: dict[int, Entry]) -> Entry:
    return next(iter(held.values()))


class Leases:
    """Leases of a table's groups. Leases are fenced: ids are never reused, and results under an
    ended lease are refused.

    Args:
        num_remembered: closed groups whose leases are still known.
    """

    def __init__(self, table: GroupTable, limit: TimeLimit, num_remembered: int) -> None:
        self.num_given = 0
        self.num_expired = 0  # that ended without an answer
        self._table, self._limit = table, limit
        # What each lease is of, and was not handed in, by position.
        self._held: dict[int, dict[int, Entry]] = {}
        self._leases_of: dict[str, set[int]] = {}  # that are held, by sampler
        self._none_late_before = float("inf")
        self._num_remembered = num_remembered
        self._of_closed: OrderedDict[int, int] = OrderedDict()  # leases by position, the last ones
        # (sampler, why) of leases that ended without an answer, not yet reported to the driver.
        self.expired: list[tuple[str, str]] = []

    def begin(self, num_given: int = 0) -> None:
        """None is held; those given before, or `num_given` others, are refused from now on."""
        self.num_given = max(self.num_given, num_given) + _GENERATION
        self._held, self._of_closed, self.expired = {}, OrderedDict(), []
        self._leases_of, self._none_late_before = {}, float("inf")

    def give(self, sampler: str, entries: Sequence[Entry], now: float) -> int:
        """Leases groups to a sampler; the lease's id."""
        self.num_given += 1
        limit = self._limit.seconds(len(entries))
        for entry in entries:
            entry.state, entry.lease, entry.sampler = "leased", self.num_given, sampler
            entry.leased_at, entry.lease_size = now, len(entries)
            entry.deadline = _deadline(entry, limit, now)
            self._none_late_before = min(self._none_late_before, entry.deadline)
        self._held[self.num_given] = {entry.position: entry for entry in entries}
        self._leases_of.setdefault(sampler, set()).add(self.num_given)
        return self.num_given

    def sampler(self, lease: int) -> str:
        """The holder of a lease; "" if it has ended."""
        held = self._held.get(lease)
        return _first(held).sampler if held else ""

    def entry(self, lease: int, position: int) -> Entry | None:
        """A group, if it is being sampled under this lease."""
        entry = self._table.get(position)
        is_held = entry is not None and entry.state == "leased" and entry.lease == lease
        return entry if is_held else None

    def hand_in(self, entry: Entry, now: float) -> None:
        """A group that was leased is judged."""
        self._limit.record(now - entry.leased_at, entry.lease_size)
        self._take_out(entry)

    def _take_out(self, entry: Entry) -> None:
        """Removes a group from its lease, which ends when it is empty."""
        held = self._held[entry.lease]
        del held[entry.position]
        if not held:
            del self._held[entry.lease]
            self._leases_of[entry.sampler].discard(entry.lease)

    def end(self, lease: int, positions: Collection[int] | None = None) -> list[Entry]:
        """Ends a lease, or takes some of its groups out of it; those groups, which wait again."""
        held = self._held.get(lease, {}).values()
        entries = [each for each in held if positions is None or each.position in positions]
        for entry in entries:
            self._take_out(entry)
            self._table.wait(entry)
        return entries

    def _of_sampler(self, sampler: str) -> list[int]:
        return sorted(self._leases_of.get(sampler, ()))

    def end_unknown(self, sampler: str, known: Iterable[int]) -> None:
        """Ends the leases of a sampler that it does not know of."""
        for lease in set(self._of_sampler(sampler)) - set(known):
            self.end(lease)

    def holds_more(self, sampler: str, known: Iterable[int]) -> bool:
        """Whether a sampler holds leases that it does not know of."""
        return not set(self._of_sampler(sampler)) <= set(known)

    def renew(self, sampler: str, leases: Collection[int], now: float) -> list[int]:
        """Puts off the deadlines of a sampler's leases; those of them that hold."""
        held = sorted(set(self._of_sampler(sampler)) & set(leases))
        for lease in held:
            limit = self._limit.seconds(len(self._held[lease]))
            for entry in self._held[lease].values():
                entry.deadline = _deadline(entry, limit, now)
        return held

    def entries(self, sampler: str | None = None) -> Iterator[Entry]:
        """The groups that are leased to a sampler; None: to any."""
        leases = self._held if sampler is None else self._of_sampler(sampler)
        return itertools.chain.from_iterable(self._held[lease].values() for lease in leases)

    def has_late(self, now: float) -> bool:
        """Whether the time of a lease is up."""
        if now <= self._none_late_before:
            return False
        deadlines = (entry.deadline for entry in self.entries())
        self._none_late_before = min(deadlines, default=float("inf"))
        return self._none_late_before < now

    def expire(self, now: float) -> None:
        """Ends expired leases, and all others of their samplers, which do not respond and are
        restarted, once per sampler."""
        if not self.has_late(now):
            return
        held_by = [list(held.values()) for held in self._held.values()]
        late = [held for held in held_by if min(e.deadline for e in held) < now]
        for held in late:
            for entry in held:
                entry.num_expired += 1
        for sampler, held in {held[0].sampler: held for held in late}.items():
            silent, limit = now - held[0].leased_at, self._limit
            why = (f"it had cores and gave no answer in {silent:.0f} s (sampler_timeout_s="
                   f"{limit.setting!r}; slowest answer so far {limit.slowest:.1f} s)")  # fmt: skip
            self.expired.append((sampler, why))
            for lease in self._of_sampler(sampler):
                self.num_expired += 1
                self.end(lease)

    # --- closed groups -------------------------------------------------------------------------

    def remember(self, entry: Entry) -> None:
        """Remembers the lease under which a closed group was handed in."""
        self._of_closed[entry.position] = entry.lease
        while len(self._of_closed) > self._num_remembered:
            self._of_closed.popitem(last=False)

    def was_handed_in(self, lease: int, position: int) -> bool:
        """Whether a group came in under this very lease already: Ray made the call twice."""
        entry = self._table.get(position)
        if entry is None:
            return self._of_closed.get(position) == lease
        return entry.lease == lease and entry.group is not None

    def words(self, now: float) -> str:
        """The samplers being waited for, as text."""
        return "; ".join(
            f"groups {min(held)}-{max(held)} with sampler {_first(held).sampler} for "
            f"{now - _first(held).leased_at:.0f} s"
            for held in self._held.values()
        ) or "no sampler works"  # fmt: skip
