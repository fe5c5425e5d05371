"""The rules of asynchronous training: which groups are admitted, and which form a batch, in
lockstep or free.

`Lockstep`: groups are decided in the order of their positions. When a batch is full, as many are
admitted as the table has places for: P. They are sampled with the weights that this batch will
make. When a group is rejected, one more is admitted, for the weights that the batch now being
filled is learnt with. So which weights sample a group is a function of the outcomes before it;
without filters it is max(0, ⌊g/P⌋ - S).

`Free`: whatever the table has room for is admitted, and sampled with the newest weights. A batch is
the first P groups that are ready, within the window.

Batches are numbered, from the number of updates that were done when the table was begun. A batch is
handed out, and learnt from when the next weights are published: one for each update in `train()`,
several where a custom loop takes several.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rllib_llm.rollouts.groups import Entry, GroupTable
from rllib_llm.rollouts.mixture import MixBy
from rllib_llm.rollouts.outcomes import Outcomes

if TYPE_CHECKING:  # a ledger starts without torch
    from rllib_llm.engines.protocol import InFlight

ScheduleName = Literal["lockstep", "free"]
OnStale = Literal["train", "drop"]
Keep = Literal["first", "best_spread", "best_score"]


@dataclass(frozen=True)
class StreamRules:
    """A ledger's rules. A group is all completions of one prompt; P is `num_groups`.

    num_groups: that one update learns from.
    max_staleness: S, updates that a group may be older than the weights it is learnt with, as long
        as groups are taken in their order.
    schedule: "lockstep": the weights that sample a group follow from outcomes alone, never from
        time; "free": the newest.
    window: groups, among which the next may be taken; 1 is strict order.
    num_extra: E, groups beyond (S+1)·P that are on their way at once.
    oversample_keep: "first": what is over is carried over to the next batch; else each batch is the
        best P of P+E groups by their merit, and the others are rejected.
    publish_every: updates from one publication of weights to the next.
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
    judged_with: frozen models whose log-probs the environment adds, "reference" and "teacher".
    env_weights, mix_by: of the environments, see `Mixture`.
    env_samplers: names of the samplers that open each environment; () of one that all open.
    """

    num_groups: int
    max_staleness: int = 1
    schedule: ScheduleName = "lockstep"
    window: int = 1
    num_extra: int = 0
    oversample_keep: Keep = "first"
    publish_every: int = 1
    on_stale: OnStale = "train"
    groups_per_lease: int = 1
    num_parts: int | None = None
    max_rejected: int = 1_000_000
    max_failures: int = 3
    texts_every: int = 0
    bounds_age: bool = True
    timeout_s: float | str | None = "auto"
    judged_with: tuple[str, ...] = ()
    env_weights: tuple[float, ...] = (1.0,)
    mix_by: MixBy = "groups"
    env_samplers: tuple[tuple[str, ...], ...] = ()

    def envs_of(self, sampler: str) -> frozenset[int] | None:
        """Numbers of the environments that a sampler opens; None: all."""
        if not any(self.env_samplers):
            return None
        opened = enumerate(self.env_samplers)
        return frozenset(env for env, names in opened if not names or sampler in names)

    def are_open(self, samplers: Iterable[int]) -> bool:
        """Whether each environment is open in one of these samplers at least."""
        names = {*map(str, samplers)}
        return bool(names) and all(not of or names & {*of} for of in self.env_samplers)

    @property
    def capacity(self) -> int:
        """Groups admitted and not yet learnt from, at most."""
        return self.max_staleness * self.num_compared + self.num_groups + self.num_extra

    @property
    def num_compared(self) -> int:
        """Groups of which a batch is chosen."""
        return self.num_groups + (self.num_extra if self.oversample_keep != "first" else 0)

    def sizes(self, num_groups: int) -> list[int]:
        """Sizes of the batches in which so many groups are sampled and admitted together.
        Independent of the samplers, because the batch decides the round-off."""
        if self.num_parts is None:
            full, rest = divmod(num_groups, self.groups_per_lease)
            return [self.groups_per_lease] * full + [rest] * bool(rest)
        count = min(self.num_parts, num_groups)
        bounds = [num_groups * i // count for i in range(count + 1)]
        return [high - low for low, high in itertools.pairwise(bounds)]

    @property
    def order(self) -> tuple[str | int, ...]:
        """The settings on which a table depends: a table filled under others is converted."""
        return (self.schedule, self.num_groups, self.max_staleness, self.window, self.num_extra,
                self.publish_every, self.oversample_keep)  # fmt: skip

    @property
    def largest_age(self) -> int:
        """Updates, what no group that is learnt from exceeds.

        A group waits for at most `capacity - 1` groups admitted before it and for `window - 1`
        that overtake it: S + ⌈(W-1)/P⌉ where nothing is over-sampled; and its weights are
        published for up to `publish_every - 1` updates before it is admitted.
        """
        return (self.capacity + self.window - 2) // self.num_compared + self.publish_every - 1


@dataclass(frozen=True)
class ServingSettings:
    """Settings common to all samplers of a stream.

    num_completions: of each prompt; env_completions: of each environment's, where there are
        several, at most as many.
    groups_per_lease: that it asks for at once.
    min_valid: completions with a score that a group needs.
    oversample_keep: see `StreamRules`.
    env_filters: of each environment, see `Filters`; (): none.
    by_row: whether groups are sampled row by row, in an engine that new weights reach between two
        steps, where the sampler can.
    max_groups: that a sampler is at work on at once, row by row.
    in_flight: see `Engine.load`.
    masks_stale_prefix: whether of a completion only the tokens of its newest weights are learnt
        from.
    judges_beside: whether groups are judged in threads, while others are sampled; else by the
        environment that has just handed out their prompts.
    explore: whether completions are drawn, or greedy.
    """

    num_completions: int
    groups_per_lease: int = 1
    min_valid: int = 1
    oversample_keep: Keep = "first"
    env_filters: tuple[tuple[str | Mapping[str, Any], ...], ...] = ()
    env_completions: tuple[int, ...] = ()
    by_row: bool = False
    max_groups: int = 1
    in_flight: InFlight = "finish"
    masks_stale_prefix: bool = False
    judges_beside: bool = False
    explore: bool = True

    def completions_of(self, env: int) -> int:
        """Completions of each prompt of an environment."""
        return self.env_completions[env] if self.env_completions else self.num_completions

    def filters_of(self, env: int) -> tuple[str | Mapping[str, Any], ...]:
        """The filters of an environment's groups."""
        return self.env_filters[env] if self.env_filters else ()


