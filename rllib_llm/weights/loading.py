"""Received weights put into a module: parameters that are the shared memory, or copies of it.

Aliased, a module costs a node nothing beside the one copy in its object store, and a load moves no
bytes. That is for modules that only read: on the CPU, without critic, in the learner's own dtype.
All others (GPU, another dtype, a module that trains) are copied into, in place.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import functools
import logging
import mmap
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rllib_llm.weights.flat_buffer import FlatBuffer, unpack

# --- Shared memory that this process can read but not write

logger = logging.getLogger(__name__)

_PROT_READ, _MREMAP_MAYMOVE = 0x1, 0x1
_MAP_FAILED = ctypes.c_void_p(-1).value


def can_map_read_only() -> bool:
    """Whether this system can map pages a second time."""
    return sys.platform.startswith("linux")


def read_only(array: np.ndarray) -> np.ndarray:
    """The same bytes at another address, where a write ends the process; a copy where their memory
    cannot be mapped twice: small objects do not come in shared memory.

    array: [n] uint8, contiguous. It lives for as long as the result or a view of it.

    Raises:
        OSError: the system refused.
    """
    if not array.nbytes:
        return array
    libc, start = _libc(), array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    offset = array.ctypes.data - start
    length = offset + array.nbytes
    try:
        # An old size of 0 copies the mapping of shared pages: mremap(2).
        address = libc.mremap(start, 0, length, _MREMAP_MAYMOVE)
        _check(address != _MAP_FAILED, "mremap")
        _check(not libc.mprotect(address, length, _PROT_READ), "mprotect")
    except OSError as error:
        if error.errno == errno.EINVAL:  # private memory, or a part of a huge page
            return array.copy()
        raise
    memory = (ctypes.c_uint8 * array.nbytes).from_address(address + offset)
    mapping = weakref.finalize(memory, later, _unmap, address, length, array)
    mapping.atexit = False
    view = np.frombuffer(memory, dtype=np.uint8)  # type: ignore[call-overload]  # any buffer does
    view.flags.writeable = False
    return view


def later(function: Callable[..., object], *arguments: object) -> None:
    """Calls it in a thread of this process, in turn: for what frees memory, which takes tens of
    milliseconds per GB. An error is logged, since there is no caller to raise it in.
    """
    _jobs().put((function, arguments))


@functools.cache
def _jobs() -> queue.SimpleQueue:
    jobs: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_work, args=(jobs,), name="free-weights", daemon=True).start()
    return jobs


def _work(jobs: queue.SimpleQueue) -> None:
    while True:
        function, arguments = jobs.get()
        try:
            function(*arguments)
        except Exception:  # noqa: BLE001  (the border of the thread, which others count on)
            logger.exception("Memory of weights was not freed")
        del function, arguments  # they own memory


def _unmap(address: int, length: int, array: np.ndarray) -> None:
    """Unmaps pages that belong to `array`."""
    _check(not _libc().munmap(address, length), "munmap")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mremap.argtypes = [pointer, size, size, ctypes.c_int]
    libc.mremap.restype = pointer
    libc.mprotect.argtypes = [pointer, size, ctypes.c_int]
    libc.munmap.argtypes = [pointer, size]
    return libc


def _check(succeeded: bool, call: str) -> None:
    if not succeeded:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


class ModuleLoader:
    """Loads flat buffers into one module, a `HuggingFaceModule`.

    alias: parameters may become views of shared memory. Writing to such a parameter ends the
    process (`read_only`); `own_memory` gives it writable memory again.
    """

    def __init__(self, *, alias: bool):
        self._alias = alias and can_map_read_only()
        self._in_use: list[tuple[torch.Tensor, torch.Tensor]] = []  # with the views they are

    @property
    def is_aliased(self) -> bool:
        """Whether parameters are views of shared memory."""
        return bool(self._in_use)

    def load(self, module: Any, flat: FlatBuffer) -> None:
        """Makes the module compute with the weights in `flat`.

        Raises:
            ValueError: they are those of another architecture.
        """
        self.prepare(module, flat)()

    def prepare(self, module: Any, flat: FlatBuffer) -> Callable[[], None]:
        """Prepares a load and returns the call that completes it, which takes a microsecond per
        aliased tensor. Another thread may prepare while the module is in use."""
        own = module.own_tensors()
        if not self._alias or not _same_layout(own, flat):
            return functools.partial(self._copy, module, flat)
        if flat.is_shared:
            flat = dataclasses.replace(flat, data=read_only(flat.data))
        views = unpack(flat)
        distinct = {id(tensor): (tensor, views[name]) for name, tensor in own.items()}
        return functools.partial(self._alias_all, list(distinct.values()))

    def _alias_all(self, tensors_and_views: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for tensor, view in tensors_and_views:
            tensor.data = view
        replaced, self._in_use = self._in_use, tensors_and_views
        later(replaced.clear)  # the last hold on the weights before these

    def _copy(self, module: Any, flat: FlatBuffer) -> None:
        self.own_memory(module)
        module.set_state(unpack(flat))

    def own_memory(self, module: Any) -> None:
        """Gives every aliased parameter a copy that can be written to."""
        if not self.is_aliased:
            return
        for tensor in {id(t): t for t in module.own_tensors().values()}.values():
            tensor.data = tensor.data.clone()
        self._in_use = []


def differing(module: Any, flat: FlatBuffer) -> list[str]:
    """Names of the tensors in `flat` that `module` does not hold bit for bit, after rounding to its
    dtype."""
    own = module.own_tensors()
    return [
        name
        for name, tensor in unpack(flat).items()
        if name not in own or not torch.equal(_bytes(own[name]), _bytes(tensor.to(own[name].dtype)))
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[num_bytes] uint8: NaNs are equal to themselves."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _same_layout(own: Mapping[str, torch.Tensor], flat: FlatBuffer) -> bool:
    return (
        isinstance(flat.data, np.ndarray)  # in host memory
        and own.keys() == flat.slots.keys()
        and all(
            tensor.device.type == "cpu"
            and tensor.dtype == flat.slots[name].dtype
            and tuple(tensor.shape) == flat.slots[name].shape
            for name, tensor in own.items()
        )
    )
