"""Weights that stay on one CUDA device, on their way to processes that work on the same one.

    learner   tensors ── copy ──▶ one of two buffers on the device
    store     where the buffer is, and what lies in it: a few kB     (`DeviceSnapshot`)
    sampler   the same buffer, mapped once by CUDA IPC ── copy ──▶ parameters

Nobody waits for readers: a buffer is written again at the second publication after its own. The
number of the snapshot stands behind the bytes, and is no longer there as soon as others are written
over them: readers check it before and after.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch.multiprocessing import reductions

from rllib_llm.weights.flat_buffer import (
    FlatBuffer,
    Slot,
    TicketError,
    fill_slots,
    lay_out,
    wait_for,
)

_STAMP_BYTES = 8
_BEING_WRITTEN = -1


class DeviceWeightsError(TicketError):
    """Weights on a device cannot be read by this process, or not any more."""


class Memory(Protocol):
    """Identifies a memory in any process."""

    @property
    def key(self) -> str:
        """Its unique key."""

    def attach(self) -> torch.Tensor:
        """That memory, [num_bytes] uint8; raises DeviceWeightsError where it cannot be had."""


@dataclass(frozen=True)
class CudaMemory:
    """Memory of the CUDA device `device` (its uuid); `arguments` are torch's own for sharing it."""

    key: str
    device: str
    arguments: tuple[Any, ...]

    def attach(self) -> torch.Tensor:
        """See `Memory`: for other processes of the node than the one that allocated it."""
        visible = [_uuid(index) for index in range(torch.cuda.device_count())]
        if self.device not in visible:
            raise DeviceWeightsError(
                f"the learner's device {self.device} must be among this process's {visible}: CUDA "
                "IPC works on one device"
            )
        call = inspect.signature(reductions.rebuild_cuda_tensor).bind(*self.arguments)
        # Processes number devices by what they see of them.
        call.arguments["storage_device"] = visible.index(self.device)
        try:
            return reductions.rebuild_cuda_tensor(*call.args, **call.kwargs)
        except RuntimeError as error:  # torch has no closer class for what CUDA answers
            raise DeviceWeightsError(f"CUDA IPC: {error}") from error


def allocate_cuda(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, CudaMemory]:
    """New memory of a CUDA device, [num_bytes] uint8, and what finds it in other processes.

    Raises:
        ValueError: it is no CUDA device.
    """
    if device.type != "cuda":
        raise ValueError(
            "weights_transport='cuda_ipc' must have the learner's weights on a CUDA device, not on "
            f"{[device.type]}. Set num_gpus_per_learner, or weights_transport='store'."
        )
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    _, arguments = reductions.reduce_tensor(memory)
    return memory, CudaMemory(uuid.uuid4().hex, _uuid(memory.device.index), arguments)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


@dataclass(frozen=True)
class DeviceSnapshot:
    """Weights in `memory` under `number`, as long as they were not written over."""

    memory: Memory
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
        self, allocate: Callable[[int, torch.device], tuple[torch.Tensor, Memory]] = allocate_cuda
    ):
        self._allocate = allocate
        self._buffers: list[tuple[torch.Tensor, Memory] | None] = [None, None]
        self._number = 0
        self._attached: dict[str, torch.Tensor] = {}  # of the other process

    def export(self, tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> DeviceSnapshot:
        """A snapshot of `tensors`; that of the call before the last one is gone. It has no
        checksum, which would have to be computed on the host."""
        slots, firsts, end = lay_out(tensors)
        device = next(iter(tensors.values())).device
        self._number += 1
        memory, handle = self._buffer(self._number % 2, end + _STAMP_BYTES, device)
        stamp = memory[end:].view(torch.int64)
        stamp.fill_(_BEING_WRITTEN)
        fill_slots(memory, tensors, slots, firsts)
        stamp.fill_(self._number)
        wait_for([memory.device, device])
        return DeviceSnapshot(handle, self._number, end, slots)

    def _buffer(
        self, turn: int, num_bytes: int, device: torch.device
    ) -> tuple[torch.Tensor, Memory]:
        buffer = self._buffers[turn]
        if buffer is None or len(buffer[0]) != num_bytes or buffer[0].device != device:
            self._buffers[turn] = None  # the old one goes before the new one comes
            self._buffers[turn] = buffer = self._allocate(num_bytes, device)
        return buffer

    @contextmanager
    def open(self, ticket: DeviceSnapshot) -> Iterator[FlatBuffer]:
        """The weights as a flat buffer on the device, to be copied from within the block.

        Raises:
            DeviceWeightsError: this process cannot read them; or, at the end of the block, they
                were written over: what was copied may be of two versions.
        """
        memory = self._attach(ticket.memory)
        _require_number(memory, ticket)
        yield FlatBuffer(memory[: ticket.num_bytes], ticket.slots)
        wait_for([memory.device])
        _require_number(memory, ticket)

    def _attach(self, memory: Memory) -> torch.Tensor:
        if memory.key not in self._attached:
            newest = list(self._attached)[-1:]  # an exporter has two
            self._attached = {key: self._attached[key] for key in newest}
            self._attached[memory.key] = memory.attach()
        return self._attached[memory.key]


def _require_number(memory: torch.Tensor, snapshot: DeviceSnapshot) -> None:
    found = int(memory[snapshot.num_bytes :].view(torch.int64))
    if found != snapshot.number:
        what = "being written" if found == _BEING_WRITTEN else f"snapshot {found}"
        raise DeviceWeightsError(
            f"snapshot {snapshot.number} was written over: its buffer holds {what}, for two "
            "publications came after it"
        )