def texts_are_due(version: int, every: int) -> bool:
    """Whether the texts of the batch that weights of `version` sampled are logged: every `every`-th
    batch, and of those before the first ones after 1, 2, 4, 8, ... updates; with 0 none."""
    return every > 0 and (
        version % every == 0 or (version < every and version & (version - 1) == 0)
    )


class Schedule:
    """The base of both schedules."""

    def __init__(self, rules: StreamRules, table: GroupTable, outcomes: Outcomes) -> None:
        self._rules, self._table, self._outcomes = rules, table, outcomes
        self._batches: dict[int, list[int]] = {}  # positions, by number
        self.first = 0  # number of the first batch that was not learnt from
        self.step = 0  # updates done
        self.newest = 0  # version that is published
        self._num_extra_taken = 0  # groups handed out for the update beside one batch

    def begin(self, first: int, step: int, batches: Sequence[list[int]] = ()) -> None:
        """Decides all that is in the table, and fills it. `first`: see `first`; after `step`
        updates. `batches`: positions of those that were full, of groups that were compared."""
        self.first, self.step, self.newest = first, step, step
        self._batches, self._num_extra_taken = {}, 0
        for number, positions in enumerate(batches, first):
            for position in positions:
                self._outcomes.passes(self._table[position])
            self._batches[number] = positions
        self.decide([entry.position for entry in self._table])
        self.admit_all()

    def publish(self, version: int) -> None:
        """Groups that these updates sample have these weights."""
        self.newest = version

    def version(self, entry: Entry) -> int | None:
        """The version that samples a group; None if there is none yet."""
        return self.newest

    @property
    def oldest_version(self) -> int:
        """None that samples a group is older."""
        return self.newest

    def admit_all(self) -> None:
        """Admits as many groups as there is room for."""
        raise NotImplementedError

    def decide(self, positions: Iterable[int]) -> None:
        """Groups were judged, and are to be learnt from or not."""
        raise NotImplementedError

    def want(self, nth: int) -> None:
        """Notes that the driver needs its `nth` batch (from 0) of this update, and admits the
        groups missing from it."""
        self._num_extra_taken = nth * self._rules.num_compared

    def choose(self, nth: int) -> list[Entry] | None:
        """That batch; None where it cannot be filled yet."""
        positions = self._batches.get(self.first + nth)
        return None if positions is None else [self._table[p] for p in positions]

    def can_choose(self, nth: int) -> bool:
        """Whether `choose` gives a batch."""
        return self.first + nth in self._batches

    def learn(self, num_batches: int, step: int, version: int) -> list[Entry]:
        """The groups of the first batches, which are batches no more: they were learnt from, and
        what is admitted now is sampled with weights of this version."""
        done = range(self.first, self.first + num_batches)
        entries = [self._table[p] for number in done for p in self._batches.pop(number)]
        self.first, self.step, self.newest = self.first + num_batches, step, version
        self._num_extra_taken = 0
        return entries

    def _admit(self, num_groups: int, turn: int | None = None) -> None:
        if self._outcomes.ending() is not None:
            return
        for size in self._rules.sizes(num_groups) if num_groups > 0 else ():
            self._table.admit(size, turn)

    def batches(self) -> list[list[int]]:
        """Positions of the full batches, where they do not follow from the order of groups."""
        is_compared = self._rules.num_compared > self._rules.num_groups
        return [self._batches[n] for n in sorted(self._batches)] if is_compared else []

    def _fill(self, number: int, positions: list[int]) -> None:
        """Makes the best of these groups a batch."""
        best = positions
        if self._rules.num_compared > self._rules.num_groups:
            groups = {position: self._table[position].group for position in positions}
            merits = {position: group.merit for position, group in groups.items() if group}
            ordered = sorted(positions, key=lambda position: (-merits[position], position))
            best = sorted(ordered[: self._rules.num_groups])
            for position in sorted(ordered[self._rules.num_groups :]):
                self._outcomes.reject(self._table[position], "not_best")
        self._batches[number] = best
        self._outcomes.has_full_batch()

    def fit(self, entries: Sequence[Entry], first: int) -> None:
        """Makes groups that were admitted under other rules ones of these; see `begin`."""
        raise NotImplementedError


