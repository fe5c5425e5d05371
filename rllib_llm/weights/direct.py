"""Weights that do not pass through the object store: straight from the learner's memory into a
sampler's, by NIXL or by CUDA IPC.
"""

from __future__ import annotations

import importlib.util
import inspect
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
import torch
from ray.experimental import deregister_nixl_memory, register_nixl_memory
from torch.multiprocessing import reductions

from rllib_llm.shared.errors import require
from rllib_llm.shared.ray_compat import put_direct
from rllib_llm.weights.flat_buffer import (
    FlatBuffer,
    Slot,
    TicketError,
    fill_slots,
    lay_out,
    wait_for,
)

# --- NIXL, by Ray's direct transport
#
#     learner   tensors ── copy ──▶ a buffer where they are, registered with NIXL for good
#     store     a reference to it, which keeps it from being written again (`DirectSnapshot`)
#     sampler   reads it: RDMA or NVLink between GPUs, else TCP or shared memory ── copy ──▶
#               parameters
#
# Readers act alone: one that died or hangs stops no other, and a learner that died is an error that
# passes, to them. This transport of Ray's is alpha in 2.60:
# https://docs.ray.io/en/latest/ray-core/direct-transport/direct-transport.html


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
    snapshots are in use at a time.

    A new buffer for each snapshot would be taken from NIXL again after it. Readers then
    connect anew, and what they were connected by stays open: a socket on both sides per read.

    transport: "nixl", or another that Ray knows and whose readers act alone.
    get: what stands for `ray.get`.
    """

    def __init__(self, transport: str = "nixl", *, get: Callable[[ray.ObjectRef], Any] = ray.get):
        self._transport, self._get = transport, get
        self._buffers: list[_Buffer] = []
        if transport == "nixl":
            weakref.finalize(
                self, lambda all_: [deregister_nixl_memory(each.memory) for each in all_],
                self._buffers,
            ).atexit = False  # fmt: skip

    def export(self, tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> DirectSnapshot:
        """A snapshot of `tensors`, which are all on one device; valid for as long as it is
        referred to. It has no checksum, which would have to be computed on the host.

        Raises:
            ModuleNotFoundError: NIXL is not installed.
        """
        if self._transport == "nixl" and not has_nixl():
            raise ModuleNotFoundError("weights_transport='nixl': pip install 'rllib-llm[nixl]'")
        slots, firsts, end = lay_out(tensors)
        wanted = end, next(iter(tensors.values())).device
        for buffer in self._buffers:
            if buffer.is_free and (buffer.memory.nbytes, buffer.memory.device) == wanted:
                break
        else:
            memory = torch.empty(end, dtype=torch.uint8, device=wanted[1])
            if self._transport == "nixl":
                register_nixl_memory(memory)
            buffer = _Buffer(memory)
            self._buffers.append(buffer)
        memory = buffer.take()
        fill_slots(memory, tensors, slots, firsts)
        # Ray waits for the device before it hands the memory out.
        flat = FlatBuffer(memory, slots)
        return DirectSnapshot(put_direct(flat, self._transport), end, self._transport)

    @contextmanager
    def open(self, ticket: DirectSnapshot) -> Iterator[FlatBuffer]:
        """The buffer, read into memory of this process; it stays valid after the block."""
        yield self._get(ticket.ref)


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


# --- CUDA IPC: they stay on one device, where processes that work on the same one read them
#
#     learner   tensors ── copy ──▶ one of two buffers on the device
#     store     where the buffer is, and what lies in it: a few kB     (`DeviceSnapshot`)
#     sampler   the same buffer, mapped once by CUDA IPC ── copy ──▶ parameters
#
# Readers are not waited for: a buffer is written again at the second publication after its own. The
# number of the snapshot stands after the bytes, and is no longer there as soon as others are
# written over them: readers check it before and after.

_STAMP_BYTES = 8
_BEING_WRITTEN = -1


@dataclass(frozen=True)
class CudaMemory:
    """Memory of the CUDA device `device` (its uuid), with a unique key;
    `arguments` are torch's own for sharing it."""

    key: str
    device: str
    arguments: tuple[Any, ...]

    def attach(self) -> torch.Tensor:
        """The memory, [num_bytes] uint8, opened in another process of the node.

        Raises:
            TicketError: it cannot be had.
        """
        visible = [_uuid(index) for index in range(torch.cuda.device_count())]
        if self.device not in visible:
            raise TicketError(f"the learner's {self.device} must be among the devices {visible}")
        call = inspect.signature(reductions.rebuild_cuda_tensor).bind(*self.arguments)
        # Processes number devices by what they see of them.
        call.arguments["storage_device"] = visible.index(self.device)
        try:
            return reductions.rebuild_cuda_tensor(*call.args, **call.kwargs)
        except RuntimeError as error:  # torch has no closer class for what CUDA answers
            raise TicketError(f"CUDA IPC: {error}") from error


