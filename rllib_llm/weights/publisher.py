"""Publishes weights in the background: the learner waits only for one copy of them.

    learner ── submit ──▶ staging buffer ── thread: put ──▶ object store
                                            thread: announce ──▶ coordinator

Two staging buffers: one is being put while the next snapshot is taken. A snapshot that was not put
yet when the next one comes is skipped: the latest wins. What is in the object store already is
only announced.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
import torch

from rllib_llm.shared.ray_compat import local_learner
from rllib_llm.weights.coordinator import Announced, CoordinatorClient, PublishedWeights
from rllib_llm.weights.flat_buffer import FlatBuffer, StagingBuffer, join
from rllib_llm.weights.receiver import PASSING_ERRORS
from rllib_llm.weights.transport import Ticket

if TYPE_CHECKING:
    from rllib_llm.weights.push import WeightsPush

# --- Publishing beside the training loop: the learner waits for one copy of its weights, no more

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

        def is_idle() -> bool:
            return self._error is not None or (self._pending is None and not self._busy)

        with self._changed:
            return self._changed.wait_for(is_idle, timeout)

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


# --- Weights on their way from the learner to the samplers, each set with a version


def export_module(learner, *, transport: str, **settings: bool) -> Ticket | None:
    """`WeightsExporter.export` of a learner, wherever that is."""
    return learner.weights_exporter.export(transport, **settings)


class WeightsPublisher:
    """Gives out the learner group's policy, under growing versions, to all who receive it.

        learners ──▶ samplers
          ├── coordinator ──▶ followers, by the run's name
          └── folder ──▶ servers that follow no run, by its path

    Args:
        shared_module: the only sampler uses the learner's module itself: nothing travels to it.
        checksum: receivers check the bytes of every transfer.
        background: tells a coordinator of every publication.
        transport: "store": bytes in the object store; "cuda_ipc": they stay on the learner's
            device, for receivers on the same one; "nixl": they go from the learner's memory into
            a receiver's. Through the store from the first time on that one cannot read them.
        push: gives servers the weights, too.
        needs_epoch: a server is asked for these weights, by their epoch, too.
        keeps: keeps the published bytes, through the store, while the learners' weights are newer.
    """

    published: PublishedWeights  # the newest

    def __init__(
        self, learner_group, *, shared_module: bool, checksum: bool = False,
        background: BackgroundPublisher | None = None, transport: str = "store",
        push: WeightsPush | None = None, needs_epoch: bool = False, keeps: bool = False,
    ):  # fmt: skip
        self._learner_group = learner_group
        self._shared_module = shared_module
        self._checksum = checksum
        self._background = background
        self._transport = transport
        self._push = push
        self._needs_epoch = needs_epoch and background is not None
        self._keeps = keeps
        self._version = 0
        self._num_republished = 0
        self.kept: FlatBuffer | None = None  # the published bytes

    def publish(self, version: int, kept: FlatBuffer | None = None) -> PublishedWeights:
        """Gives the learners' weights out under a version; or those `kept`, of an earlier one,
        which servers that are pushed to have had.

        Raises:
            TimeoutError: their epoch is needed, and the coordinator is away for long.
            Exception: what ended the background publisher, or a server that does not take them.
        """
        self._version, self.kept = version, kept
        self.published = published = self._announced(version)
        if self._push is not None and kept is None:
            self._push.push(published.epoch, version)
        if self._keeps and kept is None:
            self.kept = join(ray.get(list(published.ref)))
        return published

    def publish_again(self, reason: str) -> PublishedWeights:
        """Publishes the current weights again after a receiver could not fetch them, from now on
        through the object store."""
        logger.warning("Weights %d are published again: %s", self._version, reason)
        if self._transport != "store":
            logger.warning("Weights go through the object store from version %d on", self._version)
            self._transport = "store"
        self._num_republished += 1
        self.published = self._announced(self._version)
        return self.published

    def newest(self, version: int, *, shared_module: bool) -> PublishedWeights:
        """The learners' weights, of this version, for evaluation samplers: in the object store,
        unless they use the learner's module. A server has only what is published."""
        if self._needs_epoch or (version == self._version and self.published.ref):
            return self.published
        return PublishedWeights(version) if shared_module else self._put(version, "store")

    def _announced(self, version: int) -> PublishedWeights:
        """Puts the weights where samplers and followers find them."""
        background = self._background
        if not self._shared_module:
            if self.kept is None:
                published = self._put(version, self._transport)
            else:
                ref, num_bytes = ray.put(self.kept), self.kept.num_bytes
                published = PublishedWeights(version, ref=(ref,), num_bytes=num_bytes)
            if background is not None:
                background.announce(published)
        else:
            published = PublishedWeights(version)
            if background is not None:
                exporter = local_learner(self._learner_group).weights_exporter
                background.submit(exporter.state(), version)
        if background is not None and self._needs_epoch:
            published = dataclasses.replace(published, epoch=background.wait_epoch())
        return published

    def metrics(self) -> dict[str, float]:
        """`republished` so far, `push_seconds` where servers are pushed to, and those of the
        background publisher if there is one."""
        metrics = {} if self._background is None else self._background.metrics()
        metrics["republished"] = metrics.get("republished", 0.0) + self._num_republished
        return metrics if self._push is None else metrics | {"push_seconds": self._push.seconds}

    def stop(self) -> None:
        """Ends the background publisher and the connections to servers."""
        if self._background is not None:
            self._background.stop()
        if self._push is not None:
            self._push.close()

    def _put(self, version: int, transport: str) -> PublishedWeights:
        """Exports the current weights, owned by the calling process; their bytes are counted where
        they are known at once."""
        start = time.perf_counter()
        is_local = self._learner_group.is_local
        sharded = not is_local and self._learner_group.config.learner_strategy == "fsdp"
        in_shards = sharded and transport == "store"
        export = functools.partial(
            export_module, transport=transport, checksum=self._checksum, shards=in_shards
        )
        if is_local:
            ticket: Any = export(local_learner(self._learner_group))
            refs, num_bytes = (ray.put(ticket),), ticket.num_bytes
        else:
            # The return value of an actor's task is owned by its caller: it survives the learner.
            asked = {"remote_actor_ids": None if sharded else [0], "return_obj_refs": True}
            results = self._learner_group.foreach_learner(export, **asked)
            refs, num_bytes = tuple(result.get() for result in results), 0
            refs = refs if in_shards else refs[:1]
        seconds = time.perf_counter() - start
        return PublishedWeights(version, ref=refs, num_bytes=num_bytes, publish_seconds=seconds)
