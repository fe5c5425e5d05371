"""Outcomes of groups (trained, rejected, failed) and an account of every sampled token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rllib_llm.rollouts.groups import UNJUDGED, Closed, Ending, Entry, GroupTable, Leases

LEAST_UNJUDGED = 8  # groups in a row end a run, however few an update learns from


@dataclass
class TokenAccount:
    """Tokens and groups that arrived at a ledger since position 0.

    `generated == trained + rejected + carried` at any moment, where `carried` is what the table
    still holds.
    """

    generated: int = 0
    trained: int = 0
    trained_groups: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # tokens by reason
    rejected_groups: Counter[str] = field(default_factory=Counter)  # by reason
    failed_groups: int = 0

    def reject(self, reason: str, num_tokens: int, *, num_groups: int = 1) -> None:
        """Tokens, or whole groups, that are not learnt from."""
        self.rejected[reason] += num_tokens
        self.rejected_groups[reason] += num_groups

    def copy(self) -> TokenAccount:
        """One that counts for itself."""
        return replace(
            self, rejected=self.rejected.copy(), rejected_groups=self.rejected_groups.copy()
        )

    def check(self, carried: int) -> None:
        """Raises AssertionError where a token is not accounted for."""
        assert self.generated == self.trained + self.rejected.total() + carried, (self, carried)

    def metrics(self, carried: int) -> dict[str, float]:
        """Metrics under `rollouts/`; `check`s their sums first."""
        self.check(carried)
        return {
            "tokens_generated": float(self.generated),
            "tokens_trained": float(self.trained),
            "tokens_rejected": float(self.rejected.total()),
            "tokens_carried": float(carried),
            "groups_trained": float(self.trained_groups),
            "groups_rejected": float(self.rejected_groups.total()),
            "groups_failed": float(self.failed_groups),
            **{f"rejected/{each}": float(self.rejected_groups[each]) for each in self.rejected},
        }


class Outcomes:
    """Closes groups, and accounts for them.

    Args:
        max_rejected: groups that may be closed one after the other without a batch that gets full.
        max_failed: of them, those that may have failed; so many in a row that could not be judged
            end a run.
        keeps_rejected: whether rejected groups are handed to the driver.
    """

    def __init__(
        self, table: GroupTable, leases: Leases, *, max_rejected: int, max_failed: int,
        keeps_rejected: bool,
    ) -> None:  # fmt: skip
        self.account = TokenAccount()
        self._table, self._leases = table, leases
        self._max_rejected, self._max_failed = max_rejected, max_failed
        self._keeps_rejected = keeps_rejected
        self._in_row: Counter[str] = Counter()  # rejected: reasons, since a batch was full
        self._failed_in_row: Counter[str] = Counter()
        self._num_unjudged = 0  # in a row
        self._cause = ""  # of the last that could not be judged
        self._closed: list[Closed] = []  # that the driver has not seen
        self._num_seen = 0  # closed groups that it has

    def train(self, entry: Entry) -> None:
        """The group was learnt from."""
        group = entry.group
        assert group is not None, "what is learnt from was judged"
        self._close(entry)
        self.account.trained += group.num_tokens - group.num_lost
        self.account.trained_groups += 1
        if group.num_lost:
            self.account.reject("lost_rows", group.num_lost, num_groups=0)

    def reject(self, entry: Entry, reason: str) -> None:
        """The group is not to be learnt from."""
        assert entry.group is not None, "what is rejected was judged"
        self._close(entry)
        self.account.reject(reason, entry.num_tokens)
        self._in_row[reason] += 1
        if self._keeps_rejected:
            self._closed.append(Closed(entry.position, "rejected", reason, entry.group))

    def passes(self, entry: Entry) -> bool:
        """Whether a judged group is to be learnt from; closes it where it is not. Counts groups in
        a row that no judge could score, in the order of decisions."""
        group = entry.group
        assert group is not None, "only judged groups are decided"
        self._num_unjudged = self._num_unjudged + 1 if group.reason == UNJUDGED else 0
        self._cause = group.cause or self._cause
        if group.reason:
            self.reject(entry, group.reason)
            return False
        entry.state = "ready"
        return True

    def fail(self, entry: Entry, reason: str) -> None:
        """The group is not to be had from any sampler."""
        self._close(entry)
        self.account.failed_groups += 1
        self.account.reject("failed", entry.num_tokens, num_groups=0)
        self._failed_in_row[reason] += 1
        if self._keeps_rejected:
            self._closed.append(Closed(entry.position, "failed", reason))

    def _close(self, entry: Entry) -> None:
        self._table.close(entry)
        self._leases.remember(entry)

    def has_full_batch(self) -> None:
        """Something passes."""
        self._in_row.clear()
        self._failed_in_row.clear()

    def ending(self) -> Ending | None:
        """Why no batch gets full any more; None where one may."""
        if not (self._num_unjudged or self._failed_in_row or self._in_row):
            return None  # asked for each group: nothing is added up
        most = max(self._max_failed, LEAST_UNJUDGED) - 1
        if self._num_unjudged > most:
            return Ending("unjudged", {UNJUDGED: self._num_unjudged}, most, self._cause)
        if self._failed_in_row.total() > self._max_failed:
            return Ending("failed", dict(self._failed_in_row), self._max_failed)
        if self._in_row.total() > self._max_rejected:
            return Ending("rejected", dict(self._in_row), self._max_rejected, self._cause)
        return None

    def unseen(self, num_seen: int) -> tuple[tuple[Closed, ...], int]:
        """Closed groups after the first `num_seen`, and how many there were in all."""
        known = max(0, num_seen - self._num_seen)
        self._closed, self._num_seen = self._closed[known:], self._num_seen + known
        return tuple(self._closed), self._num_seen + len(self._closed)

    def begin(
        self, account: TokenAccount, in_row: Counter[str], closed: Sequence[Closed] = ()
    ) -> None:
        """Restores outcomes; the driver receives those in `closed` and has received the others."""
        self.account, self._in_row = account, in_row
        self._closed, self._num_seen = list(closed), 0
        self._failed_in_row, self._num_unjudged = Counter(), 0

    @property
    def in_row(self) -> Counter[str]:
        """Reasons of groups rejected since a batch was full."""
        return self._in_row.copy()
