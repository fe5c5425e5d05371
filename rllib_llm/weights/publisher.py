"""Weights on their way from the learner to the samplers, each set with a version."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from typing import TYPE_CHECKING, Any

import ray

from rllib_llm.shared.ray_compat import local_learner
from rllib_llm.weights.flat_buffer import FlatBuffer, join
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.transport import Ticket

if TYPE_CHECKING:
    from rllib_llm.weights.background import BackgroundPublisher
    from rllib_llm.weights.push import WeightsPush

logger = logging.getLogger(__name__)


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
