"""Publishes weights in the background: the learner waits only for one copy of them.

    learner ── submit ──▶ staging buffer ── thread: put ──▶ object store
                                            thread: announce ──▶ coordinator

Two staging buffers: one is being put while the next snapshot is taken. A snapshot that was not put
yet when the next one comes is skipped: the latest wins. What is in the object store already is
only announced.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
import torch

from rllib_llm.weights.coordinator import Announced, CoordinatorClient
from rllib_llm.weights.flat_buffer import FlatBuffer, StagingBuffer
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.receiver import PASSING_ERRORS

MAX_SECONDS_TO_STOP = 10.0  # the coordinator may be away
MAX_SECONDS_TO_ANNOUNCE = 120.0  # it may have to be started again

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Publication:
    """Weights on their way: a snapshot in staging buffer `slot`, or already in the store.

    `published`: as they were announced last.
    """

    version: int
    weights: FlatBuffer | PublishedWeights
    slot: int | None = None
    published: PublishedWeights | None = None
    begins_epoch: bool = False


class BackgroundPublisher:
    """Announces weights to a coordinator from its own thread, and monitors the coordinator.

    The process that makes it owns the bytes: they are gone when it ends. Let it be the one that
    lives longest, the algorithm's rather than a learner's.

    put: `ray.put` or what stands for it.
    look_in_seconds: how often a restarted coordinator, or weights reported lost, are noticed.
    checksum: receivers check the bytes of every snapshot.
    """

    def __init__(
        self, client: CoordinatorClient, *, put: Callable[[Any], ray.ObjectRef] = ray.put,
        look_in_seconds: float = 0.1, checksum: bool = False,
    ):  # fmt: skip
        self._client, self._put, self._checksum = client, put, checksum
        self._look_in_seconds = look_in_seconds
        self._staging = (StagingBuffer(), StagingBuffer())
        self._changed = threading.Condition()
        self._pending: _Publication | None = None
        self._current: _Publication | None = None  # published last, or being published
        self._busy = False  # the thread is at `_current`
        self._stopped = False
        self._error: Exception | None = None
        self._epoch = client.begin_epoch()
        self._begins_epoch = False  # asked for, with the next publication
        self._last_version: int | None = None
        self.failures: Counter[str] = Counter()  # by the error's name
        self.num_skipped = 0  # snapshots that a later one replaced before they were put
        self.num_republished = 0
        self.snapshot_seconds = 0.0  # what the last `submit` took
        self.publish_seconds = 0.0  # from there until the coordinator knew of it
        self._thread = threading.Thread(target=self._run, name="publish-weights", daemon=True)
        self._thread.start()

    # --- the training loop's side ------------------------------------------------------------

    def submit(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Takes a snapshot, to be published as `version`.

        A version that does not grow begins a new epoch: the learner was restored.

        Raises:
            Exception: what ended the thread, as that another publisher has taken over the name.
        """
        start = time.perf_counter()
        slot = self._withdraw_pending()
        flat = self._staging[slot].pack(tensors, checksum=self._checksum)
        self.snapshot_seconds = time.perf_counter() - start
        self._hand_over(_Publication(version, flat, slot))

    def announce(self, published: PublishedWeights) -> None:
        """Publishes weights that are in the object store already, owned by this process.

        Raises:
            Exception: see `submit`.
        """
        self._withdraw_pending()
        self._hand_over(_Publication(published.version, published))

    def wait(self, timeout: float) -> bool:
        """Whether all that was handed over is published, after at most `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._error is not None or (self._pending is None and not self._busy),
                timeout,
            )

    def wait_epoch(self, timeout: float = MAX_SECONDS_TO_ANNOUNCE) -> int:
        """The epoch of the last weights handed over, once they are published.

        Raises:
            TimeoutError: it is not, in so many seconds.
            Exception: what ended the thread.
        """
        is_known = self.wait(timeout)
        if self._error is not None:
            raise self._error
        if not is_known:
            name = self._client.name
            raise TimeoutError(f"the coordinator of {name!r} did not answer in {timeout:g} s")
        return self._epoch

    def stop(self) -> None:
        """Ends the thread, frees the weights, and ends the coordinator, which would hold them,
        unless another publisher has taken over the name."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(MAX_SECONDS_TO_STOP)
        self._pending = self._current = None
        self._client.end_epoch(self._epoch)

    def metrics(self) -> dict[str, float]:
        """`announce_skips`, `republished` and `announce_failures/<kind>` so far, and the seconds
        that the last snapshot (`snapshot_seconds`) and what followed it (`announce_seconds`) took.
        """
        failures = self.failures + self._client.failures
        return {
            "announce_skips": float(self.num_skipped),
            "republished": float(self.num_republished),
            "snapshot_seconds": self.snapshot_seconds,
            "announce_seconds": self.publish_seconds,
            **{f"announce_failures/{kind}": float(count) for kind, count in failures.items()},
        }

    def _withdraw_pending(self) -> int:
        """Drops a pending publication and its staging buffer if the thread is not reading it."""
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._pending is not None:
                self._pending = None
                self.num_skipped += 1
            current = self._current.slot if self._current is not None else None
            return 0 if current is None else 1 - current

    def _hand_over(self, job: _Publication) -> None:
        with self._changed:
            if self._last_version is not None and job.version <= self._last_version:
                self._begins_epoch = True
            self._last_version = job.version
            self._pending = job
            self._changed.notify_all()

    # --- the thread's side -------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._pending is not None or self._stopped, self._look_in_seconds
                )
                if self._stopped:
                    return
                if self._pending is not None:
                    # One that was to begin an epoch may not have come through.
                    begins = self._current is not None and self._current.begins_epoch
                    self._current, self._pending = self._pending, None
                    self._current.begins_epoch = begins or self._begins_epoch
                    self._begins_epoch = False
                self._busy = True
                job = self._current
            if job is None:
                continue
            try:
                self._publish(job)
            except PASSING_ERRORS as error:  # tried again at the next look
                self.failures[type(error).__name__] += 1
                logger.warning("Weights %d are not announced yet: %s", job.version, error)
            except Exception as error:  # noqa: BLE001  (the border of the thread; raised by submit)
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    def _publish(self, job: _Publication) -> None:
        """Puts the weights where they are not in the store, and sees that they are known."""
        start = time.perf_counter()
        if job.begins_epoch:
            self._epoch, job.begins_epoch = self._client.begin_epoch(), False
        is_new = job.published is None or job.published.epoch != self._epoch
        published = job.published or self._stored(job)
        if is_new:
            job.published = published = dataclasses.replace(published, epoch=self._epoch)
        verdict = self._client.announce(published)
        if verdict is Announced.LOST and isinstance(job.weights, FlatBuffer):
            job.published = self._stored(job)
            self.num_republished += 1
            verdict = self._client.announce(job.published)
        if verdict is Announced.FENCED:
            raise RuntimeError(
                f"weights_name={self._client.name!r} must have one publisher at a time: another "
                "one has begun. End one of them, or rename it."
            )
        if is_new:
            self.publish_seconds = time.perf_counter() - start

    def _stored(self, job: _Publication) -> PublishedWeights:
        """The weights in the store: a snapshot is put there."""
        if isinstance(job.weights, PublishedWeights):
            return job.weights
        ref, num_bytes = self._put(job.weights), job.weights.num_bytes
        return PublishedWeights(job.version, ref=(ref,), num_bytes=num_bytes, epoch=self._epoch)
