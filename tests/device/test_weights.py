"""Weights on the pretend GPU: into page-locked memory, into modules, to processes beside it."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from rllib_llm.weights.direct import CudaIpcTransport, CudaMemory
from rllib_llm.weights.flat_buffer import (
    StagingBuffer,
    TicketError,
    fill_slots,
    lay_out,
    unpack,
)
from rllib_llm.weights.loading import ModuleLoader, differing
from rllib_llm.weights.receiver import WeightsReceiver
from tests.device import pretend
from tests.weights.test_loading import Module, flat_of, values
from tests.weights.test_on_device import get_itself, published


def tensors_there() -> dict[str, torch.Tensor]:
    weight = torch.randn(1000, 7, generator=torch.Generator().manual_seed(0)).bfloat16().to("cuda")
    return {"x": weight, "tied": weight.detach(), "y": weight.float() * 2}


def test_a_staging_buffer_waits_for_the_copies(gpu):
    tensors, staging = tensors_there(), StagingBuffer()
    for factor in (1, 2):
        tensors["x"].mul_(factor)
        flat = staging.pack(tensors, checksum=True)
        assert flat.num_bytes == 14016 + 28032  # bfloat16 and float32, each aligned to 64 bytes
        for name, tensor in unpack(flat).items():
            assert torch.equal(tensor, tensors[name].cpu()), name
    assert gpu.calls["synchronize"] == 2
    assert staging._memory.is_pinned()


def test_without_the_wait_old_bytes_would_go_out(gpu):
    """That the pretend GPU can show what the test before rules out."""
    tensors = {"x": torch.ones(64, dtype=torch.uint8, device="cuda")}
    slots, firsts, end = lay_out(tensors)
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=True).zero_()
    fill_slots(buffer, tensors, slots, firsts)
    assert buffer.sum() == 0
    torch.cuda.synchronize()
    assert buffer.sum() == 64


def test_a_buffer_of_host_tensors_becomes_page_locked_when_a_gpu_s_come(gpu):
    staging = StagingBuffer()
    staging.pack({"x": torch.ones(16)})
    assert not staging._memory.is_pinned()
    staging.pack({"x": torch.ones(16, device="cuda")})
    assert staging._memory.is_pinned()


def test_modules_there_are_copied_into_and_never_aliased(gpu):
    module, loader = Module(), ModuleLoader(alias=True)
    for tensor in module.own_tensors().values():
        tensor.data = tensor.data.cuda()
    for value in (3, 4):
        loader.load(module, flat_of(value))
        assert not loader.is_aliased and values(module) == (value, value + 1)
        assert differing(module, flat_of(value)) == []
        assert all(tensor.is_cuda for tensor in module.own_tensors().values())
    assert differing(module, flat_of(9)) != []


def test_the_process_that_made_the_memory_cannot_open_it(gpu):
    snapshot = CudaIpcTransport().export(tensors_there())
    with pytest.raises(TicketError, match="CUDA IPC: .*invalid resource handle"):
        snapshot.memory.attach()
    with pytest.raises(TicketError, match="GPU-far must be among"):
        CudaMemory("key", "GPU-far", snapshot.memory.arguments).attach()


def _read_there(pipe):
    """A process on the same GPU that reads snapshots and sends what it found."""
    pretend.install()
    receiver, found = WeightsReceiver(get=get_itself), {}
    while (weights := pipe.recv()) is not None:
        receiver.receive(weights, lambda flat: found.update(
            {name: (tensor.is_cuda, tensor.clone().cpu()) for name, tensor in unpack(flat).items()}
        ))  # fmt: skip
        pipe.send(found)


@pytest.mark.slow
def test_another_process_on_the_gpu_reads_bit_for_bit(gpu):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_read_there, args=(there,), daemon=True)
    process.start()
    exporter, tensors = CudaIpcTransport(), tensors_there()
    for version in range(4):
        tensors["x"].add_(1)
        here.send(published(version, exporter.export(tensors)))
        assert here.poll(120), "the other process ended or hangs"
        found = here.recv()
        for name, tensor in tensors.items():
            is_cuda, read = found[name]
            assert is_cuda and torch.equal(read, tensor.cpu()), name
    here.send(None)
    process.join(60)
    assert process.exitcode == 0