class Lockstep(Schedule):
    """See the module. An entry's `turn` is the batch that was being filled when it was admitted: it
    is sampled with the weights that all batches before that one have made."""

    def __init__(self, rules: StreamRules, table: GroupTable, outcomes: Outcomes) -> None:
        super().__init__(rules, table, outcomes)
        self._full = 0  # number of the batch that is being filled
        self._chosen: list[int] = []  # positions, for it
        self._undecided = 0  # position
        self._reached: list[tuple[int, int]] = []  # (turn, version) up to it
        self._is_fitted = False  # groups in the table may have turns to come

    def begin(self, first: int, step: int, batches: Sequence[list[int]] = ()) -> None:
        self._full, self._chosen = first + len(batches), []
        self._undecided = max([self._table.position - 1, *map(max, batches)]) + 1
        self._reached = [(first, step)]
        super().begin(first, step, batches)
        # Restored once more, too: turns that `fit` gave stand in the table.
        self._is_fitted = any((entry.turn or 0) > self._full for entry in self._table)
        self._pull_forward()

    def publish(self, version: int) -> None:
        super().publish(version)
        self._reached[-1] = self._reached[-1][0], version

    def version(self, entry: Entry) -> int | None:
        assert entry.turn is not None, "it was admitted in lockstep"
        for turn, version in self._reached:
            if entry.turn <= turn:
                return version
        return None

    @property
    def oldest_version(self) -> int:
        return self._reached[0][1] if self._reached else self.newest

    def want(self, nth: int) -> None:
        super().want(nth)
        self._reach(self.first + nth)

    def learn(self, num_batches: int, step: int, version: int) -> list[Entry]:
        entries = super().learn(num_batches, step, version)
        self._reach(self.first)
        oldest = min((e.turn for e in self._table if e.turn is not None), default=self.first)
        self._reached = [each for each in self._reached if each[0] >= min(oldest, self.first)]
        return entries

    def _reach(self, turn: int) -> None:
        """Groups of this turn are sampled with the weights that there are now."""
        if turn > self._reached[-1][0]:
            self._reached.append((turn, self.newest))

    def admit_all(self) -> None:
        num_open = len(self._table) - sum(map(len, self._batches.values()))
        self._admit(self._rules.capacity - num_open, self._full)

    def _pull_forward(self) -> None:
        """Moves groups admitted under other rules forward if their turn comes sooner because others
        were rejected."""
        if not self._is_fitted:
            return
        full = {p for positions in self._batches.values() for p in positions}
        for i, entry in enumerate(entry for entry in self._table if entry.position not in full):
            latest = self._full + max(0, i // self._rules.num_compared - self._rules.max_staleness)
            entry.turn = latest if entry.turn is None else min(entry.turn, latest)
        self._is_fitted = any((entry.turn or 0) > self._full for entry in self._table)

    def decide(self, positions: Iterable[int]) -> None:
        # Nothing is decided after a group that ends the run: else it would depend on time whether
        # the driver hears of that end.
        while self._outcomes.ending() is None and (entry := self._next_judged()) is not None:
            self._undecided += 1
            if self._outcomes.passes(entry):
                self._chosen.append(entry.position)
            if len(self._chosen) == self._rules.num_compared:
                self._fill(self._full, self._chosen)
                self._full, self._chosen = self._full + 1, []
            self._pull_forward()
            if self._rules.num_parts is None or self._undecided == self._table.next:
                self.admit_all()

    def _next_judged(self) -> Entry | None:
        """The first group that is not decided, if it is judged."""
        while self._undecided < self._table.next:
            entry = self._table.get(self._undecided)
            if entry is not None:
                return entry if entry.state == "judged" else None
            self._undecided += 1  # closed by a schedule of another order
        return None

    def fit(self, entries: Sequence[Entry], first: int) -> None:
        lag = self._rules.max_staleness
        self._is_fitted = True
        for i, entry in enumerate(entries):
            entry.turn = first + max(0, i // self._rules.num_compared - lag)
            entry.unit = entry.position


class Free(Schedule):
    """See the module. Whether a batch can be filled is asked after every group: the groups for it
    are counted as they get ready, so that the table is searched for whole batches alone."""

    def __init__(self, rules: StreamRules, table: GroupTable, outcomes: Outcomes) -> None:
        super().__init__(rules, table, outcomes)
        self._ready: set[int] = set()  # positions that no batch has
        self._first_open = 0  # position: all before it are ready, in a batch or closed
        self._num_within = 0  # groups that are ready, within the window from there

    def begin(self, first: int, step: int, batches: Sequence[list[int]] = ()) -> None:
        self._ready, self._first_open, self._num_within = set(), self._table.position, 0
        super().begin(first, step, batches)

    def _is_within(self, position: int) -> bool:
        return position < self._first_open + self._rules.window

    def admit_all(self) -> None:
        # Of each batch that nobody has learnt from, the groups that lost have left the table.
        num_lost = (self._rules.num_compared - self._rules.num_groups) * len(self._batches)
        num_held = len(self._table) + num_lost - self._num_extra_taken
        self._admit(self._rules.capacity - num_held)

    def version(self, entry: Entry) -> int | None:
        """The newest; none for groups beyond the capacity, which other rules have admitted."""
        num_open = self._rules.capacity + self._num_extra_taken
        if len(self._table) > num_open and entry not in itertools.islice(self._table, num_open):
            return None
        return self.newest

    def decide(self, positions: Iterable[int]) -> None:
        for position in positions:
            entry = self._table.get(position)
            if entry is not None and entry.state == "judged" and self._outcomes.passes(entry):
                self._ready.add(position)
                self._num_within += self._is_within(position)
        self.admit_all()

    def want(self, nth: int) -> None:
        super().want(nth)
        self.admit_all()

    def can_choose(self, nth: int) -> bool:
        return super().can_choose(nth) or self._can_fill()

    def choose(self, nth: int) -> list[Entry] | None:
        if not super().can_choose(nth):
            if self._rules.on_stale == "drop":
                self._drop_stale()
            if self._can_fill():
                ready = (e.position for e in self._table if e.position in self._ready)
                chosen = list(itertools.islice(ready, self._rules.num_compared))
                self._ready.difference_update(chosen)
                self._num_within -= len(chosen)
                self._fill(self.first + nth, chosen)
        return super().choose(nth)

    def _can_fill(self) -> bool:
        """Whether enough groups are ready, none further than the window after the first that is
        not."""
        while self._first_open < self._table.next and not self._is_open(self._first_open):
            self._first_open += 1
            self._num_within += self._first_open + self._rules.window - 1 in self._ready
        return self._num_within >= self._rules.num_compared

    def _is_open(self, position: int) -> bool:
        entry = self._table.get(position)
        return entry is not None and entry.state not in ("ready", "taken")

    def _drop_stale(self) -> None:
        oldest = self.step - self._rules.max_staleness - self._rules.publish_every + 1
        for entry in [self._table[position] for position in sorted(self._ready)]:
            assert entry.group is not None, "it is judged"
            if 0 <= entry.group.oldest_version < oldest:
                self._ready.discard(entry.position)
                self._num_within -= self._is_within(entry.position)
                self._outcomes.reject(entry, "stale")
        self.admit_all()

    def fit(self, entries: Sequence[Entry], first: int) -> None:
        for entry in entries:
            entry.turn = None
