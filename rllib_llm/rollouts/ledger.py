"""The table of prompt groups in flight: their leases, states and outcomes.

    waiting ─▶ leased ─▶ judged ─▶ ready ─▶ taken ─▶ trained
       ▲         │          └────▶ rejected (reason)
       │         └────▶ failed (reason)
       └─ expired, partial, failed less than `max_failures` times

A group is keyed by its prompt's position. Samplers lease groups and hand them in, the driver takes
batches and says which weights there are. All that is decided here is decided from the table: how
much is admitted is counted from it, so that nothing can drift over a crash or a restore. It knows
nothing of Ray, of time but its clock, nor of what is in a group.

`groups.py` holds the groups and says who samples which, `schedule.py` what is admitted and learnt
from, `outcomes.py` what became of them, `mixture.py` of which environment they are.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Any

from rllib_llm.rollouts.errors import SampleFailure
from rllib_llm.rollouts.groups import (
    Answer,
    Entry,
    GroupTable,
    JudgedGroup,
    Lease,
    Leases,
    PartialCompletion,
    State,
)
from rllib_llm.rollouts.mixture import Mixture, News
from rllib_llm.rollouts.outcomes import Outcomes, TokenAccount
from rllib_llm.rollouts.schedule import Free, Lockstep, StreamRules, texts_are_due
from rllib_llm.shared.process import TimeLimit
from rllib_llm.weights.published import PublishedWeights

_CAPACITIES_REMEMBERED = 4  # of closed groups whose leases are still known
_OWN = ("rules", "_clock", "_weights")  # of a process
# After so many seconds without a call, in which this process perhaps had no core, renewals may wait
# after the next one: no lease ends before so many more.
SILENT_SECONDS, GRANTED_SECONDS = 5.0, 2.0


class Ledger:
    """See the module.

    Args:
        keeps_rejected: whether rejected groups are handed to the driver.
    """

    def __init__(
        self, rules: StreamRules, *, keeps_rejected: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.rules = rules
        self.step = 0  # updates done
        self._num_handed_out = 0  # batches, for the update under way
        self._clock, self._called = clock, clock()
        self._weights: dict[int, PublishedWeights] = {}
        self._has_all_weights = False  # that groups are to be sampled with, as far as was asked
        self._num_published = 0
        self._orders: dict[int, int] = {}  # of publications, by version
        self._failures: list[tuple[str, Any]] = []  # not yet reported to the driver
        self.table = GroupTable()
        limit = TimeLimit(rules.timeout_s)
        self.leases = Leases(self.table, limit, _CAPACITIES_REMEMBERED * rules.capacity)
        self._outcomes = Outcomes(
            self.table, self.leases, max_rejected=rules.max_rejected, max_failed=rules.num_groups,
            keeps_rejected=keeps_rejected,
        )  # fmt: skip
        schedule = Lockstep if rules.schedule == "lockstep" else Free
        self._schedule = schedule(rules, self.table, self._outcomes)
        self.mixture = Mixture(rules.env_weights, rules.mix_by, rules.num_groups)

    @property
    def account(self) -> TokenAccount:
        """Where every token went."""
        return self._outcomes.account

    def call(self, name: str, *args: Any) -> Any:
        """Makes a call of the driver or of a sampler, by its name."""
        silent, self._called = self._clock() - self._called, self._clock()
        if silent > SILENT_SECONDS:
            for entry in self.leases.entries():
                entry.deadline = max(entry.deadline, self._called + GRANTED_SECONDS)
        return getattr(self, name)(*args)

    def was_away(self, seconds: float) -> None:
        """Puts off all deadlines: no sampler could renew a lease or hand anything in meanwhile."""
        self._called += seconds
        for entry in self.leases.entries():
            entry.put_off(seconds)

    # --- the driver ----------------------------------------------------------------------------

    def begin(self, position: int, step: int) -> None:
        """An empty table and account that continue at `position` after `step` updates."""
        self.table.begin(position)
        self.leases.begin()
        self.step = step
        self._outcomes.begin(TokenAccount(), Counter())
        self._num_handed_out = 0
        self.mixture.begin(position)
        self._schedule.begin(step, step)

    def publish(
        self, weights: PublishedWeights, env_weights: tuple[float, ...] | None = None,
        step: int | None = None,
    ) -> None:  # fmt: skip
        """Publishes the newest weights' version; confirms that earlier batches were trained.

        Args:
            env_weights: of the environments, for the groups that these weights sample.
            step: updates done, where the weights are older ones.
        """
        step = weights.version if step is None else step
        self.offer(weights)
        if not len(self.table) and not self.table.next and not self.step:
            self.begin(0, step)
        if step != self.step:
            self._learn(step, weights.version)
        else:
            self._schedule.publish(weights.version)
        if env_weights is not None:
            self.mixture.learn(News(self._schedule.first, weights=env_weights))
        self.mixture.forget(self.table.position)
        needed = min([self._schedule.newest, *self._old_versions()])
        self._weights = {v: w for v, w in self._weights.items() if v >= needed}
        self._orders = {v: order for v, order in self._orders.items() if v in self._weights}
        self._schedule.admit_all()

    def _learn(self, step: int, version: int) -> None:
        """Marks handed-out groups as trained."""
        num_extra = step - self.step - min(1, self._num_handed_out)
        tokens: dict[int, int] = {}
        for entry in self._schedule.learn(self._num_handed_out, step, version):
            self._outcomes.train(entry)
            tokens[entry.position] = entry.num_tokens
        settled = self.table.position - 1
        if self.rules.schedule == "lockstep":  # all before a batch's last group are decided
            settled = max(tokens, default=-1)
        self.mixture.learn(News(self._schedule.first, tokens=tokens, settled=settled))
        for entry in self.table if num_extra else ():
            entry.num_updates_extra += num_extra
        self.step, self._num_handed_out = step, 0

    def offer(self, weights: PublishedWeights) -> None:
        """Registers where older weights, or again the newest, can be fetched."""
        self._num_published += 1
        self._weights[weights.version] = weights
        self._orders[weights.version] = self._num_published

    def take(self, step: int, num_seen: int = 0, nth: int = 0) -> Answer:
        """The batch of update `step` (from 0); repeated calls return the same batch.

        Args:
            num_seen: closed groups that earlier answers brought.
            nth: of the batches that this update learns from, from 0.
        """
        self.expire()
        self._schedule.want(nth)
        groups = None
        if (chosen := self._schedule.choose(nth)) is not None:
            groups = [self._taken(entry, step) for entry in chosen]
            self._num_handed_out = max(self._num_handed_out, nth + 1)
        return self._answer(groups, num_seen)

    def report(self, num_seen: int = 0) -> Answer:
        """The report of `take` for a driver that needs no batch; ends expired leases."""
        self.expire()
        return self._answer(None, num_seen)

    def _answer(self, groups: list[JudgedGroup] | None, num_seen: int) -> Answer:
        failures, self._failures = self._failures, []
        expired, self.leases.expired = self.leases.expired, []
        closed, num_closed = self._outcomes.unseen(num_seen)
        return Answer(
            groups,
            closed=closed,
            num_closed=num_closed,
            num_judged=sum(
                e.group is not None for e in islice(self.table, self.rules.num_compared)
            ),
            failures=tuple(failures),
            expired=tuple(expired),
            missing=tuple(self._missing()),
            ending=self._outcomes.ending(),
        )

    def want(self, nth: int) -> None:
        """Announces that the driver needs the `nth` batch of this update, as `take` does."""
        self._schedule.want(nth)

    def has_answer(self, nth: int) -> bool:
        """Whether `take` would return something for the driver to act on."""
        return bool(
            self._failures
            or self.leases.has_late(self._clock())
            or self._outcomes.ending() is not None
            or self._schedule.can_choose(nth)
            or self._missing()
        )

    def _taken(self, entry: Entry, step: int) -> JudgedGroup:
        group = entry.group
        assert group is not None, "a batch is made of judged groups"
        entry.state = "taken"
        age = step - group.oldest_version
        largest = self.rules.largest_age + entry.num_updates_extra
        is_known = group.oldest_version >= 0 and self.rules.bounds_age
        assert not is_known or age <= largest, f"group {entry.position}: age {age} > {largest}"
        return group

    def _missing(self) -> list[int]:
        """Versions that groups need for sampling and that are not available. Once these and the
        newest are available, none is missing until weights are lost: later groups use the newest,
        which each update announces."""
        if self._has_all_weights:
            return []
        newest = self._schedule.newest
        wanted = {newest, *self._old_versions()}
        if all(entry.group is not None for entry in self.table):
            wanted = set()
        missing = sorted(wanted - self._weights.keys())
        self._has_all_weights = not missing and newest in self._weights
        return missing

    def _old_versions(self) -> list[int]:
        """The versions before the newest that still have groups to sample."""
        newest = self._schedule.newest
        if self._schedule.oldest_version >= newest:
            return []
        versions = [self._schedule.version(e) for e in self.table if e.group is None]
        return [version for version in versions if version is not None and version < newest]

    # --- samplers ------------------------------------------------------------------------------

    def lease(self, sampler: str, num_groups: int, holding: Iterable[int] = ()) -> list[Lease]:
        """Groups for a sampler, the first that wait in environments that it opens: at most
        `num_groups`, but at least one unit.

        Args:
            sampler: its name; one that was started again has that of the one before.
            num_groups: that it has room for.
            holding: ids of leases that it is at work on. What it holds otherwise it never heard
                of, or has forgotten: that waits again.
        """
        self.leases.end_unknown(sampler, holding)
        leases: list[Lease] = []
        room = num_groups
        whole, envs = self.rules.schedule == "lockstep", self.rules.envs_of(sampler)

        def env_of(position: int, turn: int | None) -> int:
            return self.mixture.place(position, turn).env

        while room > 0 and (
            entries := self.table.take_unit(
                room, whole=whole, can_sample=self._can_sample, env_of=env_of, envs=envs
            )
        ):
            leases.append(self._lease_to(sampler, entries))
            room -= len(entries)
        return leases

    def has_work(self) -> bool:
        """Whether a sampler that asks, and opens all environments, is given something."""
        entry = self.table.first_waiting()
        return entry is not None and self._can_sample(entry)

    def _can_sample(self, entry: Entry) -> bool:
        return self._schedule.version(entry) in self._weights

    def _lease_to(self, sampler: str, entries: Sequence[Entry]) -> Lease:
        version = self._schedule.version(entries[0])
        assert version is not None, "only what can be sampled is leased"
        positions = tuple(entry.position for entry in entries)
        is_range = positions[-1] - positions[0] + 1 == len(positions)
        return Lease(
            self.leases.give(sampler, entries, self._clock()), entries[0].position, len(entries),
            self._weights[version],
            return_texts=texts_are_due(self.step, self.rules.texts_every),
            partial={e.position: e.partial for e in entries if e.partial},
            order=self._orders[version],
            places=tuple(self.mixture.place(e.position, e.turn) for e in entries),
            groups=() if is_range else positions,
        )  # fmt: skip

    def renew(
        self, sampler: str, holding: Iterable[int]
    ) -> tuple[list[int], PublishedWeights | None, int]:
        """Puts off the deadlines of leases that a sampler makes progress on; those of them that
        hold, the newest weights, and the order of their publication."""
        held = self.leases.renew(sampler, set(holding), self._clock())
        newest = self._schedule.newest
        return held, self._weights.get(newest), self._orders.get(newest, 0)

    def put_off(self, sampler: str, seconds: float) -> None:
        """Puts off the deadlines of a sampler's leases by the time in which it had no core."""
        for entry in self.leases.entries(sampler):
            entry.put_off(seconds)

    def push(self, lease: int, groups: Sequence[JudgedGroup]) -> int:
        """Takes judged groups in; how many. Those of a lease that has ended are refused."""
        num_accepted = 0
        for group in groups:
            entry = self.leases.entry(lease, group.position)
            if entry is None:
                if not self.leases.was_handed_in(lease, group.position):
                    self.account.generated += group.num_tokens
                    self.account.reject("late", group.num_tokens)
                continue
            self.leases.hand_in(entry, self._clock())
            before = entry.num_tokens
            if before and not group.continues:
                self.account.reject("begun_anew", before, num_groups=0)
                before = 0
            self.account.generated += group.num_tokens - before
            entry.group, entry.partial, entry.state = group, (), "judged"
            num_accepted += 1
        self._schedule.decide(group.position for group in groups)
        return num_accepted

    def keep_partial(self, lease: int, partial: dict[int, tuple[PartialCompletion, ...]]) -> None:
        """Records the partial output of groups that their sampler continues; () where it cannot
        continue what it was given, and begins the group anew."""
        for position, tokens in partial.items():
            entry = self.leases.entry(lease, position)
            if entry is None:
                continue
            before, entry.partial = entry.num_tokens, tokens
            if tokens:
                self.account.generated += entry.num_tokens - before
            else:
                self.account.reject("begun_anew", before, num_groups=0)

    def fail(
        self, lease: int, failure: SampleFailure, positions: Collection[int] | None = None
    ) -> None:
        """Records an exception; the groups it concerns wait again, or have failed.

        Args:
            positions: of the groups, where it does not concern all of the lease. The others stay
                leased.
        """
        sampler = self.leases.sampler(lease)
        entries = self.leases.end(lease, positions)
        if not entries:
            return
        most = 1  # 0: no group's, see `give_back`
        is_lockstep = self.rules.schedule == "lockstep"
        for entry in entries:
            if len(entries) > 1 and not is_lockstep:
                entry.unit = entry.position  # alone next time: it is unknown which of them fails
                continue
            entry.num_failures += not failure.weights_lost  # which is no group's
            most = max(most, entry.num_failures)
            may_fail = self.rules.schedule == "free" and failure.may_pass
            if may_fail and entry.num_failures >= self.rules.max_failures:
                self._outcomes.fail(entry, failure.error.partition(":")[0])
        self._failures.append((sampler, (failure, most)))
        self._schedule.admit_all()

    def give_back(
        self, sampler: str, failure: SampleFailure | None = None, holding: Iterable[int] = ()
    ) -> None:
        """Ends the leases of a sampler that died, or that failed for no fault of its groups, but
        for those that it is still at work on."""
        self.leases.end_unknown(sampler, holding)
        if failure is not None:
            self._failures.append((sampler, (failure, 0)))

    def expire(self) -> None:
        """Ends expired leases."""
        self.leases.expire(self._clock())

    # --- what is known -------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """`metrics`, `position`, `waits_for` (samplers being waited for) and `num_old` (groups to
        be sampled by older weights than the newest)."""
        counts = self.table.counts()
        rest = ", ".join(f"{count} {state}" for state, count in counts.items())
        return {
            "metrics": self.metrics(),
            "position": self.table.position,
            "waits_for": f"{self.leases.words(self._clock())} (groups: {rest})",
            "num_old": len(self._old_versions()),
        }

    def metrics(self) -> dict[str, float]:
        """Metrics under `rollouts/`: counts of outcomes, and the table's contents."""
        counts = self.table.counts()
        names: tuple[State, ...] = ("waiting", "leased", "partial", "judged", "ready")
        return {
            **self.account.metrics(self.table.num_tokens),
            **{f"groups_{name}": float(counts[name]) for name in names},
            "leases_expired": float(self.leases.num_expired),
        }

    def snapshot(self) -> dict[str, Any]:
        """All of it, leases among it, to be written at once; for the same run in another process.
        Weights are left out."""
        return {name: value for name, value in vars(self).items() if name not in _OWN}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restores a `snapshot`, which has no weights."""
        vars(self).update(snapshot)
        self._has_all_weights = False

    def forget_weights(self) -> None:
        """The driver has to tell again which weights there are."""
        self._weights, self._has_all_weights = {}, False

    def state(self) -> dict[str, Any]:
        """Its state for a checkpoint: everything but leases. Groups in flight wait again, with
        their partial output."""
        return {
            "table": [(e.position, e.turn, e.unit, e.group, e.partial) for e in self.table],
            "next": self.table.next,
            "step": self.step,
            "num_leases": self.leases.num_given,
            "position": self.table.position,
            "account": self.account.copy(),
            "closed_in_row": self._outcomes.in_row,
            "closed": self._outcomes.unseen(0),
            "first_batch": self._schedule.first,
            "batches": self._schedule.batches(),
            "num_updates_extra": {e.position: e.num_updates_extra for e in self.table},
            "rules": self.rules.order,
            "judged_with": self.rules.judged_with,
            "mixture": self.mixture.state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores `state`, under the same rules or others; earlier leases are refused."""
        self.step, self._failures = state["step"], []
        self.forget_weights()
        self._num_handed_out = 0
        self.leases.begin(state["num_leases"])
        closed, _ = state.get("closed", ((), 0))
        in_row = state["closed_in_row"].copy()
        self._outcomes.begin(state["account"].copy(), in_row.copy(), closed)
        num_extra = state.get("num_updates_extra", {})  # unknown to the first checkpoints
        entries = [
            Entry(position, turn, unit, group=group, partial=partial,
                  num_updates_extra=num_extra.get(position, 0))
            for position, turn, unit, group, partial, *_ in state["table"]
        ]  # fmt: skip
        wanted = {*self.rules.judged_with}
        if lacks := not wanted <= {*state.get("judged_with", wanted)}:
            for entry in entries:
                if entry.group is not None:
                    self.account.reject("begun_anew", entry.num_tokens, num_groups=0)
                    entry.group = None
        first, batches = state.get("first_batch", self.step), state.get("batches", [])
        next_position = state["next"]
        is_begun = any(entry.group or entry.partial for entry in entries)
        if not is_begun and entries and next_position - entries[0].position == len(entries):
            # They are admitted anew, as batches of the sizes that these rules say.
            next_position, entries = entries[0].position, []
        else:
            if is_other := lacks or state.get("rules") != self.rules.order:
                self._schedule.fit(entries, first)
                batches = []
            if is_other or len(entries) > self.rules.capacity:
                self._begin_old_anew(entries)
        if len(state.get("mixture", {}).get("weights", ())) == len(self.rules.env_weights):
            self.mixture.set_state(state["mixture"])
        else:  # there were others
            self.mixture.begin(entries[0].position if entries else next_position)
        self.table.begin(next_position)
        for entry in entries:
            self.table.put(entry)
        self._schedule.begin(first, self.step, batches)
        # What is decided again was counted before.
        self._outcomes.begin(self.account, in_row, self._outcomes.unseen(0)[0])

    def _begin_old_anew(self, entries: Sequence[Entry]) -> None:
        """Restarts groups that would be staler than these rules allow when they are trained: other
        rules admitted them, or an update was to learn from several batches."""
        rules = self.rules
        for i, entry in enumerate(entries):
            latest = self.step + (i + rules.window - 1) // rules.num_compared
            largest = rules.largest_age + entry.num_updates_extra
            if 0 <= entry.oldest_version < latest - largest:
                self.account.reject("stale", entry.num_tokens, num_groups=0)
                entry.group, entry.partial = None, ()
