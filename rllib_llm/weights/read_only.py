"""Shared memory that this process can read but not write.

A view of the object store belongs to every process of the node. numpy refuses to write into it, but
torch knows no read-only tensors: one stray in-place operation would change the weights of all
samplers at once, in silence. So the pages are mapped a second time, for reading only: a write there
ends the process, and Ray's log shows the line.

A second mapping costs nothing to make. Taking away the right to write from the first one, and
giving it back later, costs a walk over all its pages each time: 65 ms per GB were measured.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np

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
    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    offset = array.ctypes.data - start
    length = offset + array.nbytes
    try:
        address = _map_again(start, length)
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


def _map_again(start: int, length: int) -> int:
    """The address of a second, read-only mapping of shared pages."""
    libc = _libc()
    # An old size of 0 copies the mapping: mremap(2).
    address = libc.mremap(start, 0, length, _MREMAP_MAYMOVE)
    if address == _MAP_FAILED:
        raise _error("mremap")
    if libc.mprotect(address, length, _PROT_READ):
        raise _error("mprotect")
    return address


def later(function: Callable[..., object], *arguments: object) -> None:
    """Calls it in a thread of this process, in turn: for what frees memory, which takes tens of
    milliseconds per GB that nobody has to wait for. An error is logged: nobody is there to be told.
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
    if _libc().munmap(address, length):
        raise _error("munmap")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mremap.argtypes = [pointer, size, size, ctypes.c_int]
    libc.mremap.restype = pointer
    libc.mprotect.argtypes = [pointer, size, ctypes.c_int]
    libc.munmap.argtypes = [pointer, size]
    return libc


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
