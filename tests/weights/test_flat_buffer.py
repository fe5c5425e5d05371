"""One buffer for all tensors: bit for bit, tied ones once, aligned."""

from __future__ import annotations

import pickle

import pytest
import ray
import torch

from rllib_llm.weights.flat_buffer import (
    ALIGNMENT,
    ChecksumError,
    FlatBuffer,
    ScatteredBuffer,
    StagingBuffer,
    join,
    lay_side_by_side,
    pack,
    scatter,
    unpack,
    verify,
    wait_for,
)


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
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in restored.values())
    assert restored["none"].shape == (0, 3)
    assert float(restored["scalar"]) == 4.0


def test_the_buffer_is_a_copy_and_survives_pickling():
    weight = torch.ones(4)
    flat = pack({"x": weight})
    weight.zero_()
    restored = unpack(pickle.loads(pickle.dumps(flat)))
    assert restored["x"].tolist() == [1, 1, 1, 1]


def test_a_staging_buffer_is_used_again_and_grows():
    staging = StagingBuffer()
    first = staging.pack({"x": torch.ones(3)})
    address = first.data.ctypes.data
    assert unpack(first)["x"].tolist() == [1, 1, 1]
    second = staging.pack({"x": torch.zeros(3)})
    assert second.data.ctypes.data == address
    assert unpack(first)["x"].tolist() == [0, 0, 0]  # the same memory: valid until the next call
    larger = staging.pack({"x": torch.ones(100)})
    assert larger.num_bytes == 448  # 400 bytes, aligned
    assert bool((unpack(larger)["x"] == 1).all())


def test_equal_tensors_give_equal_bytes_whatever_was_in_the_memory_before():
    staging = StagingBuffer()
    staging.pack({"x": torch.full((16,), float("nan"))})
    flat = staging.pack({"x": torch.ones(9)[:9]}, checksum=True)
    assert flat.checksum == pack({"x": torch.ones(9)}, checksum=True).checksum


def test_copies_are_waited_for_on_the_devices_of_the_tensors():
    synchronized = []
    devices = [torch.device(name) for name in ("cuda:1", "cpu", "cuda:1", "cuda:0")]
    wait_for(devices, synchronized.append)
    assert sorted(map(str, synchronized)) == ["cuda:0", "cuda:1"]


def test_a_changed_byte_is_noticed_where_a_checksum_was_asked_for():
    flat = pack({"x": torch.ones(4)}, checksum=True)
    verify(flat)
    flat.data[3] ^= 1
    with pytest.raises(ChecksumError, match="64 bytes of weights changed"):
        verify(flat)
    verify(pack({"x": torch.ones(4)}))  # nothing to compare with


def mixed_tensors():
    """Multiples of 64 bytes and others, tied, empty, strided."""
    torch.manual_seed(0)
    weight = torch.randn(1000, 7)
    return {
        "weight": weight, "tied": weight.detach(), "even": torch.randn(64, 32).bfloat16(),
        "none": torch.zeros(0, 3), "scalar": torch.tensor(True), "column": weight[:, 2],
    }  # fmt: skip


def test_scattered_tensors_arrive_as_the_same_bytes():
    tensors = mixed_tensors()
    packed, scattered = pack(tensors, checksum=True), scatter(tensors, checksum=True)
    assert isinstance(scattered, ScatteredBuffer)
    arrived = pickle.loads(pickle.dumps(scattered))
    assert isinstance(arrived, FlatBuffer)
    assert arrived.data.tobytes() == packed.data.tobytes()
    assert arrived.slots == packed.slots
    assert scattered.checksum == arrived.checksum == packed.checksum
    assert scattered.num_bytes == packed.num_bytes
    verify(arrived)
    assert unpack(pickle.loads(pickle.dumps(scatter({})))) == {}


def test_scattered_tensors_are_put_without_a_copy_and_got_as_one_array(ray_session):
    tensors = mixed_tensors()
    scattered = scatter(tensors)
    assert scattered.parts[0].ctypes.data == tensors["weight"].data_ptr()
    flat = ray.get(ray.put(scattered))
    assert flat.data.ctypes.data % ALIGNMENT == 0
    assert not flat.data.flags.owndata and not flat.data.flags.writeable
    assert flat.data.tobytes() == pack(tensors).data.tobytes()


def test_tensors_side_by_side_are_one_part_and_stay_what_they_were():
    base = torch.arange(32.0)
    tensors = mixed_tensors() | {"half": base[:16], "transposed": torch.randn(4, 4).t()}
    for name in ("scalar", "column"):  # 1 byte, 28 in each 7: neither fills its last 64
        del tensors[name]
    parameter = torch.nn.Parameter(torch.randn(48, 4))
    tensors |= {"parameter": parameter, "tied too": parameter}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    lay_side_by_side(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.detach(), before[name]), name
    assert tensors["weight"].data_ptr() == tensors["tied"].data_ptr()
    assert tensors["half"].data_ptr() == base.data_ptr()  # a view of something else
    parameter.data.mul_(2)
    flat = pickle.loads(pickle.dumps(scatter(tensors)))
    assert torch.equal(unpack(flat)["tied too"], 2 * before["parameter"])
    # 28000 bytes of weight are 437.5 lines: its last half is a part, then 4096 of even and 768.
    beside = {name: tensors[name] for name in ("weight", "even", "parameter")}
    assert [part.nbytes for part in scatter(beside).parts] == [27968, 64, 4096 + 768]
    assert len(pickle.dumps(tensors["even"])) < 5000  # a storage of its own


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_come_through_page_locked_memory_bit_for_bit():
    weight = torch.randn(1000, 7, device="cuda").bfloat16()
    flat = StagingBuffer().pack({"x": weight, "tied": weight.detach()})
    assert flat.num_bytes == 14016  # 14000 bytes, aligned
    target = torch.empty_like(weight)
    target.copy_(unpack(flat)["tied"])
    assert torch.equal(target.view(torch.int16), weight.view(torch.int16))


def test_memory_that_two_shapes_share_stays_shared():
    wide = torch.zeros(4, 6)
    tall = wide.view(6, 4)
    lay_side_by_side({"wide": wide, "tall": tall})
    wide.add_(1)
    assert tall.eq(1).all()


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_parts_of_several_learners_are_put_together_bit_for_bit(num_parts):
    """Cut as FSDP2 cuts: 7 rows in parts of 4 and 3, or of 2, 2, 2, 1 and none."""
    torch.manual_seed(0)
    tied = torch.randn(7, 5).bfloat16()
    cut = {"embedding": tied, "head": tied, "bias": torch.randn(4), "narrow": torch.randn(1, 3)}
    whole = {"buffer": torch.randn(3), "scalar": torch.tensor(2.5)}

    def of_learner(rank):
        parts: dict[int, torch.Tensor] = {}
        for tensor in cut.values():
            chunks = tensor.chunk(num_parts)
            empty = tensor[:0]
            parts.setdefault(id(tensor), chunks[rank] if rank < len(chunks) else empty)
        own = {name: parts[id(tensor)] for name, tensor in cut.items()}
        return own if rank else {**own, **whole}

    flat = join([pack(of_learner(rank), checksum=True) for rank in range(num_parts)])
    expected, found = {**cut, **whole}, unpack(flat)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        assert found[name].data_ptr() % ALIGNMENT == 0
    assert found["head"].data_ptr() == found["embedding"].data_ptr()
    assert flat.num_bytes == pack(expected).num_bytes
    assert flat.is_shared == (num_parts == 1)
