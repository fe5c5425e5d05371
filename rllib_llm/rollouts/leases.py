"""Leases of prompt groups to samplers, with deadlines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rllib_llm.rollouts.groups import Entry, GroupTable
from rllib_llm.shared.process import TimeLimit

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
        table: whose groups are leased.
        limit: seconds that a lease may take.
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
        self._of_closed: dict[int, int] = {}  # leases by position
        self._expired: list[tuple[str, str]] = []  # that the driver was not told of

    def begin(self, num_given: int = 0) -> None:
        """None is held; those given before, or `num_given` others, are refused from now on."""
        self.num_given = max(self.num_given, num_given) + _GENERATION
        self._held, self._of_closed, self._expired = {}, {}, []
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
            if not self._leases_of[entry.sampler]:
                del self._leases_of[entry.sampler]

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

    def put_off(self, sampler: str, seconds: float) -> None:
        """Takes seconds in which a sampler could not work out of the time of its leases."""
        for lease in self._of_sampler(sampler):
            for entry in self._held[lease].values():
                entry.leased_at += seconds
                entry.deadline += seconds

    def grant(self, until: float) -> None:
        """Ends no lease before then."""
        for held in self._held.values():
            for entry in held.values():
                entry.deadline = max(entry.deadline, until)

    def has_late(self, now: float) -> bool:
        """Whether the time of a lease is up."""
        if now <= self._none_late_before:
            return False
        deadlines = (entry.deadline for held in self._held.values() for entry in held.values())
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
            why = (
                f"it gave no answer in {now - held[0].leased_at:.0f} s in which it had cores to "
                f"work on (sampler_timeout_s={self._limit.setting!r}; slowest answer so far "
                f"{self._limit.slowest:.1f} s)"
            )
            self._expired.append((sampler, why))
            for lease in self._of_sampler(sampler):
                self.num_expired += 1
                self.end(lease)

    def take_expired(self) -> list[tuple[str, str]]:
        """(sampler, why) of leases that ended without an answer since the last call."""
        taken, self._expired = self._expired, []
        return taken

    # --- closed groups -------------------------------------------------------------------------

    def remember(self, entry: Entry) -> None:
        """Remembers the lease under which a closed group was handed in."""
        self._of_closed[entry.position] = entry.lease
        while len(self._of_closed) > self._num_remembered:
            del self._of_closed[next(iter(self._of_closed))]

    def was_handed_in(self, lease: int, position: int) -> bool:
        """Whether a group came in under this very lease already: Ray made the call twice."""
        entry = self._table.get(position)
        if entry is None:
            return self._of_closed.get(position) == lease
        return entry.lease == lease and entry.group is not None

    def words(self, now: float) -> str:
        """The samplers being waited for, as text."""
        parts = [
            f"groups {min(held)}-{max(held)} with sampler {_first(held).sampler} for "
            f"{now - _first(held).leased_at:.0f} s"
            for held in self._held.values()
        ]
        return "; ".join(parts) or "nobody samples"
