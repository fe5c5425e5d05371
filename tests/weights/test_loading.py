"""A module whose parameters are shared memory: the same numbers, no bytes of its own, no writes."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from rllib_llm.weights import loading as module_under_test
from rllib_llm.weights.flat_buffer import FlatBuffer, pack, unpack
from rllib_llm.weights.loading import ModuleLoader, can_map_read_only, differing, read_only

needs_protection = pytest.mark.skipif(not can_map_read_only(), reason="no second mapping here")


class Module:
    """Two tied names and a weight."""

    def __init__(self, dtype=torch.float32):
        self.weight = torch.nn.Parameter(torch.zeros(4, 3, dtype=dtype))
        self.embedding = torch.nn.Parameter(torch.zeros(5, dtype=dtype))

    def own_tensors(self):
        return {"weight": self.weight, "embedding": self.embedding, "head": self.embedding}

    def set_state(self, state):
        with torch.no_grad():
            for name, tensor in self.own_tensors().items():
                tensor.copy_(state[name])


def flat_of(value, dtype=torch.float32):
    tied = torch.full((5,), float(value + 1), dtype=dtype)
    return pack({"weight": torch.full((4, 3), float(value), dtype=dtype),
                 "embedding": tied, "head": tied})  # fmt: skip


def shared(flat):
    """The buffer as the object store gives it."""
    memory = np.frombuffer(mmap.mmap(-1, flat.num_bytes), dtype=np.uint8)
    memory[:] = flat.data
    return FlatBuffer(memory, flat.slots)


def values(module):
    return float(module.weight[0, 0]), float(module.embedding[0])


@needs_protection
def test_an_aliased_module_is_the_buffer_and_keeps_tied_names_tied():
    module, loader = Module(), ModuleLoader(alias=True)
    weight = module.weight
    for value in (10, 20):
        flat = shared(flat_of(value))
        loader.load(module, flat)
        assert loader.is_aliased and values(module) == (value, value + 1)
        assert module.weight is weight  # the parameter stays, its memory changes
        flat.data[flat.slots["weight"].offset + 3] ^= 0x80  # the sign of a little-endian float32
        assert values(module) == (-value, value + 1)
    assert module.own_tensors()["head"] is module.own_tensors()["embedding"]


@needs_protection
def test_memory_of_its_own_can_be_written_to_and_leaves_the_buffer_alone():
    module, loader, flat = Module(), ModuleLoader(alias=True), shared(flat_of(1))
    loader.load(module, flat)
    loader.own_memory(module)
    with torch.no_grad():
        module.weight.fill_(9)
    assert not loader.is_aliased
    assert values(module) == (9, 2)
    assert float(unpack(flat)["weight"][0, 0]) == 1


def test_without_alias_and_for_another_dtype_weights_are_copied_in_place():
    module = Module()
    address = module.weight.data_ptr()
    ModuleLoader(alias=False).load(module, flat_of(3))
    assert values(module) == (3, 4) and module.weight.data_ptr() == address
    loader = ModuleLoader(alias=True)
    loader.load(module, flat_of(5, torch.bfloat16))
    assert not loader.is_aliased
    assert values(module) == (5, 6) and module.weight.data_ptr() == address


@needs_protection
def test_a_buffer_that_does_not_fit_is_left_to_the_module_to_refuse():
    module, loader = Module(), ModuleLoader(alias=True)
    loader.load(module, flat_of(1))
    with pytest.raises(KeyError, match="embedding"):
        loader.load(module, pack({"weight": torch.ones(4, 3)}))


@needs_protection
def test_read_only_memory_is_the_shared_memory_and_is_unmapped_with_its_last_view():
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    array = np.frombuffer(memory, dtype=np.uint8)[100:-100]
    view = read_only(array)
    assert view.ctypes.data % mmap.PAGESIZE == array.ctypes.data % mmap.PAGESIZE == 100
    memory[200] = 7  # others write on; here it can be read
    assert view[100] == 7 and len(view) == len(array) and not view.flags.writeable
    part, alive = view[5000:], weakref.ref(array)
    del view, array
    assert alive() is not None and int(part.sum()) == 0
    del part
    deadline = time.monotonic() + 60
    while alive() is not None:  # the thread that unmaps
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_thread_that_frees_memory_outlives_an_error():
    done = threading.Event()

    def fail():
        raise OSError("munmap")

    module_under_test.later(fail)
    module_under_test.later(done.set)
    assert done.wait(60)


@needs_protection
def test_a_write_to_read_only_weights_ends_the_process():
    # Without the package and torch, whose imports take longer than all of this.
    code = (
        "import ctypes, mmap, numpy, runpy\n"
        f"read_only = runpy.run_path({module_under_test.__file__!r})['read_only']\n"
        "array = numpy.frombuffer(mmap.mmap(-1, 4 * mmap.PAGESIZE), dtype=numpy.uint8)\n"
        "view = read_only(array)\n"
        "ctypes.memset(array.ctypes.data, 1, 1)\n"
        "assert view.sum() == 1\n"
        "ctypes.memset(view.ctypes.data, 1, 1)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert result.returncode == -signal.SIGSEGV, result.stderr


@needs_protection
def test_private_memory_is_copied():
    array = np.ones(10_000, dtype=np.uint8)
    copy = read_only(array)
    array[0] = 5
    assert copy[0] == 1 and int(copy.sum()) == 10_000
    assert read_only(np.empty(0, dtype=np.uint8)).nbytes == 0


def test_what_differs_from_the_buffer_is_named():
    module, flat = Module(torch.bfloat16), flat_of(1 / 3)  # float32, rounded when loaded
    ModuleLoader(alias=False).load(module, flat)
    assert differing(module, flat) == []
    with torch.no_grad():
        module.embedding[2] += 1
    assert differing(module, flat) == ["embedding", "head"]
    assert differing(module, pack({"other": torch.ones(1)})) == ["other"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_module_on_a_gpu_is_copied_into():
    module, loader = Module(), ModuleLoader(alias=True)
    module.weight.data = module.weight.data.cuda()
    module.embedding.data = module.embedding.data.cuda()
    loader.load(module, flat_of(3))
    assert not loader.is_aliased and values(module) == (3, 4)
