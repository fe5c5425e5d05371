"""The one table of prompt groups that are on their way: who has which, and what became of it.

    waiting ─▶ leased ─▶ judged ─▶ ready ─▶ taken ─▶ trained
       ▲         │          └────▶ rejected (reason)
       │         └────▶ failed (reason)
       └─ expired, partial, failed less than `max_failures` times

A group is keyed by its prompt's position. Samplers lease groups and hand them in, the driver takes
batches and says which weights there are. All that is decided here is decided from the table: how
much is admitted is counted from it, so that nothing can drift over a crash or a restore. It knows
nothing of Ray, of time but its clock, nor of what is in a group.

`table.py` holds the groups, `leases.py` says who samples which, `schedule.py` what is admitted and
learnt from, `outcomes.py` what became of them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rllib_llm.rollouts.failure import SampleFailure
from rllib_llm.rollouts.streaming.account import TokenAccount
from rllib_llm.rollouts.streaming.entry import Answer, Entry, JudgedGroup, Lease, State, Tokens
from rllib_llm.rollouts.streaming.leases import Leases
from rllib_llm.rollouts.streaming.outcomes import Outcomes
from rllib_llm.rollouts.streaming.rules import StreamRules
from rllib_llm.rollouts.streaming.schedule import open_schedule
from rllib_llm.rollouts.streaming.table import GroupTable
from rllib_llm.time_limit import TimeLimit
from rllib_llm.weights.published import PublishedWeights

_CAPACITIES_REMEMBERED = 4  # of closed groups whose leases are still known
_OWN = ("rules", "_clock", "_weights")  # of a process


class Ledger:
    """See the module.

    Args:
        rules: how far ahead, in which order.
        keeps_rejected: whether rejected groups are handed to the driver.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        rules: StreamRules,
        *,
        keeps_rejected: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules = rules
        self.step = 0  # updates done
        self._clock = clock
        self._weights: dict[int, PublishedWeights] = {}
        self._failures: list[tuple[str, Any]] = []  # that the driver was not told of
        self.table = GroupTable()
        limit = TimeLimit(rules.timeout_s)
        self._leases = Leases(self.table, limit, _CAPACITIES_REMEMBERED * rules.capacity)
        self._outcomes = Outcomes(
            self.table,
            self._leases,
            max_rejected=rules.max_rejected,
            max_failed=rules.num_groups,
            keeps_rejected=keeps_rejected,
        )
        self._schedule = open_schedule(rules, self.table, self._outcomes)

    @property
    def account(self) -> TokenAccount:
        """Where every token went."""
        return self._outcomes.account

    # --- the driver ----------------------------------------------------------------------------

    def begin(self, position: int, step: int) -> None:
        """An empty table that goes on at `position` after `step` updates."""
        self.table.begin(position)
        self._leases.begin()
        self.step = step
        self._schedule.begin(position, step)

    def publish(self, weights: PublishedWeights) -> None:
        """Says which weights there are now; the batches before them were learnt from."""
        self._weights[weights.version] = weights
        if not len(self.table) and not self.table.next and not self.step:
            self.begin(0, weights.version)
        for entry in self._schedule.take_before(weights.version):
            self._outcomes.train(entry)
        self.step = weights.version
        needed = min((e.version for e in self.table if e.version is not None), default=0)
        if self.rules.schedule == "free":
            needed = self.step
        self._weights = {v: w for v, w in self._weights.items() if min(needed, self.step) <= v}
        self._schedule.admit_all()

    def offer(self, weights: PublishedWeights) -> None:
        """Says where older weights are, or anew where the newest are."""
        self._weights[weights.version] = weights

    def take(self, step: int, num_seen: int = 0) -> Answer:
        """The batch that update `step` (from 0) learns from, the same however often it is asked.

        Args:
            step: updates done.
            num_seen: closed groups that earlier answers brought.
        """
        self.expire()
        self._schedule.choose(step)
        groups = None
        if (chosen := self._schedule.chosen(step)) is not None:
            groups = [self._taken(entry, step) for entry in chosen]
        failures, self._failures = self._failures, []
        closed, num_closed = self._outcomes.unseen(num_seen)
        return Answer(
            groups,
            closed=closed,
            num_closed=num_closed,
            num_judged=self.table.num_judged(self.rules.num_groups),
            failures=tuple(failures),
            expired=tuple(self._leases.take_expired()),
            missing=tuple(self._missing()),
            too_many_closed=self._outcomes.too_many(),
        )

    def has_answer(self, step: int) -> bool:
        """Whether `take` says something that the driver has to act on."""
        return bool(
            self._failures
            or self._leases.has_late(self._clock())
            or self._outcomes.too_many()
            or self._schedule.can_choose(step)
            or self._missing()
        )

    def _taken(self, entry: Entry, step: int) -> JudgedGroup:
        group = entry.group
        assert group is not None, "a batch is made of judged groups"
        entry.state = "taken"
        age = step - group.oldest_version
        assert group.oldest_version < 0 or age <= self.rules.largest_age, (
            f"age={age} of group {entry.position} must be at most {self.rules.largest_age}: "
            "the ledger let samplers get too far ahead"
        )
        return group

    def _missing(self) -> list[int]:
        if self.rules.schedule == "free":
            return [] if self.step in self._weights else [self.step]
        wanted = {e.version for e in self.table if e.state in ("waiting", "leased")}
        return sorted(v for v in wanted if v is not None and v <= self.step
                      and v not in self._weights)  # fmt: skip

    # --- samplers ------------------------------------------------------------------------------

    def lease(self, sampler: str, num_groups: int, holding: Iterable[int] = ()) -> list[Lease]:
        """Groups for a sampler, the first that wait: at most `num_groups`, but at least one unit.

        Args:
            sampler: its name; one that was started again has that of the one before.
            num_groups: that it has room for.
            holding: ids of leases that it is at work on. What it holds otherwise it never heard
                of, or has forgotten: that waits again.
        """
        self._leases.end_unknown(sampler, holding)
        leases: list[Lease] = []
        room = num_groups
        whole = self.rules.schedule == "lockstep"
        while room > 0 and (
            entries := self.table.take_unit(room, whole=whole, can_sample=self._can_sample)
        ):
            leases.append(self._lease_to(sampler, entries))
            room -= len(entries)
        return leases

    def holds_more(self, sampler: str, holding: Iterable[int]) -> bool:
        """Whether a sampler holds leases that it does not know of."""
        return self._leases.holds_more(sampler, holding)

    def has_work(self) -> bool:
        """Whether a sampler that asks is given something."""
        entry = self.table.first_waiting()
        return entry is not None and self._can_sample(entry)

    def _can_sample(self, entry: Entry) -> bool:
        return self._version_for(entry) in self._weights

    def _version_for(self, entry: Entry) -> int:
        return self.step if entry.version is None else entry.version

    def _lease_to(self, sampler: str, entries: Sequence[Entry]) -> Lease:
        first = entries[0]
        return Lease(
            self._leases.give(sampler, entries, self._clock()),
            first.position,
            len(entries),
            self._weights[self._version_for(first)],
            return_texts=self.rules.returns_texts,
            partial={e.position: e.partial for e in entries if e.partial},
        )

    def renew(
        self, sampler: str, holding: Iterable[int]
    ) -> tuple[list[int], PublishedWeights | None]:
        """Puts off the deadlines of leases that a sampler makes progress on; those of them that
        hold, and the newest weights."""
        held = self._leases.renew(sampler, set(holding), self._clock())
        return held, self._weights.get(self.step)

    def put_off(self, sampler: str, seconds: float) -> None:
        """Puts off the deadlines of a sampler's leases by the time in which it had no core."""
        self._leases.put_off(sampler, seconds)

    def grant_all(self, until: float) -> None:
        """Ends no lease before then: who holds one could not say so."""
        self._leases.grant(until)

    def put_off_all(self, seconds: float) -> None:
        """Puts off the deadlines of all leases by the time in which there was no ledger."""
        for sampler in {entry.sampler for entry in self.table if entry.state == "leased"}:
            self._leases.put_off(sampler, seconds)

    def push(self, lease: int, groups: Sequence[JudgedGroup]) -> int:
        """Takes judged groups in; how many. Those of a lease that has ended are refused."""
        num_accepted = 0
        for group in groups:
            entry = self._leases.entry(lease, group.position)
            if entry is None:
                self._refuse(lease, group)
                continue
            self._leases.hand_in(entry, self._clock())
            before = entry.num_tokens
            if before and not group.continues:
                self.account.reject("begun_anew", before, num_groups=0)
                before = 0
            self.account.generated += group.num_tokens - before
            entry.group, entry.partial, entry.state = group, (), "judged"
            num_accepted += 1
        self._schedule.decide(group.position for group in groups)
        return num_accepted

    def _refuse(self, lease: int, group: JudgedGroup) -> None:
        if not self._leases.was_handed_in(lease, group.position):
            self.account.generated += group.num_tokens
            self.account.reject("late", group.num_tokens)

    def keep_partial(self, lease: int, partial: dict[int, tuple[Tokens, ...]]) -> None:
        """Takes note of what there is of unfinished groups, which their sampler goes on with."""
        for position, tokens in partial.items():
            entry = self._leases.entry(lease, position)
            if entry is not None:
                before = entry.num_tokens
                entry.partial = tokens
                self.account.generated += entry.num_tokens - before

    def fail(self, lease: int, failure: SampleFailure) -> None:
        """Takes note of the exception that ended a lease; its groups wait again, or have failed."""
        entries = self._leases.of(lease)
        if not entries:
            return
        sampler, most = entries[0].sampler, 0
        for entry in self._leases.end(lease):
            entry.num_failures += 1
            most = max(most, entry.num_failures)
            if self._has_failed(entry, failure):
                self._outcomes.fail(entry, failure.kind)
        self._failures.append((sampler, (failure, most)))
        self._schedule.admit_all()

    def _has_failed(self, entry: Entry, failure: SampleFailure) -> bool:
        return (
            self.rules.schedule == "free"
            and failure.may_pass
            and not failure.weights_lost
            and entry.num_failures >= self.rules.max_failures
        )

    def expire(self) -> None:
        """Ends the leases whose time is up."""
        self._leases.expire(self._clock())

    # --- what is known -------------------------------------------------------------------------

    @property
    def num_old(self) -> int:
        """Groups that weights before the newest have to sample, and have not yet."""
        return sum(
            entry.group is None and entry.version is not None and entry.version < self.step
            for entry in self.table
        )

    def waits_for(self) -> str:
        """Who is waited for, in words."""
        rest = ", ".join(f"{count} {state}" for state, count in self.table.counts().items())
        return f"{self._leases.words(self._clock())} (groups: {rest})"

    def metrics(self) -> dict[str, float]:
        """What is reported under `rollouts/`: the account, and what is in the table."""
        counts = self.table.counts()
        names: tuple[State, ...] = ("waiting", "leased", "partial", "judged", "ready")
        return {
            **self.account.metrics(self.table.num_tokens),
            **{f"groups_{name}": float(counts[name]) for name in names},
            "leases_expired": float(self._leases.num_expired),
        }

    def snapshot(self) -> dict[str, Any]:
        """All of it, leases among it, to be written at once; for the same run in another process.
        Weights are left out."""
        return {name: value for name, value in vars(self).items() if name not in _OWN}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Goes on where `snapshot` was taken, without weights."""
        vars(self).update(snapshot)

    def forget_weights(self) -> None:
        """The driver has to tell again which weights there are."""
        self._weights = {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: all but leases. Groups that are on their way wait again, with
        what there is of them."""
        return {
            "table": [
                (e.position, e.version, e.unit, e.group, e.partial, e.state in ("ready", "taken"))
                for e in self.table
            ],
            "next": self.table.next,
            "step": self.step,
            "num_leases": self._leases.num_given,
            "account": copy.deepcopy(self.account),
            "closed_in_row": self._outcomes.in_row,
            "schedule": self._schedule.state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; leases given before are refused from now on."""
        self.step, self._weights, self._failures = state["step"], {}, []
        self._leases.begin(state["num_leases"])
        self._outcomes.begin(copy.deepcopy(state["account"]), state["closed_in_row"].copy())
        self._schedule.set_state(state["schedule"])
        self.table.begin(state["next"])
        for position, version, unit, group, partial, is_ready in state["table"]:
            entry = Entry(position, version, unit, group=group, partial=partial)
            if group is not None:
                entry.state = "ready" if is_ready else "judged"
            self.table.put(entry)
