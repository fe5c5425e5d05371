"""Weights that go from the learner's memory straight into a sampler's, by Ray's direct transport.

    learner   tensors ── copy ──▶ one new buffer where they are, registered with NIXL
    store     a reference to it, which keeps it (`DirectSnapshot`): a few kB
    sampler   reads it by NIXL: RDMA or NVLink between GPUs, else TCP or shared memory ── copy ──▶
              parameters

Readers act alone: one that died or hangs stops nobody, and a learner that died is an error that
passes, to them (`transfer.py`). `ray.put(..., _tensor_transport="nixl")` is of Ray 2.60, alpha:
https://docs.ray.io/en/latest/ray-core/direct-transport/direct-transport.html
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import ray
import torch

from rllib_llm.weights.flat_buffer import FlatBuffer, fill_slots, hash_of, lay_out


@dataclass(frozen=True)
class DirectSnapshot:
    """`ref` is of a `FlatBuffer` whose bytes are a tensor in the memory of the process that put it
    there, for as long as the reference lives."""

    ref: ray.ObjectRef
    num_bytes: int
    checksum: None = None  # never: it would have to be computed on the host


def has_nixl() -> bool:
    """Whether NIXL is installed here."""
    return importlib.util.find_spec("nixl") is not None


def put_directly(tensors: dict[str, torch.Tensor], transport: str = "nixl") -> DirectSnapshot:
    """A snapshot of `tensors`, which are all on one device.

    transport: "nixl", or another that Ray knows and whose receivers act alone.

    Raises:
        ModuleNotFoundError: NIXL is not installed.
    """
    if transport == "nixl" and not has_nixl():
        raise ModuleNotFoundError(
            "weights_transport='nixl' must find the package nixl wherever a learner or a sampler "
            "runs: pip install 'rllib-llm[nixl]'. Or set weights_transport='store'."
        )
    slots, firsts, end = lay_out(tensors)
    device = next(iter(tensors.values())).device
    memory = torch.empty(end, dtype=torch.uint8, device=device)
    fill_slots(memory, tensors, slots, firsts)
    # Ray waits for the device before it registers the memory.
    flat = FlatBuffer(memory, slots, hash_of(slots))
    return DirectSnapshot(ray.put(flat, _tensor_transport=transport), end)
