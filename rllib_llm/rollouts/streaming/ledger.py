"""The one table of prompt groups that are on their way: who has which, and what became of it.

    waiting ─▶ leased ─▶ judged ─▶ ready ─▶ taken ─▶ trained
       ▲         │          └────▶ rejected (reason)
       └─ expired, failed, partial

A group is keyed by its prompt's position. Samplers lease groups and hand them in, the driver takes
batches and says which weights there are. All that is decided here is decided from the table: how
much is admitted is counted from it, so that nothing can drift over a crash or a restore. It knows
nothing of Ray, of time but its clock, nor of what is in a group.

`lockstep`: groups are decided in the order of their positions. When a batch is full, P more are
admitted for the weights that it will make; when a group is rejected, one more for the weights that
the batch now being filled is learnt with. So which weights sample a group is a function of the
outcomes before it; without filters it is max(0, ⌊g/P⌋ - S). `free`: whatever the table has room for
is admitted, and sampled with the newest weights.
"""

from __future__ import annotations

import copy
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rllib_llm.rollouts.streaming.account import TokenAccount
from rllib_llm.rollouts.streaming.entry import (
    Answer,
    Closed,
    Entry,
    JudgedGroup,
    Lease,
    State,
    Tokens,
)
from rllib_llm.rollouts.streaming.rules import StreamRules
from rllib_llm.time_limit import TimeLimit
from rllib_llm.weights.published import PublishedWeights

