"""Weights on their way from the learner to the samplers, each set with a version.

The driver publishes once per iteration; every request to a sampler carries the published weights
by reference, and the sampler loads them when its own version differs. So a sampler, restarted or
new, can never generate with weights it was not given, and nothing has to be re-synchronised.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.weights.flat_buffer import FlatBuffer, pack, unpack


@dataclass(frozen=True)
class PublishedWeights:
    """One version of the policy's weights.

    `version` counts learner updates; `key` is unique for every publication, since after a restore
    the same version may mean other weights. `ref` holds the object reference of a `FlatBuffer`
    (inside a tuple, so that Ray does not fetch it before it is wanted), or nothing where sampler
    and learner share the module.
    """

    version: int
    key: str
    ref: tuple[ray.ObjectRef, ...] = ()
    num_bytes: int = 0
    publish_seconds: float = 0.0


def export_module(learner) -> FlatBuffer | None:
    """The flat buffer of the policy that `learner` trains, without critic and value head.

    Of a policy under adapters these alone. Where learners hold shards, all must call it, and all
    but the first get None.
    """
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    state = module.get_state(inference_only=True)
    return pack(state) if state else None


class WeightsPublisher:
    """Publishes the learner group's policy under growing versions."""

    def __init__(self, learner_group, *, shared_module: bool):
        """`shared_module`: the only sampler uses the learner's module itself: nothing travels."""
        self._learner_group = learner_group
        self._shared_module = shared_module

    def publish(self, version: int) -> PublishedWeights:
        """Puts the current weights into the object store, owned by the calling process."""
        if self._shared_module:
            return PublishedWeights(version, uuid.uuid4().hex)
        start = time.perf_counter()
        if self._learner_group.is_local:
            flat = export_module(self._learner_group._learner)
            ref, num_bytes = ray.put(flat), flat.num_bytes
        else:
            # The return value of an actor's task is owned by its caller: it survives the learner.
            sharded = self._learner_group.config.learner_strategy == "fsdp"
            results = self._learner_group.foreach_learner(
                export_module,
                remote_actor_ids=None if sharded else [0],
                return_obj_refs=True,
            )
            ref = next(iter(results)).get()
            num_bytes = 0
        seconds = time.perf_counter() - start
        return PublishedWeights(version, uuid.uuid4().hex, (ref,), num_bytes, seconds)


class WeightsReceiver:
    """Keeps one sampler's module at the version it is asked to sample with."""

    def __init__(self) -> None:
        self.version = -1  # nothing received yet
        self._key: str | None = None
        self.load_seconds = 0.0
        self.num_bytes = 0

    def ensure(
        self, published: PublishedWeights, load: Callable[[dict[str, torch.Tensor]], None]
    ) -> None:
        """Calls `load` with the published tensors unless they are the ones in use.

        A lower version than the one in use is loaded too: a restored run goes back.
        """
        if published.key == self._key:
            return
        if published.ref:
            start = time.perf_counter()
            flat: FlatBuffer = ray.get(published.ref[0])
            load(unpack(flat))
            self.num_bytes = flat.num_bytes
            self.load_seconds = time.perf_counter() - start
        self.version, self._key = published.version, published.key