def allocate_cuda(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, CudaMemory]:
    """New memory of a CUDA device, [num_bytes] uint8, and what finds it in other processes.

    Raises:
        Problems: it is no CUDA device.
    """
    require(device.type == "cuda", "weights_transport", "cuda_ipc",
            f"be 'store' on the learner's device, {device.type!r}", "",
            "Or set num_gpus_per_learner")  # fmt: skip
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    _, arguments = reductions.reduce_tensor(memory)
    return memory, CudaMemory(uuid.uuid4().hex, _uuid(memory.device.index), arguments)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


@dataclass(frozen=True)
class DeviceSnapshot:
    """Weights in `memory` under `number`, as long as they were not written over."""

    memory: CudaMemory
    number: int
    num_bytes: int
    slots: dict[str, Slot]
    transport: ClassVar[str] = "cuda_ipc"


class CudaIpcTransport:
    """See `Transport`. Packs tensors of one device into two buffers there, in turns; or maps each
    such buffer of one other process once, and reads it.

    allocate: `allocate_cuda` or what stands for it.
    """

    def __init__(
        self,
        allocate: Callable[[int, torch.device], tuple[torch.Tensor, CudaMemory]] = allocate_cuda,
    ):
        self._allocate = allocate
        self._buffers: list[tuple[torch.Tensor, CudaMemory] | None] = [None, None]
        self._number = 0
        self._attached: dict[str, torch.Tensor] = {}  # of the other process

    def export(self, tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> DeviceSnapshot:
        """A snapshot of `tensors`; that of the call before the last one is gone. It has no
        checksum, which would have to be computed on the host."""
        slots, firsts, end = lay_out(tensors)
        device = next(iter(tensors.values())).device
        self._number += 1
        turn, num_bytes = self._number % 2, end + _STAMP_BYTES
        buffer = self._buffers[turn]
        if buffer is None or len(buffer[0]) != num_bytes or buffer[0].device != device:
            self._buffers[turn] = None  # the old one goes before the new one comes
            self._buffers[turn] = buffer = self._allocate(num_bytes, device)
        memory, handle = buffer
        stamp = memory[end:].view(torch.int64)
        stamp.fill_(_BEING_WRITTEN)
        fill_slots(memory, tensors, slots, firsts)
        stamp.fill_(self._number)
        wait_for([memory.device, device])
        return DeviceSnapshot(handle, self._number, end, slots)

    @contextmanager
    def open(self, ticket: DeviceSnapshot) -> Iterator[FlatBuffer]:
        """The weights as a flat buffer on the device, to be copied from within the block.

        Raises:
            TicketError: this process cannot read them; or, at the end of the block, they
                were written over: what was copied may be of two versions.
        """
        key = ticket.memory.key
        if key not in self._attached:
            newest = list(self._attached)[-1:]  # an exporter has two
            self._attached = {each: self._attached[each] for each in newest}
            self._attached[key] = ticket.memory.attach()
        memory = self._attached[key]
        _require_number(memory, ticket)
        yield FlatBuffer(memory[: ticket.num_bytes], ticket.slots)
        wait_for([memory.device])
        _require_number(memory, ticket)


def _require_number(memory: torch.Tensor, snapshot: DeviceSnapshot) -> None:
    found = int(memory[snapshot.num_bytes :].view(torch.int64))
    if found != snapshot.number:
        raise TicketError(f"snapshot {snapshot.number} was written over by a later one")
