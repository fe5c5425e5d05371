"""Weights that were published, as samplers and the ledger name them: light, since the ledger's
process has no torch."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

import ray


class WeightsLostError(RuntimeError):
    """Published weights could not be fetched and must be published again.

    key: of the publication; empty where there is none.
    """

    def __init__(self, message: str, key: str = ""):
        super().__init__(message)
        self.key = key


@dataclass(frozen=True)
class PublishedWeights:
    """One version of the policy's weights.

    `version` counts learner updates; `key` is unique for every publication, since after a restore
    the same version may mean other weights. `ref` holds the object reference of a `FlatBuffer`
    (inside a tuple, so that Ray does not fetch it before it is wanted), one of each learner's part
    where learners hold shards, or none where sampler and learner share the module. `epoch` says
    whose count `version` is: a learner that was restarted or restored has a higher one, and counts
    on from any number (0: there are no other receivers).
    `nodes`: ids of the nodes that are about to pull, which take turns (`receiver.py`).
    """

    version: int
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    ref: tuple[ray.ObjectRef, ...] = ()
    num_bytes: int = 0
    publish_seconds: float = 0.0
    epoch: int = 0
    nodes: tuple[str, ...] = ()
    published_at: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def order(self) -> tuple[int, int]:
        """Grows with every publication; not with the same weights put into the store again."""
        return self.epoch, self.version
