"""Weights on their way from the learner to the samplers, each set with a version.

The driver publishes once per iteration; every request to a sampler carries the published weights
by reference, and the sampler loads them when its own version differs. So a sampler, restarted or
new, can never generate with weights it was not given, and nothing has to be re-synchronised.

Receivers that the driver does not ask follow the same publications through a coordinator
(`background.py`, `coordinator.py`, `follower.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.weights.background import BackgroundPublisher
from rllib_llm.weights.direct import DirectExporter, DirectSnapshot
from rllib_llm.weights.flat_buffer import (
    FlatBuffer,
    ScatteredBuffer,
    StagingBuffer,
    lay_side_by_side,
    scatter,
)
from rllib_llm.weights.on_device import (
    DeviceExporter,
    DeviceReader,
    DeviceSnapshot,
    DeviceWeightsError,
)
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.transfer import Transfer, WeightsLostError, failure_metrics

logger = logging.getLogger(__name__)

# Of the learners in this process whose weights are on a GPU: copies in host memory, and there.
_staging: weakref.WeakKeyDictionary[Any, StagingBuffer] = weakref.WeakKeyDictionary()
_exporters: weakref.WeakKeyDictionary[Any, DeviceExporter] = weakref.WeakKeyDictionary()
# Copies on whichever device, which receivers read themselves.
_direct: weakref.WeakKeyDictionary[Any, DirectExporter] = weakref.WeakKeyDictionary()
_laid_out: weakref.WeakSet = weakref.WeakSet()  # learners whose weights lie side by side

Exported = FlatBuffer | ScatteredBuffer | DeviceSnapshot | DirectSnapshot


def export_module(
    learner, *, checksum: bool = False, transport: str = "store"
) -> Exported | None:
    """The policy that `learner` trains, without critic and value head, as what arrives elsewhere as
    a flat buffer; valid until the next call or update, by CUDA IPC for one call longer, by NIXL for
    as long as it is referred to.

    Of a policy under adapters these alone. Where learners hold shards, all must call it, and all
    but the first get None.
    """
    state = _laid_out_state(learner)
    return _snapshot(learner, state, checksum, transport) if state else None


def _laid_out_state(learner) -> dict[str, torch.Tensor]:
    if learner not in _laid_out:
        lay_side_by_side(learner.module[DEFAULT_MODULE_ID].unwrapped().own_tensors())
        _laid_out.add(learner)
    return _exported_state(learner)


def _snapshot(
    learner, state: dict[str, torch.Tensor], checksum: bool, transport: str
) -> Exported:
    if transport == "cuda_ipc":
        return _exporters.setdefault(learner, DeviceExporter()).pack(_require_cuda(state))
    if transport != "store":
        return _direct.setdefault(learner, DirectExporter(transport)).put(state)
    if all(tensor.device.type == "cpu" for tensor in state.values()):
        return scatter(state, checksum=checksum)
    return _staging.setdefault(learner, StagingBuffer()).pack(state, checksum=checksum)


def _require_cuda(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    devices = {tensor.device.type for tensor in state.values()}
    if devices != {"cuda"}:
        raise ValueError(
            "weights_transport='cuda_ipc' must have the learner's weights on a CUDA device, not on "
            f"{sorted(devices)}. Set num_gpus_per_learner, or weights_transport='store'."
        )
    return state


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
            learner = self._learner_group._learner
            flat = _snapshot(learner, _laid_out_state(learner), self._checksum, self._transport)
            return ray.put(flat), flat.num_bytes
        # The return value of an actor's task is owned by its caller: it survives the learner.
        sharded = self._learner_group.config.learner_strategy == "fsdp"
        results = self._learner_group.foreach_learner(
            functools.partial(export_module, checksum=self._checksum, transport=self._transport),
            remote_actor_ids=None if sharded else [0],
            return_obj_refs=True,
        )
        return next(iter(results)).get(), 0


class WeightsReceiver:
    """Keeps one sampler's module at the version it is asked to sample with."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer or Transfer()
        self._device_reader = DeviceReader()
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
            WeightsLostError: they are not where they were put any more, or cannot be read here.
        """
        if self._in_use is not None and published.key == self._in_use.key:
            return
        if published.ref:
            flat = self._fetch(published)
            start = time.perf_counter()
            self._load(published, flat, load)
            self._load_seconds = time.perf_counter() - start
            self._num_bytes = flat.num_bytes
        if self._in_use is not None:
            self._num_skipped += max(0, published.version - self._in_use.version - 1)
        self._in_use = published

    def _fetch(self, published: PublishedWeights) -> FlatBuffer | DeviceSnapshot:
        flat = self._transfer.fetch(lambda: published)[1]
        if not isinstance(flat, DirectSnapshot):
            return flat
        direct = dataclasses.replace(published, ref=(flat.ref,), nodes=())
        return self._transfer.fetch(lambda: direct)[1]

    def _load(
        self,
        published: PublishedWeights,
        flat: FlatBuffer | DeviceSnapshot,
        load: Callable[[FlatBuffer], None],
    ) -> None:
        if isinstance(flat, FlatBuffer):
            load(flat)
            return
        try:
            with self._device_reader.reading(flat) as view:
                load(view)
        except DeviceWeightsError as error:
            self._in_use = None  # the module may hold parts of two versions
            self._transfer.failures[type(error).__name__] += 1
            raise WeightsLostError(
                f"weights_version={published.version} must be readable on the learner's device: "
                f"{error}. Publish again, through the object store."
            ) from error

    def published_bytes(self) -> FlatBuffer:
        """The weights in use as they were published, on a device a copy of them.

        Raises:
            WeightsLostError: there are none, or they are not there any more.
        """
        in_use = self._in_use
        if in_use is None:
            raise WeightsLostError("no published weights are in use yet: none were loaded")
        flat = self._fetch(in_use)
        if isinstance(flat, FlatBuffer):
            return flat
        copies: list[FlatBuffer] = []
        self._load(
            in_use, flat,
            lambda view: copies.append(dataclasses.replace(view, data=torch.clone(view.data))),
        )  # fmt: skip
        return copies[0]

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