_GENERATION = 1_000_000_000  # leases of one ledger before it is restored
_UNITS_REMEMBERED = 4  # capacities of closed groups whose leases are still known


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
        self.account = TokenAccount()
        self.limit = TimeLimit(rules.timeout_s)
        self.step = 0  # updates done
        self.num_expired = 0  # leases that ended without an answer
        self._keeps_rejected = keeps_rejected
        self._clock = clock
        self._table: dict[int, Entry] = {}  # open groups, in the order of their positions
        self._waiting: list[int] = []  # heap of positions that nobody samples, among others
        self._next = 0  # position admitted next
        self._num_leases = 0
        self._weights: dict[int, PublishedWeights] = {}
        self._batches: dict[int, list[int]] = {}  # positions, by step
        self._full = 0  # step of the batch that is being filled
        self._chosen: list[int] = []  # for it
        self._undecided = 0  # position, lockstep
        self._rejected_in_row: Counter[str] = Counter()  # reasons, since a batch was full
        self._closed: list[Closed] = []  # that the driver has not seen
        self._num_seen = 0  # closed groups that it has
        self._leases_of_closed: dict[int, int] = {}
        self._failures: list[tuple[str, Any]] = []
        self._expired: list[tuple[str, str]] = []

    # --- the driver ----------------------------------------------------------------------------

    def begin(self, position: int, step: int) -> None:
        """An empty table that goes on at `position` after `step` updates."""
        self._table, self._waiting, self._batches = {}, [], {}
        self._next = self._undecided = position
        self.step = self._full = step
        self._chosen = []
        self._num_leases += _GENERATION
        self._admit_all()

    def publish(self, weights: PublishedWeights) -> None:
        """Says which weights there are now; the batches before them were learnt from."""
        self._weights[weights.version] = weights
        if not self._table and not self._next and not self.step:
            self.begin(0, weights.version)
        self._close_trained(weights.version)
        self.step = weights.version
        needed = min((e.version for e in self._table.values() if e.version is not None), default=0)
        if self.rules.schedule == "free":
            needed = self.step
        self._weights = {v: w for v, w in self._weights.items() if min(needed, self.step) <= v}
        self._admit_all()

    def offer(self, weights: PublishedWeights) -> None:
        """Says where older weights are, or anew where the newest are."""
        self._weights[weights.version] = weights

    def _close_trained(self, step: int) -> None:
        for done in [s for s in self._batches if s < step]:
            for position in self._batches.pop(done):
                group = self._close(position)
                self.account.trained += group.num_tokens - group.num_lost
                self.account.trained_groups += 1
                if group.num_lost:
                    self.account.reject("lost_rows", group.num_lost, num_groups=0)

    def take(self, step: int, num_seen: int = 0) -> Answer:
        """The batch that update `step` (from 0) learns from, the same however often it is asked.

        Args:
            step: updates done.
            num_seen: rejected groups that earlier answers brought.
        """
        self.expire()
        self._forget_closed(num_seen)
        if step not in self._batches and self.rules.schedule == "free":
            self._choose(step)
        groups = None
        if step in self._batches:
            groups = [self._taken(position, step) for position in self._batches[step]]
        failures, self._failures = self._failures, []
        expired, self._expired = self._expired, []
        return Answer(
            groups,
            rejected=tuple(self._closed),
            num_closed=self._num_seen + len(self._closed),
            failures=tuple(failures),
            expired=tuple(expired),
            missing=tuple(self._missing()),
            too_many_rejected=self._too_many_rejected(),
        )

    def _forget_closed(self, num_seen: int) -> None:
        known = max(0, num_seen - self._num_seen)
        self._closed, self._num_seen = self._closed[known:], self._num_seen + known

    def _taken(self, position: int, step: int) -> JudgedGroup:
        entry = self._table[position]
        entry.state = "taken"
        assert entry.group is not None, "a batch is made of judged groups"
        age = step - entry.group.oldest_version
        assert entry.group.oldest_version < 0 or age <= self.rules.largest_age, (
            f"age={age} of group {position} must be at most {self.rules.largest_age}: "
            "the ledger let samplers get too far ahead"
        )
        return entry.group

    def _too_many_rejected(self) -> dict[str, int]:
        if self._rejected_in_row.total() <= self.rules.max_rejected:
            return {}
        return dict(self._rejected_in_row)

    def _missing(self) -> list[int]:
        if self.rules.schedule == "free":
            return [] if self.step in self._weights else [self.step]
        wanted = {e.version for e in self._table.values() if e.state in ("waiting", "leased")}
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
        self._free(sampler, set(holding))
        leases: list[Lease] = []
        room = num_groups
        while room > 0 and (entries := self._next_unit(room)):
            leases.append(self._lease_to(sampler, entries))
            room -= len(entries)
        return leases

    def holds_more(self, sampler: str, holding: Iterable[int]) -> bool:
        """Whether a sampler holds leases that it does not know of."""
        known = set(holding)
        return any(
            entry.state == "leased" and entry.sampler == sampler and entry.lease not in known
            for entry in self._table.values()
        )

    def _free(self, sampler: str, holding: set[int]) -> None:
        for entry in self._table.values():
            if entry.state == "leased" and entry.sampler == sampler and entry.lease not in holding:
                self._wait_again(entry)

    def _next_unit(self, room: int) -> list[Entry]:
        """The first groups that wait and were admitted together, if their weights are there."""
        entries: list[Entry] = []
        while self._waiting:
            entry = self._table.get(self._waiting[0])
            if entry is None or entry.state not in ("waiting", "partial"):
                heapq.heappop(self._waiting)
                continue
            if self._version_for(entry) not in self._weights:
                break
            whole = self.rules.schedule == "lockstep"
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

    def _version_for(self, entry: Entry) -> int:
        return self.step if entry.version is None else entry.version

    def _lease_to(self, sampler: str, entries: Sequence[Entry]) -> Lease:
        now = self._clock()
        self._num_leases += 1
        limit = self.limit.seconds(len(entries))
        for entry in entries:
            entry.state, entry.lease, entry.sampler = "leased", self._num_leases, sampler
            entry.leased_at = now
            # It may be the group that is slow, not the sampler.
            entry.deadline = float("inf") if limit is None else now + limit * 2**entry.num_leases
            entry.num_leases += 1
        first = entries[0]
        return Lease(
            self._num_leases,
            first.position,
            len(entries),
            self._weights[self._version_for(first)],
            return_texts=bool(self.rules.texts_every),  # which update takes them shows later
            partial={e.position: e.partial for e in entries if e.partial},
        )

    def renew(
        self, sampler: str, holding: Iterable[int]
    ) -> tuple[list[int], PublishedWeights | None]:
        """Puts off the deadlines of leases that a sampler makes progress on; those of them that
        hold, and the newest weights."""
        now, wanted, held = self._clock(), set(holding), set()
        limit = self.limit.seconds()
        for entry in self._table.values():
            if entry.state == "leased" and entry.sampler == sampler and entry.lease in wanted:
                entry.deadline = float("inf") if limit is None else now + limit
                held.add(entry.lease)
        return sorted(held), self._weights.get(self.step)

    def push(self, lease: int, groups: Sequence[JudgedGroup]) -> int:
        """Takes judged groups in; how many. Those of a lease that has ended are refused."""
        num_accepted = 0
        for group in groups:
            entry = self._table.get(group.position)
            if entry is None or entry.lease != lease or entry.state != "leased":
                self._refuse(lease, group, entry)
                continue
            self.limit.record(self._clock() - entry.leased_at)
            before = entry.num_tokens
            if before and not group.continues:
                self.account.reject("begun_anew", before, num_groups=0)
                before = 0
            self.account.generated += group.num_tokens - before
            entry.group, entry.partial, entry.state = group, (), "judged"
            num_accepted += 1
        self._decide(groups)
        return num_accepted

    def _refuse(self, lease: int, group: JudgedGroup, entry: Entry | None) -> None:
        known = entry.lease if entry is not None else self._leases_of_closed.get(group.position)
        is_repeated = known == lease and (entry is None or entry.group is not None)
        if not is_repeated:  # else Ray made the call twice
            self.account.generated += group.num_tokens
            self.account.reject("late", group.num_tokens)

    def keep_partial(self, lease: int, partial: dict[int, tuple[Tokens, ...]]) -> None:
        """Takes note of what there is of unfinished groups, which their sampler goes on with."""
        for position, tokens in partial.items():
            entry = self._table.get(position)
            if entry is None or entry.lease != lease or entry.state != "leased":
                continue
            before = entry.num_tokens
            entry.partial = tokens
            self.account.generated += entry.num_tokens - before

    def fail(self, lease: int, failure: Any) -> None:
        """Takes note of the exception that ended a lease; its groups wait again."""
        entries = [e for e in self._table.values() if e.lease == lease and e.state == "leased"]
        if not entries:
            return
        sampler = entries[0].sampler
        for entry in entries:
            entry.num_failures += 1
            self._wait_again(entry)
        self._failures.append((sampler, (failure, max(e.num_failures for e in entries))))

    def expire(self) -> None:
        """Ends the leases whose time is up."""
        now = self._clock()
        late = [e for e in self._table.values() if e.state == "leased" and e.deadline < now]
        for lease in dict.fromkeys(e.lease for e in late):
            entries = [e for e in late if e.lease == lease]
            seconds = now - entries[0].leased_at
            slowest = self.limit.slowest
            why = (
                f"it gave no answer in {seconds:.0f} s (sampler_timeout_s="
                f"{self.limit.setting!r}; slowest answer so far {slowest:.1f} s)"
            )
            self._expired.append((entries[0].sampler, why))
            self.num_expired += 1
            for entry in entries:
                self._wait_again(entry)

    def _wait_again(self, entry: Entry) -> None:
        entry.state = "partial" if entry.partial else "waiting"
        entry.lease, entry.sampler, entry.deadline = 0, "", float("inf")
        heapq.heappush(self._waiting, entry.position)

    # --- what is admitted, what is learnt from -------------------------------------------------

    def _admit_all(self) -> None:
        """Whatever there is room for; in lockstep at the beginning alone."""
        missing = self.rules.capacity - len(self._table)
        if self.rules.schedule == "free" or not self._table:
            self._admit(missing, self._full if self.rules.schedule == "lockstep" else None)

    def _admit(self, num_groups: int, version: int | None) -> None:
        if self._too_many_rejected():
            return
        for i in range(num_groups):
            position = self._next
            unit = position - i % self.rules.groups_per_lease
            self._table[position] = Entry(position, version, unit)
            heapq.heappush(self._waiting, position)
            self._next += 1

    def _decide(self, groups: Sequence[JudgedGroup]) -> None:
        if self.rules.schedule == "free":
            for group in groups:
                entry = self._table.get(group.position)
                if entry is not None and entry.state == "judged":
                    self._judge(entry)
            self._admit_all()
            return
        while True:
            entry = self._table.get(self._undecided)
            if entry is None or entry.state != "judged":
                return
            self._undecided += 1
            if not self._judge(entry):
                self._admit(1, self._full)
                continue
            self._chosen.append(entry.position)
            if len(self._chosen) == self.rules.num_groups:
                self._fill(self._full, self._chosen)
                self._full, self._chosen = self._full + 1, []
                self._admit(self.rules.num_groups, self._full)

    def _judge(self, entry: Entry) -> bool:
        """Whether a judged group is to be learnt from."""
        assert entry.group is not None
        if entry.group.reason:
            self._reject(entry, entry.group.reason)
            return False
        entry.state = "ready"
        return True

    def _reject(self, entry: Entry, reason: str) -> None:
        group = self._close(entry.position)
        self.account.reject(reason, group.num_tokens)
        self._rejected_in_row[reason] += 1
        if self._keeps_rejected:
            self._closed.append(Closed(group, reason))

    def _close(self, position: int) -> JudgedGroup:
        entry = self._table.pop(position)
        self._leases_of_closed[position] = entry.lease
        while len(self._leases_of_closed) > _UNITS_REMEMBERED * self.rules.capacity:
            del self._leases_of_closed[next(iter(self._leases_of_closed))]
        assert entry.group is not None, "what is closed was judged"
        return entry.group

    def _choose(self, step: int) -> None:
        """Fills the batch of `step`, `free`: the first P that are ready, none further than the
        window behind the first that is not."""
        if self.rules.on_stale == "drop":
            self._drop_stale(step)
        chosen: list[int] = []
        end = float("inf")
        for position, entry in self._table.items():
            if position >= end or len(chosen) == self.rules.num_groups:
                break
            if entry.state == "ready":
                chosen.append(position)
            elif entry.state != "taken":
                end = min(end, position + self.rules.window)
        if len(chosen) == self.rules.num_groups:
            self._fill(step, chosen)

    def _fill(self, step: int, positions: list[int]) -> None:
        self._batches[step] = positions
        self._rejected_in_row.clear()
        for position in positions:
            self._table[position].step = step

    def _drop_stale(self, step: int) -> None:
        for entry in list(self._table.values()):
            oldest = entry.group.oldest_version if entry.group is not None else step
            if entry.state == "ready" and 0 <= oldest < step - self.rules.max_staleness:
                self._reject(entry, "stale")
        self._admit_all()

    # --- what is known -------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """All groups before it are closed."""
        return next(iter(self._table), self._next)

    @property
    def num_carried(self) -> int:
        """Tokens in the table."""
        return sum(entry.num_tokens for entry in self._table.values())

    @property
    def num_old(self) -> int:
        """Groups that weights before the newest have to sample, and have not yet."""
        return sum(
            entry.group is None and entry.version is not None and entry.version < self.step
            for entry in self._table.values()
        )

    def has_work(self) -> bool:
        """Whether a sampler that asks is given something."""
        while self._waiting:
            entry = self._table.get(self._waiting[0])
            if entry is not None and entry.state in ("waiting", "partial"):
                return self._version_for(entry) in self._weights
            heapq.heappop(self._waiting)
        return False

    def waits_for(self) -> str:
        """Who is waited for, in words."""
        now = self._clock()
        leases: dict[tuple[int, str], list[Entry]] = {}
        for entry in self._table.values():
            if entry.state == "leased":
                leases.setdefault((entry.lease, entry.sampler), []).append(entry)
        parts = [
            f"groups {held[0].position}-{held[-1].position} with sampler {sampler} for "
            f"{now - held[0].leased_at:.0f} s"
            for (_, sampler), held in leases.items()
        ]
        counts = Counter(entry.state for entry in self._table.values())
        rest = ", ".join(f"{count} {state}" for state, count in counts.items())
        return f"{'; '.join(parts) or 'nobody samples'} (groups: {rest})"

    def metrics(self) -> dict[str, float]:
        """What is reported under `rollouts/`: the account, and what is in the table."""
        counts = Counter(entry.state for entry in self._table.values())
        names: tuple[State, ...] = ("waiting", "leased", "partial", "judged", "ready")
        return {
            **self.account.metrics(self.num_carried),
            **{f"groups_{name}": float(counts[name]) for name in names},
            "leases_expired": float(self.num_expired),
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
                for e in self._table.values()
            ],
            "batches": {step: list(positions) for step, positions in self._batches.items()},
            "account": copy.deepcopy(self.account),
            **{name: copy.copy(getattr(self, name)) for name in _STATE},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; leases given before are refused from now on."""
        generation = max(self._num_leases, state["_num_leases"]) + _GENERATION
        for name in _STATE:
            setattr(self, name, copy.copy(state[name]))
        self._num_leases = generation
        self.account = copy.deepcopy(state["account"])
        self._batches = {step: list(positions) for step, positions in state["batches"].items()}
        self._table, self._waiting, self._weights = {}, [], {}
        self._leases_of_closed.clear()
        self._closed, self._num_seen = [], 0
        self._failures, self._expired = [], []
        for position, version, unit, group, partial, is_ready in state["table"]:
            entry = Entry(position, version, unit, group=group, partial=partial)
            if group is not None:
                entry.state = "ready" if is_ready else "judged"
            else:
                self._wait_again(entry)
            self._table[position] = entry


_OWN = ("rules", "_clock", "_weights", "_keeps_rejected")  # of a process
_STATE = ("step", "_next", "_num_leases", "_full", "_chosen", "_undecided", "_rejected_in_row")
