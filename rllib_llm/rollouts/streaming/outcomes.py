"""What becomes of groups: trained, rejected or failed, and who has to hear of it."""

from __future__ import annotations

from collections import Counter

from rllib_llm.rollouts.streaming.account import TokenAccount
from rllib_llm.rollouts.streaming.entry import Closed, Entry
from rllib_llm.rollouts.streaming.leases import Leases
from rllib_llm.rollouts.streaming.table import GroupTable


class Outcomes:
    """Closes groups, and accounts for them.

    Args:
        table, leases: of the groups.
        max_rejected: groups that may be closed one after the other without a batch that gets full.
        max_failed: of them, those that may have failed.
        keeps_rejected: whether rejected groups are handed to the driver.
    """

    def __init__(
        self,
        table: GroupTable,
        leases: Leases,
        *,
        max_rejected: int,
        max_failed: int,
        keeps_rejected: bool,
    ) -> None:
        self.account = TokenAccount()
        self._table, self._leases = table, leases
        self._max_rejected, self._max_failed = max_rejected, max_failed
        self._keeps_rejected = keeps_rejected
        self._num_failed_in_row = 0
        self._in_row: Counter[str] = Counter()  # reasons, since a batch was full
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

    def fail(self, entry: Entry, reason: str) -> None:
        """The group is not to be had from any sampler."""
        self._close(entry)
        self.account.fail(entry.num_tokens)
        self._in_row[reason] += 1
        self._num_failed_in_row += 1
        if self._keeps_rejected:
            self._closed.append(Closed(entry.position, "failed", reason))

    def _close(self, entry: Entry) -> None:
        self._table.close(entry)
        self._leases.remember(entry)

    def has_full_batch(self) -> None:
        """Something passes."""
        self._in_row.clear()
        self._num_failed_in_row = 0

    def too_many(self) -> dict[str, int]:
        """Groups closed in a row by reason, where they are too many; else {}."""
        is_rejected = self._in_row.total() > self._max_rejected
        has_failed = self._num_failed_in_row > self._max_failed
        return dict(self._in_row) if is_rejected or has_failed else {}

    def unseen(self, num_seen: int) -> tuple[tuple[Closed, ...], int]:
        """Closed groups behind the first `num_seen`, and how many there were in all."""
        known = max(0, num_seen - self._num_seen)
        self._closed, self._num_seen = self._closed[known:], self._num_seen + known
        return tuple(self._closed), self._num_seen + len(self._closed)

    def begin(self, account: TokenAccount, in_row: Counter[str]) -> None:
        """Goes on from these; the driver sees everything anew."""
        self.account, self._in_row = account, in_row
        self._closed, self._num_seen = [], 0
        self._num_failed_in_row = 0

    @property
    def in_row(self) -> Counter[str]:
        """Reasons of groups closed since a batch was full."""
        return self._in_row.copy()
