"""Tensors as one flat byte buffer and back: what travels from the learner to the samplers.

Every tensor lies at a 64-byte boundary; tensors that share storage (tied embeddings) are written
once; bytes are copied as they are, so that bfloat16 arrives bit for bit.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch

ALIGNMENT = 64  # bytes: a cache line, and what vectorised loads want


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
    """`data` [num_bytes] uint8 and the slot of every tensor by name; tied names share a slot."""

    data: np.ndarray
    slots: dict[str, Slot]

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes)


def pack(tensors: dict[str, torch.Tensor]) -> FlatBuffer:
    """Copies `tensors` (any device, any dtype) into one new flat buffer in host memory."""
    slots, firsts, end = {}, {}, 0
    for name, tensor in tensors.items():
        identity = _storage_identity(tensor)
        if identity not in firsts:
            firsts[identity] = name
            slots[name] = Slot(end, tuple(tensor.shape), tensor.dtype)
            end += -(-slots[name].num_bytes // ALIGNMENT) * ALIGNMENT
        slots[name] = slots[firsts[identity]]
    data = np.empty(end, dtype=np.uint8)
    buffer = torch.from_numpy(data)
    for name in firsts.values():
        _view(buffer, slots[name]).copy_(tensors[name].detach())
    return FlatBuffer(data, slots)


def unpack(flat: FlatBuffer) -> dict[str, torch.Tensor]:
    """The tensors of `flat` by name, as views of its bytes: read them, never write to them."""
    with warnings.catch_warnings():
        # The object store hands out read-only pages; torch has no read-only tensors and says so.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        buffer = torch.from_numpy(flat.data)
    return {name: _view(buffer, slot) for name, slot in flat.slots.items()}


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
