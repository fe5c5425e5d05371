"""The groups that are on their way, in the order of their positions, and which of them wait."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

from rllib_llm.rollouts.streaming.entry import Entry, State


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
        """Tokens of all groups in it."""
        return sum(entry.num_tokens for entry in self)

    def num_judged(self, num_oldest: int) -> int:
        """Of so many of the oldest groups, those that are judged."""
        oldest = itertools.islice(self, num_oldest)
        return sum(entry.group is not None for entry in oldest)

    def counts(self) -> Counter[State]:
        """Groups by state."""
        return Counter(entry.state for entry in self)
