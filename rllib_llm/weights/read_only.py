"""Pages of shared memory that this process can read but not write.

A view of the object store belongs to every process of the node. numpy refuses to write into it, but
torch knows no read-only tensors: one stray in-place operation would change the weights of all
samplers at once, in silence. With the pages protected it ends the process instead, and Ray's log
shows the line.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref

import numpy as np

_PROT_READ, _PROT_WRITE = 0x1, 0x2


def can_protect() -> bool:
    """Whether this system has page protection as POSIX defines it."""
    return sys.platform.startswith("linux")


def protect(array: np.ndarray) -> None:
    """Takes this process's right to write to the whole pages of `array` [n] uint8, for as long as
    the array lives; the object store may then use them for something else.

    The bytes before the first and after the last whole page stay writable: others share them.

    Raises:
        OSError: the system refused.
    """
    if array.ctypes.data == 0 or not array.nbytes:
        return
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= first:
        return
    _set_protection(first, end - first, _PROT_READ)
    # Runs before the array lets go of its memory.
    weakref.finalize(array, _set_protection, first, end - first, _PROT_READ | _PROT_WRITE)


def _set_protection(address: int, num_bytes: int, protection: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), protection):
        number = ctypes.get_errno()
        raise OSError(number, f"mprotect: {os.strerror(number)}")
