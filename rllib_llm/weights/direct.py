"""Weights that go from the learner's memory straight into a sampler's, by Ray's direct transport.

    learner   tensors ── copy ──▶ a buffer where they are, registered with NIXL for good
    store     a reference to it, which keeps it from being written again (`DirectSnapshot`)
    sampler   reads it by NIXL: RDMA or NVLink between GPUs, else TCP or shared memory ── copy ──▶
              parameters

Readers act alone: one that died or hangs stops nobody, and a learner that died is an error that
passes, to them. This transport of Ray's is alpha in 2.60:
https://docs.ray.io/en/latest/ray-core/direct-transport/direct-transport.html
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.experimental import deregister_nixl_memory, register_nixl_memory

from rllib_llm.shared.ray_compat import put_direct
from rllib_llm.weights.flat_buffer import FlatBuffer, fill_slots, lay_out


@dataclass(frozen=True)
class DirectSnapshot:
    """`ref` refers to a `FlatBuffer` whose bytes are a tensor in the publishing process's memory,
    for as long as the reference lives."""

    ref: ray.ObjectRef
    num_bytes: int
    transport: str


def has_nixl() -> bool:
    """Whether NIXL is installed here."""
    return importlib.util.find_spec("nixl") is not None


class DirectTransport:
    """See `Transport`. Puts snapshots of tensors into buffers that stay registered: as many as
    there are snapshots at a time that somebody refers to.

    A buffer of its own for each snapshot would be taken from NIXL again after it. Readers then
    connect anew, and what they were connected by stays open: a socket on both sides per read.

    transport: "nixl", or another that Ray knows and whose readers act alone.
    get: what stands for `ray.get`.
    """

    def __init__(self, transport: str = "nixl", *, get: Callable[[ray.ObjectRef], Any] = ray.get):
        self._transport, self._get = transport, get
        self._buffers: list[_Buffer] = []
        if transport == "nixl":
            weakref.finalize(self, _deregister, self._buffers).atexit = False

    def export(self, tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> DirectSnapshot:
        """A snapshot of `tensors`, which are all on one device; valid for as long as somebody
        refers to it. It has no checksum, which would have to be computed on the host.

        Raises:
            ModuleNotFoundError: NIXL is not installed.
        """
        if self._transport == "nixl" and not has_nixl():
            raise ModuleNotFoundError(
                "weights_transport='nixl' must find the package nixl wherever a learner or a "
                "sampler runs: pip install 'rllib-llm[nixl]'. Or set weights_transport='store'."
            )
        slots, firsts, end = lay_out(tensors)
        memory = self._free_memory(end, next(iter(tensors.values())).device)
        fill_slots(memory, tensors, slots, firsts)
        # Ray waits for the device before it hands the memory out.
        flat = FlatBuffer(memory, slots)
        return DirectSnapshot(put_direct(flat, self._transport), end, self._transport)

    @contextmanager
    def open(self, ticket: DirectSnapshot) -> Iterator[FlatBuffer]:
        """The buffer, read into memory of this process; it stays valid after the block."""
        yield self._get(ticket.ref)

    def _free_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory that no snapshot refers to, [num_bytes] uint8, as a tensor that nobody has yet."""
        for buffer in self._buffers:
            fits = (buffer.memory.nbytes, buffer.memory.device) == (num_bytes, device)
            if fits and buffer.is_free:
                return buffer.take()
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if self._transport == "nixl":
            register_nixl_memory(memory)
        self._buffers.append(_Buffer(memory))
        return self._buffers[-1].take()


class _Buffer:
    """Memory, and whether the tensor of it that was taken last is still in use."""

    def __init__(self, memory: torch.Tensor):
        self.memory = memory
        self._taken: weakref.ref | None = None

    @property
    def is_free(self) -> bool:
        """Whether the tensor is unused; Ray releases it with the last reference."""
        return self._taken is None or self._taken() is None

    def take(self) -> torch.Tensor:
        """The memory as a new tensor, to be held for as long as it must not change."""
        view = self.memory.view(-1)
        self._taken = weakref.ref(view)
        return view


def _deregister(buffers: list[_Buffer]) -> None:
    for buffer in buffers:
        deregister_nixl_memory(buffer.memory)
