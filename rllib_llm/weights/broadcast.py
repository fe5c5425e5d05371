"""Weights on their way from the learner to the samplers, each set with a version.

The driver publishes once per iteration; every request to a sampler carries the published weights
by reference, and the sampler loads them when its own version differs. So a sampler, restarted or
new, can never generate with weights it was not given, and nothing has to be re-synchronised.

Receivers that the driver does not ask follow the same publications through a coordinator
(`background.py`, `coordinator.py`, `follower.py`).

    learner    `WeightsExporter`   tensors ──▶ ticket         (`exporter.py`)
    driver     `WeightsPublisher`  ticket ──▶ version          here
    receivers  `WeightsReceiver`   version ──▶ the model      (`receiver.py`)
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from typing import Any

import ray

from rllib_llm.ray_compat import local_learner
from rllib_llm.weights.background import BackgroundPublisher
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.transport import Ticket

logger = logging.getLogger(__name__)


def export_module(learner, *, checksum: bool = False, transport: str = "store") -> Ticket | None:
    """`WeightsExporter.export` of a learner, wherever that is."""
    return learner.weights_exporter.export(transport, checksum=checksum)


class WeightsPublisher:
    """Publishes the learner group's policy under growing versions."""

    def __init__(
        self,
        learner_group,
        *,
        shared_module: bool,
        checksum: bool = False,
        background: BackgroundPublisher | None = None,
        transport: str = "store",
    ):
        """
        shared_module: the only sampler uses the learner's module itself: nothing travels to it.
        checksum: receivers check the bytes of every transfer.
        background: tells a coordinator of every publication.
        transport: "store": bytes in the object store; "cuda_ipc": they stay on the learner's
            device, for receivers on the same one; "nixl": they go from the learner's memory into
            a receiver's. Through the store from the first time on that one cannot read them.
        """
        self._learner_group = learner_group
        self._shared_module = shared_module
        self._checksum = checksum
        self._background = background
        self._transport = transport
        self._num_republished = 0

    def publish_again(self, version: int) -> PublishedWeights:
        """Publishes what is the current weights still, which somebody could not get; through the
        object store from now on."""
        if self._transport != "store":
            logger.warning("Weights go through the object store from version %d on", version)
            self._transport = "store"
        self._num_republished += 1
        return self.publish(version)

    def publish(self, version: int) -> PublishedWeights:
        """Puts the current weights into the object store, owned by the calling process."""
        if self._shared_module:
            published = PublishedWeights(version)
            if self._background is not None:
                exporter = local_learner(self._learner_group).weights_exporter
                self._background.submit(exporter.state(), version)
            return published
        start = time.perf_counter()
        ref, num_bytes = self._export()
        published = PublishedWeights(
            version,
            ref=(ref,),
            num_bytes=num_bytes,
            publish_seconds=time.perf_counter() - start,
        )
        if self._background is not None:
            self._background.announce(published)
        return published

    def announced(self, published: PublishedWeights) -> PublishedWeights:
        """The publication as followers know it, with its epoch, once they do.

        Raises:
            TimeoutError: the coordinator is away for long.
            Exception: what ended the background publisher.
        """
        if self._background is None:
            return published
        return dataclasses.replace(published, epoch=self._background.wait_epoch())

    def metrics(self) -> dict[str, float]:
        """`republished` so far, and those of the background publisher if there is one."""
        metrics = {} if self._background is None else self._background.metrics()
        return metrics | {"republished": metrics.get("republished", 0.0) + self._num_republished}

    def stop(self) -> None:
        """Ends the background publisher."""
        if self._background is not None:
            self._background.stop()

    def _export(self) -> tuple[ray.ObjectRef, int]:
        """The exported weights' reference, and their bytes where they are known at once."""
        export = functools.partial(
            export_module, checksum=self._checksum, transport=self._transport
        )
        if self._learner_group.is_local:
            ticket: Any = export(local_learner(self._learner_group))
            return ray.put(ticket), ticket.num_bytes
        # The return value of an actor's task is owned by its caller: it survives the learner.
        sharded = self._learner_group.config.learner_strategy == "fsdp"
        results = self._learner_group.foreach_learner(
            export,
            remote_actor_ids=None if sharded else [0],
            return_obj_refs=True,
        )
        return next(iter(results)).get(), 0
