"""Weights on their way from the learner to the samplers, each set with a version.

The driver publishes once per iteration; every request to a sampler carries the published weights
by reference, and the sampler loads them when its own version differs. So a sampler, restarted or
new, can never generate with weights it was not given, and nothing has to be re-synchronised.

Receivers that the driver does not ask follow the same publications through a coordinator
(`background.py`, `coordinator.py`, `follower.py`).
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.weights.background import BackgroundPublisher
from rllib_llm.weights.flat_buffer import FlatBuffer, StagingBuffer
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.transfer import Transfer, failure_metrics

# Of the learners in this process: one copy of the weights each, in memory that stays warm.
_staging: weakref.WeakKeyDictionary[Any, StagingBuffer] = weakref.WeakKeyDictionary()


def export_module(learner, *, checksum: bool = False) -> FlatBuffer | None:
    """The flat buffer of the policy that `learner` trains, without critic and value head, valid
    until the next call.

    Of a policy under adapters these alone. Where learners hold shards, all must call it, and all
    but the first get None.
    """
    state = _exported_state(learner)
    if not state:
        return None
    return _staging.setdefault(learner, StagingBuffer()).pack(state, checksum=checksum)


def _exported_state(learner) -> dict[str, torch.Tensor]:
    return learner.module[DEFAULT_MODULE_ID].unwrapped().get_state(inference_only=True)


class WeightsPublisher:
    """Publishes the learner group's policy under growing versions."""

    def __init__(
        self,
        learner_group,
        *,
        shared_module: bool,
        checksum: bool = False,
        background: BackgroundPublisher | None = None,
    ):
        """
        shared_module: the only sampler uses the learner's module itself: nothing travels to it.
        checksum: receivers check the bytes of every transfer.
        background: tells a coordinator of every publication.
        """
        self._learner_group = learner_group
        self._shared_module = shared_module
        self._checksum = checksum
        self._background = background
        self._num_republished = 0

    def publish_again(self, version: int) -> PublishedWeights:
        """Publishes what is the current weights still, those in the object store being lost."""
        self._num_republished += 1
        return self.publish(version)

    def publish(self, version: int) -> PublishedWeights:
        """Puts the current weights into the object store, owned by the calling process."""
        if self._shared_module:
            published = PublishedWeights(version)
            if self._background is not None:
                self._background.submit(_exported_state(self._learner_group._learner), version)
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
        if self._learner_group.is_local:
            flat = export_module(self._learner_group._learner, checksum=self._checksum)
            return ray.put(flat), flat.num_bytes
        # The return value of an actor's task is owned by its caller: it survives the learner.
        sharded = self._learner_group.config.learner_strategy == "fsdp"
        results = self._learner_group.foreach_learner(
            functools.partial(export_module, checksum=self._checksum),
            remote_actor_ids=None if sharded else [0],
            return_obj_refs=True,
        )
        return next(iter(results)).get(), 0


class WeightsReceiver:
    """Keeps one sampler's module at the version it is asked to sample with."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer or Transfer()
        self._in_use: PublishedWeights | None = None
        self._load_seconds = 0.0
        self._num_bytes = 0
        self._num_skipped = 0

    @property
    def version(self) -> int:
        """Of the weights in use; -1 before the first."""
        return -1 if self._in_use is None else self._in_use.version

    def ensure(self, published: PublishedWeights, load: Callable[[FlatBuffer], None]) -> None:
        """Calls `load` with the published weights unless they are the ones in use.

        A lower version than the one in use is loaded too: a restored run goes back.

        Raises:
            WeightsLostError: they are not in the object store any more.
        """
        if self._in_use is not None and published.key == self._in_use.key:
            return
        if published.ref:
            _, flat = self._transfer.fetch(lambda: published)
            start = time.perf_counter()
            load(flat)
            self._load_seconds = time.perf_counter() - start
            self._num_bytes = flat.num_bytes
        if self._in_use is not None:
            self._num_skipped += max(0, published.version - self._in_use.version - 1)
        self._in_use = published

    def published_bytes(self) -> FlatBuffer:
        """The weights in use as they are in the object store.

        Raises:
            WeightsLostError: they are not there any more.
        """
        return self._transfer.fetch(lambda: self._in_use)[1]

    def metrics(self) -> dict[str, float]:
        """Bytes and seconds of the last transfer and load, age of the weights in use in seconds;
        versions passed over (`skips`) and failed transfers by kind so far."""
        seconds = self._transfer.seconds + self._load_seconds
        return {
            "bytes": float(self._num_bytes),
            "transfer_seconds": self._transfer.seconds,
            "load_seconds": self._load_seconds,
            "gb_per_s": self._num_bytes / 1e9 / seconds if seconds else 0.0,
            "age_seconds": 0.0 if self._in_use is None else self._in_use.age_seconds,
            "skips": float(self._num_skipped),
            **failure_metrics(self._transfer.failures),
        }
