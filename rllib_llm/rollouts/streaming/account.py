"""Where every sampled token went."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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
        """Tokens, or whole groups, that nobody learns from."""
        self.rejected[reason] += num_tokens
        self.rejected_groups[reason] += num_groups

    def fail(self, num_tokens: int) -> None:
        """A group that is not to be had, with what there was of it."""
        self.failed_groups += 1
        self.reject("failed", num_tokens, num_groups=0)

    def check(self, carried: int) -> None:
        """Raises AssertionError where a token is not accounted for."""
        told = self.trained + self.rejected.total() + carried
        assert self.generated == told, (
            f"tokens_generated={self.generated} must be trained ({self.trained}) + rejected "
            f"({self.rejected.total()}) + carried ({carried}): the ledger lost count"
        )

    def metrics(self, carried: int) -> dict[str, float]:
        """What is reported under `rollouts/`; `check`s."""
        self.check(carried)
        reasons = {
            f"rejected/{reason}": float(self.rejected_groups[reason]) for reason in self.rejected
        }
        return {
            "tokens_generated": float(self.generated),
            "tokens_trained": float(self.trained),
            "tokens_rejected": float(self.rejected.total()),
            "tokens_carried": float(carried),
            "groups_trained": float(self.trained_groups),
            "groups_rejected": float(self.rejected_groups.total()),
            "groups_failed": float(self.failed_groups),
            **reasons,
        }
