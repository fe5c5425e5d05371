"""One buffer for all tensors: bit for bit, tied ones once, aligned."""

from __future__ import annotations

import pickle

import pytest
import torch

from rllib_llm.weights.flat_buffer import ALIGNMENT, pack, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64,
                                   torch.bool, torch.uint8])  # fmt: skip
def test_every_dtype_arrives_bit_for_bit(dtype):
    torch.manual_seed(0)
    original = (torch.randn(3, 5) * 100).to(dtype)
    restored = unpack(pack({"x": original}))["x"]
    assert restored.dtype == dtype and restored.shape == (3, 5)
    assert torch.equal(restored.view(torch.uint8), original.view(torch.uint8))


def test_values_that_are_no_numbers_arrive_too():
    original = torch.tensor([float("nan"), float("inf"), -0.0])
    restored = unpack(pack({"x": original}))["x"]
    assert torch.equal(restored.view(torch.int32), original.view(torch.int32))


def test_tied_tensors_travel_once():
    weight = torch.randn(10, 4)
    flat = pack({"embedding": weight, "other": torch.zeros(3), "head": weight.detach()})
    # 160 bytes to 192, 12 bytes to 64.
    assert flat.num_bytes == 192 + 64
    tensors = unpack(flat)
    assert tensors["head"].data_ptr() == tensors["embedding"].data_ptr()
    assert torch.equal(tensors["head"], weight)


def test_views_of_one_storage_that_differ_travel_apart():
    base = torch.arange(12.0)
    tensors = {"first": base[:6], "second": base[6:], "transposed": base.view(3, 4).t()}
    restored = unpack(pack(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(restored[name], tensor), name


def test_every_tensor_is_aligned_and_empty_ones_are_kept():
    flat = pack({"a": torch.zeros(1, dtype=torch.uint8), "none": torch.zeros(0, 3),
                 "scalar": torch.tensor(4.0)})  # fmt: skip
    assert all(slot.offset % ALIGNMENT == 0 for slot in flat.slots.values())
    restored = unpack(flat)
    assert restored["none"].shape == (0, 3)
    assert float(restored["scalar"]) == 4.0


def test_the_buffer_is_a_copy_and_survives_pickling():
    weight = torch.ones(4)
    flat = pack({"x": weight})
    weight.zero_()
    restored = unpack(pickle.loads(pickle.dumps(flat)))
    assert restored["x"].tolist() == [1, 1, 1, 1]
