"""What is admitted, and which groups a batch is made of: in lockstep or free.

`Lockstep`: groups are decided in the order of their positions. When a batch is full, P more are
admitted for the weights that it will make; when a group is rejected, one more for the weights that
the batch now being filled is learnt with. So which weights sample a group is a function of the
outcomes before it; without filters it is max(0, ⌊g/P⌋ - S).

`Free`: whatever the table has room for is admitted, and sampled with the newest weights. A batch is
the first P groups that are ready, within the window.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from rllib_llm.rollouts.streaming.entry import Entry
from rllib_llm.rollouts.streaming.outcomes import Outcomes
from rllib_llm.rollouts.streaming.rules import StreamRules
from rllib_llm.rollouts.streaming.table import GroupTable


class Schedule:
    """What both have in common.

    Args:
        rules: how far ahead, in which order.
        table, outcomes: of the groups.
    """

    def __init__(self, rules: StreamRules, table: GroupTable, outcomes: Outcomes) -> None:
        self._rules, self._table, self._outcomes = rules, table, outcomes
        self._batches: dict[int, list[int]] = {}  # positions, by step

    def begin(self, position: int, step: int) -> None:
        """Fills the empty table, which goes on at `position` after `step` updates."""
        self._batches = {}

    def admit_all(self) -> None:
        """Whatever there is room for now."""
        raise NotImplementedError

    def decide(self, positions: Iterable[int]) -> None:
        """Groups were judged, and are to be learnt from or not."""
        raise NotImplementedError

    def choose(self, step: int) -> None:
        """Fills the batch of `step`, if it can be and is not."""

    def can_choose(self, step: int) -> bool:
        """Whether there is a batch of `step`, or `choose` makes one."""
        return step in self._batches

    def chosen(self, step: int) -> list[Entry] | None:
        """The batch of `step`."""
        positions = self._batches.get(step)
        return None if positions is None else [self._table[p] for p in positions]

    def take_before(self, step: int) -> list[Entry]:
        """The groups of batches before `step`, which are batches no more."""
        done = sorted(s for s in self._batches if s < step)
        return [self._table[p] for s in done for p in self._batches.pop(s)]

    def _admit(self, num_groups: int, version: int | None) -> None:
        if self._outcomes.too_many():
            return
        for i in range(num_groups):
            self._table.admit(version, i % self._rules.groups_per_lease)

    def _passes(self, entry: Entry) -> bool:
        """Whether a judged group is to be learnt from; closes it where it is not."""
        assert entry.group is not None, "only judged groups are decided"
        if entry.group.reason:
            self._outcomes.reject(entry, entry.group.reason)
            return False
        entry.state = "ready"
        return True

    def _fill(self, step: int, positions: list[int]) -> None:
        self._batches[step] = positions
        self._outcomes.has_full_batch()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"batches": copy.deepcopy(self._batches)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._batches = copy.deepcopy(state["batches"])


class Lockstep(Schedule):
    """See the module."""

    def __init__(self, rules: StreamRules, table: GroupTable, outcomes: Outcomes) -> None:
        super().__init__(rules, table, outcomes)
        self._full = 0  # step of the batch that is being filled
        self._chosen: list[int] = []  # positions, for it
        self._undecided = 0  # position

    def begin(self, position: int, step: int) -> None:
        super().begin(position, step)
        self._full, self._chosen, self._undecided = step, [], position
        self.admit_all()

    def admit_all(self) -> None:
        if not len(self._table):
            self._admit(self._rules.capacity, self._full)

    def decide(self, positions: Iterable[int]) -> None:
        while True:
            entry = self._table.get(self._undecided)
            if entry is None or entry.state != "judged":
                return
            self._undecided += 1
            if not self._passes(entry):
                self._admit(1, self._full)
                continue
            self._chosen.append(entry.position)
            if len(self._chosen) == self._rules.num_groups:
                self._fill(self._full, self._chosen)
                self._full, self._chosen = self._full + 1, []
                self._admit(self._rules.num_groups, self._full)

    def state(self) -> dict[str, Any]:
        own = {"full": self._full, "chosen": list(self._chosen), "undecided": self._undecided}
        return super().state() | own

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._full, self._undecided = state["full"], state["undecided"]
        self._chosen = list(state["chosen"])


class Free(Schedule):
    """See the module."""

    def begin(self, position: int, step: int) -> None:
        super().begin(position, step)
        self.admit_all()

    def admit_all(self) -> None:
        self._admit(self._rules.capacity - len(self._table), None)

    def decide(self, positions: Iterable[int]) -> None:
        for position in positions:
            entry = self._table.get(position)
            if entry is not None and entry.state == "judged":
                self._passes(entry)
        self.admit_all()

    def can_choose(self, step: int) -> bool:
        return step in self._batches or len(self._first_ready()) == self._rules.num_groups

    def choose(self, step: int) -> None:
        if step in self._batches:
            return
        if self._rules.on_stale == "drop":
            self._drop_stale(step)
        chosen = self._first_ready()
        if len(chosen) == self._rules.num_groups:
            self._fill(step, chosen)

    def _first_ready(self) -> list[int]:
        """The first P groups that are ready, none further than the window behind the first that is
        not."""
        chosen: list[int] = []
        end = float("inf")
        for entry in self._table:
            if entry.position >= end or len(chosen) == self._rules.num_groups:
                break
            if entry.state == "ready":
                chosen.append(entry.position)
            elif entry.state != "taken":
                end = min(end, entry.position + self._rules.window)
        return chosen

    def _drop_stale(self, step: int) -> None:
        for entry in list(self._table):
            oldest = entry.group.oldest_version if entry.group is not None else step
            if entry.state == "ready" and 0 <= oldest < step - self._rules.max_staleness:
                self._outcomes.reject(entry, "stale")
        self.admit_all()


def open_schedule(rules: StreamRules, table: GroupTable, outcomes: Outcomes) -> Schedule:
    """The schedule that the rules name."""
    kind = Lockstep if rules.schedule == "lockstep" else Free
    return kind(rules, table, outcomes)
