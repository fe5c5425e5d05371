"""Tensors as one flat byte buffer and back: what travels from the learner to the samplers.

Every tensor lies at a 64-byte boundary; tensors that share storage (tied embeddings) are written
once; bytes are copied as they are, so that bfloat16 arrives bit for bit.
"""

from __future__ import annotations

import hashlib
import warnings
import zlib
from dataclasses import dataclass

import numpy as np
import torch

ALIGNMENT = 64  # bytes: a cache line, and what vectorised loads want


class ChecksumError(RuntimeError):
    """The bytes of a buffer are not those that were packed."""


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in the buffer: `offset` in bytes, its shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class FlatBuffer:
    """`data` [num_bytes] uint8 and the slot of every tensor by name; tied names share a slot.

    `layout_hash` is equal for buffers of equal slots. `checksum` is the CRC-32 of `data` where one
    was asked for: it takes about as long as two copies.
    """

    data: np.ndarray
    slots: dict[str, Slot]
    layout_hash: str = ""
    checksum: int | None = None

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes)


class StagingBuffer:
    """Host memory that is packed into again and again.

    Fresh memory costs several times the copy into it, for the system has to hand out every page;
    this one is warm from the second time on. Page-locked where tensors come from a GPU.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def pack(self, tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> FlatBuffer:
        """As `pack`; the result is valid until the next call."""
        slots, firsts, end = _lay_out(tensors)
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        size = end + ALIGNMENT
        if self._memory is None or len(self._memory) != size or (
            on_gpu and not self._memory.is_pinned()
        ):
            self._memory = None  # the old one goes before the new one comes
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        start = -self._memory.data_ptr() % ALIGNMENT
        return _fill(self._memory[start : start + end], tensors, slots, firsts, checksum)


def pack(tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> FlatBuffer:
    """Copies `tensors` (any device, any dtype) into one new flat buffer in host memory."""
    return StagingBuffer().pack(tensors, checksum=checksum)


def unpack(flat: FlatBuffer) -> dict[str, torch.Tensor]:
    """The tensors of `flat` by name, as views of its bytes: read them, never write to them.

    Do not pickle them either: each would take the whole buffer along.
    """
    with warnings.catch_warnings():
        # The object store hands out read-only pages; torch has no read-only tensors and says so.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        buffer = torch.from_numpy(flat.data)
    return {name: _view(buffer, slot) for name, slot in flat.slots.items()}


def verify(flat: FlatBuffer) -> None:
    """Raises ChecksumError unless the bytes are those that were packed; a buffer that was packed
    without a checksum passes."""
    if flat.checksum is None:
        return
    found = zlib.crc32(flat.data)
    if found != flat.checksum:
        raise ChecksumError(
            f"checksum={found:#010x} must be {flat.checksum:#010x}: {flat.num_bytes} bytes of "
            "weights changed after they were packed. Fetch them again; if it goes on, the memory "
            "or a process that writes into shared weights is at fault."
        )


def _lay_out(
    tensors: dict[str, torch.Tensor],
) -> tuple[dict[str, Slot], list[str], int]:
    """Every name's slot, the first name of each slot, and the size in bytes."""
    slots: dict[str, Slot] = {}
    firsts: dict[tuple, str] = {}
    end = 0
    for name, tensor in tensors.items():
        identity = _storage_identity(tensor)
        if identity not in firsts:
            firsts[identity] = name
            slots[name] = Slot(end, tuple(tensor.shape), tensor.dtype)
            end += -(-slots[name].num_bytes // ALIGNMENT) * ALIGNMENT
        slots[name] = slots[firsts[identity]]
    return slots, list(firsts.values()), end


def _fill(
    buffer: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    slots: dict[str, Slot],
    firsts: list[str],
    checksum: bool,
) -> FlatBuffer:
    for name in firsts:
        slot, tensor = slots[name], tensors[name].detach()
        _view(buffer, slot).copy_(tensor, non_blocking=tensor.is_cuda)
        padding = slice(slot.offset + slot.num_bytes, slot.offset + -(-slot.num_bytes // 64) * 64)
        buffer[padding] = 0  # equal tensors give equal bytes
    if any(tensors[name].is_cuda for name in firsts):
        torch.cuda.synchronize()
    data = buffer.numpy()
    crc = zlib.crc32(data) if checksum else None
    return FlatBuffer(data, slots, _hash(slots), crc)


def _hash(slots: dict[str, Slot]) -> str:
    return hashlib.sha256(repr(sorted(slots.items())).encode()).hexdigest()[:16]


def _view(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    flat = buffer[slot.offset : slot.offset + slot.num_bytes]
    return flat.view(slot.dtype).view(slot.shape)


def _storage_identity(tensor: torch.Tensor) -> tuple:
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )
