"""Tensors as one flat byte buffer and back: what travels from the learner to the samplers.

Every tensor lies at a 64-byte boundary; tensors that share storage (tied embeddings) are written
once; bytes are copied as they are, so that bfloat16 arrives bit for bit.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

ALIGNMENT = 64  # bytes: a cache line, and what vectorised loads want


class TicketError(RuntimeError):
    """A ticket that this process cannot read, or can no longer read."""


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

    @property
    def end(self) -> int:
        """Where the next tensor lies."""
        return self.offset + -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class FlatBuffer:
    """`data` [num_bytes] uint8 and the slot of every tensor by name; tied names share a slot.
    In host memory `data` is an array, on a device a tensor.

    `checksum` is the CRC-32 of `data` where one was asked for: it takes about as long as two
    copies. In the object store the buffer is its own ticket. `is_shared`: other processes may see
    the same bytes.
    """

    data: np.ndarray | torch.Tensor
    slots: dict[str, Slot]
    checksum: int | None = None
    is_shared: bool = True
    transport: ClassVar[str] = "store"

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes)


@dataclass(frozen=True)
class ScatteredBuffer:
    """A flat buffer that was not put together: `parts`, uint8, are views of the tensors themselves,
    padding between them. Pickled, it arrives as a `FlatBuffer`.

    Into the object store its bytes are copied once, one part after the other. It is valid for as
    long as the tensors do not change.
    """

    parts: list[np.ndarray]
    slots: dict[str, Slot]
    checksum: int | None = None
    transport: ClassVar[str] = "store"

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __reduce__(self):
        return _from_parts, (self.parts, self.slots, self.checksum)


class StagingBuffer:
    """Host memory that is packed into again and again.

    Fresh memory costs several times the copy into it, for the system has to hand out every page;
    this one is warm from the second time on. Page-locked where tensors come from a GPU.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def pack(self, tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> FlatBuffer:
        """As `pack`; the result is valid until the next call."""
        slots, firsts, end = lay_out(tensors)
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if (
            self._memory is None
            or len(self._memory) != end
            or (on_gpu and not self._memory.is_pinned())
        ):
            self._memory = None  # the old one goes before the new one comes
            self._memory = _aligned(end, pinned=on_gpu)
        fill_slots(self._memory, tensors, slots, firsts)
        wait_for(tensor.device for tensor in tensors.values())
        data = self._memory.numpy()
        return FlatBuffer(data, slots, _crc32(data) if checksum else None)


def pack(tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> FlatBuffer:
    """Copies `tensors` (any device, any dtype) into one new flat buffer in host memory."""
    return StagingBuffer().pack(tensors, checksum=checksum)


def scatter(tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> ScatteredBuffer:
    """The parts of a packed buffer on the CPU, as views of `tensors` before any copy."""
    slots, firsts, _ = lay_out(tensors)
    parts = []
    for name in firsts:
        tensor = tensors[name].detach().contiguous().reshape(-1)
        data = tensor.view(torch.uint8).numpy()
        whole = data.nbytes // ALIGNMENT * ALIGNMENT
        if whole:
            parts.append(data[:whole])
        if whole < data.nbytes:
            padded = np.zeros(ALIGNMENT, dtype=np.uint8)
            padded[: data.nbytes - whole] = data[whole:]
            parts.append(padded)
    parts = _merge(parts)
    crc = functools.reduce(lambda crc, part: _crc32(part, crc), parts, 0) if checksum else None
    return ScatteredBuffer(parts, slots, crc)


def lay_side_by_side(tensors: dict[str, torch.Tensor]) -> None:
    """Moves CPU tensors with storage of their own next to each other in memory, each still in its
    own storage, so that `scatter` can copy them as one part, which is faster.

    They are changed in place; a tensor made from one of them before keeps the old memory.
    """
    own = {
        id(tensor): tensor
        for tensor in tensors.values()
        if type(tensor.data) is torch.Tensor  # no shard, nothing quantised
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
    }
    views: dict[int, set[tuple]] = {}  # of one memory, by its address
    for tensor in own.values():
        views.setdefault(tensor.data_ptr(), set()).add(_storage_identity(tensor))
    own = {key: tensor for key, tensor in own.items() if len(views[tensor.data_ptr()]) == 1}
    slots, _, end = lay_out({str(key): tensor for key, tensor in own.items()})
    memory = _aligned(end)
    moved: dict[int, torch.Tensor] = {}
    for key, tensor in own.items():
        slot = slots[str(key)]
        if slot.offset not in moved:
            # A separate storage, by way of numpy.
            place = memory.numpy()[slot.offset :][: slot.num_bytes]
            moved[slot.offset] = torch.from_numpy(place).view(slot.dtype).view(slot.shape)
            moved[slot.offset].copy_(tensor.detach())
        tensor.data = moved[slot.offset]


def unpack(flat: FlatBuffer) -> dict[str, torch.Tensor]:
    """The tensors of `flat` by name, as views of its bytes: read them, never write to them.

    Do not pickle them either: each would take the whole buffer along.
    """
    buffer = flat.data
    if isinstance(buffer, np.ndarray):
        with warnings.catch_warnings():
            # The object store hands out read-only pages; torch has no such tensors and says so.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            buffer = torch.from_numpy(buffer)
    return {name: _view(buffer, slot) for name, slot in flat.slots.items()}


def join(parts: Sequence[FlatBuffer]) -> FlatBuffer:
    """One buffer of tensors that are cut along their first dimension over `parts`, in order; what
    is in the first part alone is whole. In new host memory, unless there is one part."""
    if len(parts) == 1:
        return parts[0]
    views = [unpack(part) for part in parts]
    slots: dict[str, Slot] = {}
    placed: dict[Slot, Slot] = {}  # by that of the first part: tied tensors stay one
    cut: dict[Slot, list[torch.Tensor]] = {}
    end = 0
    for name, first in parts[0].slots.items():
        if first not in placed:
            pieces = [view[name] for view in views if name in view]
            whole = first.shape
            if len(pieces) > 1:
                whole = (sum(map(len, pieces)), *whole[1:])
            placed[first] = Slot(end, whole, first.dtype)
            cut[placed[first]] = pieces
            end = placed[first].end
        slots[name] = placed[first]
    memory = _aligned(end)
    for slot, pieces in cut.items():
        target = _view(memory, slot)
        if len(pieces) > 1:
            torch.cat(pieces, out=target)
        else:
            target.copy_(pieces[0])
    return FlatBuffer(memory.numpy(), slots, is_shared=False)


def verify(flat: FlatBuffer) -> None:
    """Raises ChecksumError unless the bytes are those that were packed; a buffer that was packed
    without a checksum passes."""
    if flat.checksum is None:
        return
    found = _crc32(flat.data)
    if found != flat.checksum:
        wrong = f"checksum={found:#010x} must be {flat.checksum:#010x}"
        raise ChecksumError(f"{wrong}: {flat.num_bytes} bytes of weights changed on their way")


def _crc32(data: np.ndarray | torch.Tensor, before: int = 0) -> int:
    return zlib.crc32(data, before)  # type: ignore[arg-type]  # numpy: Buffer only from 3.12 on


class _Span:
    """Memory from the first byte of `arrays`, which lie one after the other, to the last one."""

    def __init__(self, arrays: list[np.ndarray]):
        self._arrays = arrays  # they own the memory
        shape = (sum(array.nbytes for array in arrays),)
        self.__array_interface__ = {
            "data": (arrays[0].ctypes.data, True), "shape": shape, "typestr": "|u1", "version": 3,
        }  # fmt: skip


def _merge(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The same bytes in as few arrays as possible: one for all that lie one after the other."""
    runs: list[list[np.ndarray]] = []
    end = None
    for array in arrays:
        if array.ctypes.data != end:
            runs.append([])
        runs[-1].append(array)
        end = array.ctypes.data + array.nbytes
    return [run[0] if len(run) == 1 else np.asarray(_Span(run)) for run in runs]


def _from_parts(
    parts: list[np.ndarray], slots: dict[str, Slot], checksum: int | None
) -> FlatBuffer:
    """One array of all parts: a view if they are contiguous, as in the object store (each length is
    a multiple of the alignment); otherwise a copy."""
    merged = _merge(parts)
    data = merged[0] if len(merged) == 1 else np.concatenate([np.empty(0, np.uint8), *merged])
    return FlatBuffer(data, slots, checksum)


def lay_out(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Slot], list[str], int]:
    """Every name's slot, the first name of each slot, and the size in bytes: a multiple of the
    alignment."""
    slots: dict[str, Slot] = {}
    firsts: dict[tuple, str] = {}
    end = 0
    for name, tensor in tensors.items():
        identity = _storage_identity(tensor)
        if identity not in firsts:
            firsts[identity] = name
            slots[name] = Slot(end, tuple(tensor.shape), tensor.dtype)
            end = slots[name].end
        slots[name] = slots[firsts[identity]]
    return slots, list(firsts.values()), end


def fill_slots(
    buffer: torch.Tensor, tensors: dict[str, torch.Tensor], slots: dict[str, Slot],
    firsts: list[str],
) -> None:  # fmt: skip
    """Copies `tensors` into their slots of `buffer` [num_bytes] uint8, and zeros after them: equal
    tensors give equal bytes. Copies between devices may still be under way (`wait_for`)."""
    for name in firsts:
        slot, tensor = slots[name], tensors[name].detach()
        _view(buffer, slot).copy_(tensor, non_blocking=tensor.is_cuda)
        buffer[slot.offset + slot.num_bytes : slot.end] = 0


def wait_for(
    devices: Iterable[torch.device],
    synchronize: Callable[[torch.device], None] = torch.cuda.synchronize,
) -> None:
    """Returns when the copies from and to these devices are done, whichever is the current one."""
    for device in {device for device in devices if device.type == "cuda"}:
        synchronize(device)


def _aligned(num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """New host memory, [num_bytes] uint8, at a boundary of the alignment."""
    memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    return memory[-memory.data_ptr() % ALIGNMENT :][:num_bytes]


def _view(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    flat = buffer[slot.offset : slot.offset + slot.num_bytes]
    if not len(flat):  # of which not every buffer has a view of another dtype
        return torch.empty(slot.shape, dtype=slot.dtype, device=buffer.device)
    return flat.view(slot.dtype).view(slot.shape)


def _storage_identity(tensor: torch.Tensor) -> tuple:
    address = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return tensor.device, *address, tuple(tensor.shape), tensor.stride(), tensor.dtype
