"""A module whose parameters are shared memory: the same numbers, no bytes of its own, no writes."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from rllib_llm.weights import read_only
from rllib_llm.weights.flat_buffer import pack, unpack
from rllib_llm.weights.loading import ModuleLoader
from rllib_llm.weights.read_only import can_protect, protect

needs_protection = pytest.mark.skipif(not can_protect(), reason="no page protection here")


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


def values(module):
    return float(module.weight[0, 0]), float(module.embedding[0])


@needs_protection
def test_an_aliased_module_is_the_buffer_and_keeps_tied_names_tied():
    module, loader = Module(), ModuleLoader(alias=True)
    weight = module.weight
    for value in (10, 20):
        flat = flat_of(value)
        loader.load(module, flat)
        assert loader.is_aliased and values(module) == (value, value + 1)
        assert module.weight is weight  # the parameter stays, its memory changes
        assert module.weight.data_ptr() == unpack(flat)["weight"].data_ptr()
    assert module.own_tensors()["head"] is module.own_tensors()["embedding"]


@needs_protection
def test_memory_of_its_own_can_be_written_to_and_leaves_the_buffer_alone():
    module, loader, flat = Module(), ModuleLoader(alias=True), flat_of(1)
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
def test_protected_pages_become_writable_when_their_array_goes():
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    array = np.frombuffer(memory, dtype=np.uint8)
    protect(array)
    assert int(array.sum()) == 0  # reading goes on
    del array
    memory[mmap.PAGESIZE] = 7
    assert memory[mmap.PAGESIZE] == 7


@needs_protection
def test_a_write_to_protected_weights_ends_the_process():
    # Without the package and torch, whose imports take longer than all of this.
    code = (
        "import ctypes, mmap, numpy, runpy\n"
        f"protect = runpy.run_path({read_only.__file__!r})['protect']\n"
        "array = numpy.frombuffer(mmap.mmap(-1, 4 * mmap.PAGESIZE), dtype=numpy.uint8)\n"
        "protect(array)\n"
        "assert array.sum() == 0\n"
        "ctypes.memset(array.ctypes.data + mmap.PAGESIZE, 1, 1)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert result.returncode == -signal.SIGSEGV, result.stderr


@needs_protection
def test_small_and_empty_arrays_have_no_whole_page():
    protect(np.empty(0, dtype=np.uint8))
    small = np.zeros(100, dtype=np.uint8)
    protect(small)
    small[0] = 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_module_on_a_gpu_is_copied_into():
    module, loader = Module(), ModuleLoader(alias=True)
    module.weight.data = module.weight.data.cuda()
    module.embedding.data = module.embedding.data.cuda()
    loader.load(module, flat_of(3))
    assert not loader.is_aliased and values(module) == (3, 4)
