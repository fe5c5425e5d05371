"""Which weights are the newest, as one process knows it; `coordinator.py` makes an actor of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

from rllib_llm.weights.published import PublishedWeights


class Verdict(str, Enum):
    """What became of an announcement."""

    ACCEPTED = "accepted"  # it is the newest, or was already
    STALE = "stale"  # the same epoch has announced a higher version, or these weights before
    LOST = "lost"  # a receiver could not get it: put it into the store again under a new key
    FENCED = "fenced"  # another publisher has published in a later epoch


class VersionLog:
    """The last `keep` publications of the latest epoch.

    Holding a publication keeps its bytes in the object store: that is what `keep` bounds.

    clock: nanoseconds since 1970. Epochs are microseconds of it, so that they also grow when the
        log is lost and begun anew.
    """

    def __init__(self, keep: int = 2, clock: Callable[[], int] = time.time_ns):
        if keep < 1:
            raise ValueError(
                f"keep={keep!r} must be at least 1: receivers ask for the latest weights. Use 1."
            )
        self._keep, self._clock = keep, clock
        self._epoch = 0  # of the latest publication
        self._given = 0  # the last number given to a publisher
        self._kept: list[PublishedWeights] = []
        self._lost: set[str] = set()  # keys among those kept

    def begin_epoch(self) -> int:
        """A number for a new publisher, whose first announcement fences off all before it.

        Being asked fences off nobody: a question whose asker gave up, and asked again, is answered
        late when the process is restarted or wakes up.
        """
        self._given = max(self._given + 1, self._epoch + 1, self._clock() // 1000)
        return self._given

    def is_last_epoch(self, epoch: int) -> bool:
        """Whether no publisher has begun, or published in, a later one."""
        return epoch >= max(self._given, self._epoch)

    def announce(self, published: PublishedWeights) -> Verdict:
        """Takes `published` as the newest, if it is. Saying it twice does no harm."""
        if published.epoch < self._epoch:
            return Verdict.FENCED
        if published.key in self._lost:
            return Verdict.LOST
        self._epoch = published.epoch  # higher than ours: this log was lost and begun anew
        head = self._kept[-1] if self._kept else None
        if head is not None and head.key == published.key:
            return Verdict.ACCEPTED
        if head is not None and published.order < head.order:
            return Verdict.STALE
        if head is not None and published.order == head.order:
            if head.key not in self._lost:
                return Verdict.STALE
            self._kept.pop()
        self._kept = [*self._kept, published][-self._keep :]
        self._lost &= {kept.key for kept in self._kept}
        return Verdict.ACCEPTED

    def report_lost(self, key: str) -> None:
        """Notes that the bytes of this publication could not be had."""
        if any(kept.key == key for kept in self._kept):
            self._lost.add(key)

    def latest(self) -> PublishedWeights | None:
        """The newest publication whose bytes nobody has missed."""
        found = [kept for kept in self._kept if kept.key not in self._lost]
        return found[-1] if found else None

    def newer(
        self, min_version: int = 0, after: tuple[int, int] | None = None
    ) -> PublishedWeights | None:
        """The latest publication if its version is at least `min_version`, and it comes after the
        (epoch, version) that the asker has."""
        head = self.latest()
        if head is None or head.version < min_version or (after and head.order <= after):
            return None
        return head

    def stats(self) -> dict[str, int]:
        """Kept versions, their bytes, and how many of them are lost."""
        return {
            "num_versions": len(self._kept),
            "num_bytes": sum(kept.num_bytes for kept in self._kept),
            "num_lost": len(self._lost),
        }
