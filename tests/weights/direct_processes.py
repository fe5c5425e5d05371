"""Processes that put weights where they are and read them, and a transport of Ray's that needs no
further package."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass

import ray
import torch
from ray.exceptions import RayDirectTransportError
from ray.experimental.rdt import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)

from rllib_llm.weights.direct import DirectTransport
from rllib_llm.weights.flat_buffer import unpack
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.receiver import WeightsReceiver


@dataclass
class Bytes(TensorTransportMetadata):
    """Goes from the sender to the receiver by itself: the tensors are in it."""

    tensors: tuple = ()


class InMetadata(TensorTransportManager):
    """One-sided, as NIXL is. `num_failing` transfers of this process fail before one succeeds."""

    num_failing = 0

    def tensor_transport_backend(self):
        return "IN_METADATA"

    @staticmethod
    def is_one_sided():
        return True

    @staticmethod
    def can_abort_transport():
        return True

    def actor_has_tensor_transport(self, actor):
        return True

    def extract_tensor_transport_metadata(self, obj_id, rdt_object):
        meta = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        return Bytes(meta, "cpu", tuple(tensor.numpy().copy() for tensor in rdt_object))

    def get_communicator_metadata(self, src_actor, dst_actor, backend=None):
        return CommunicatorMetadata()

    def recv_multiple_tensors(self, obj_id, metadata, communicator_metadata, target_buffers=None):
        if InMetadata.num_failing > 0:
            InMetadata.num_failing -= 1
            raise RayDirectTransportError("the link is down")
        return [torch.from_numpy(array.copy()) for array in metadata.tensors]

    def send_multiple_tensors(self, tensors, metadata, communicator_metadata):
        raise NotImplementedError

    def garbage_collect(self, obj_id, tensor_transport_meta, tensors):
        pass

    def abort_transport(self, obj_id, communicator_metadata):
        pass


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """40 MB of one number, and two tied names of another in bfloat16."""
    head = torch.full((3,), version + 0.5, dtype=torch.bfloat16)
    return {"weight": torch.full((10_000_000,), float(version)), "embedding": head, "head": head}


NUM_BYTES = 40_000_064  # of these: 6 bytes of the tied one take up a line of 64


class Learner:
    """Puts weights where they are, and says how many such buffers it has."""

    def __init__(self, transport: str):
        if transport == "in_metadata":
            register_tensor_transport(transport, ["cpu"], InMetadata, torch.Tensor)
        self._transport = DirectTransport(transport)

    def put(self, version: int) -> PublishedWeights:
        return PublishedWeights(
            version, ref=(ray.put(self._transport.export(tensors_of(version))),)
        )

    def num_buffers(self) -> tuple[int, int]:
        """How many there are, and how many of them somebody refers to."""
        gc.collect()
        found = [
            tensor
            for tensor in gc.get_objects()
            if type(tensor) is torch.Tensor
            and (tensor.nbytes, tensor.dtype) == (NUM_BYTES, torch.uint8)
        ]
        return len({tensor.data_ptr() for tensor in found}), sum(t._is_view() for t in found)

    def num_files(self) -> int:
        """Open ones, sockets among them."""
        return len(os.listdir("/proc/self/fd"))

    def pid(self) -> int:
        return os.getpid()


class Sampler:
    """Reads weights into memory of its own."""

    def __init__(self, transport: str, timeout_seconds: float = 60.0, max_attempts: int = 5):
        if transport == "in_metadata":
            register_tensor_transport(transport, ["cpu"], InMetadata, torch.Tensor)
        torch.set_num_threads(1)
        self._receiver = WeightsReceiver(timeout_seconds=timeout_seconds, max_attempts=max_attempts)

    def fail_next(self, num: int) -> None:
        InMetadata.num_failing = num

    def receive(self, published: PublishedWeights) -> list:
        """Extremes of the large tensor, and the small one by both names."""
        found: list = []

        def load(flat):
            tensors = unpack(flat)
            weight = tensors["weight"]
            found.extend([float(weight.min()), float(weight.max()), flat.num_bytes])
            found.extend([tensors["head"].tolist(), tensors["embedding"].tolist()])

        self._receiver.receive(published, load)
        return found

    def received_bytes(self) -> int:
        return self._receiver.published_bytes().num_bytes

    def num_files(self) -> int:
        """Open ones, sockets among them."""
        return len(os.listdir("/proc/self/fd"))

    def failures(self) -> dict[str, float]:
        metrics = self._receiver.metrics()
        return {name: n for name, n in metrics.items() if name.startswith("failures/") and n}
