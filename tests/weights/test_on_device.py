"""Weights on the learner's device: read where they lie, never half of two versions.

Memory shared between processes stands for a device's, but in the last test.
"""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import pytest
import ray
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rllib_llm.weights.direct import (
    CudaIpcTransport,
    CudaMemory,
)
from rllib_llm.weights.flat_buffer import FlatBuffer, TicketError, unpack
from rllib_llm.weights.loading import ModuleLoader
from rllib_llm.weights.published import PublishedWeights, WeightsLostError
from rllib_llm.weights.publisher import WeightsPublisher
from rllib_llm.weights.receiver import WeightsReceiver
from tests.algorithms.tiny_runs import ppo
from tests.learners import tiny_learners
from tests.weights.test_broadcast import LocalGroup


@dataclass(frozen=True)
class HostMemory:
    """Memory of the host by its system-wide name."""

    key: str

    def attach(self):
        memory = SharedMemory(self.key)
        memories.append(memory)
        return torch.frombuffer(memory.buf, dtype=torch.uint8)


memories = []  # of this process, for as long as it lives


def allocate(num_bytes, device):
    memory = SharedMemory(create=True, size=num_bytes)
    memories.append(memory)
    memory.unlink_later = True
    return torch.frombuffer(memory.buf, dtype=torch.uint8)[:num_bytes], HostMemory(memory.name)


@pytest.fixture(autouse=True)
def no_memory_left():
    yield
    for memory in memories:
        if hasattr(memory, "unlink_later"):
            memory.unlink()
    memories.clear()


class Module:
    """Two tied names and a weight."""

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.head = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16), requires_grad=False)

    def own_tensors(self):
        return {"weight": self.weight, "embedding": self.head, "head": self.head}

    def set_state(self, state):
        for name, tensor in self.own_tensors().items():
            tensor.copy_(state[name])


def tensors_of(value):
    head = torch.full((5,), float(value + 1), dtype=torch.bfloat16)
    return {"weight": torch.full((4, 3), float(value)), "embedding": head, "head": head}


class Sampler:
    """Loads what it is told to, in whichever process."""

    def __init__(self, get=ray.get):
        self.module, self.loader = Module(), ModuleLoader(alias=True)
        self.receiver = WeightsReceiver(get=get)

    def receive(self, published):
        self.receiver.receive(published, lambda flat: self.loader.load(self.module, flat))
        return float(self.module.weight.sum()), self.module.head.tolist()


def published(version, snapshot):
    """The snapshot in place of its reference."""
    return PublishedWeights(version, ref=(snapshot,))


def get_itself(snapshot, timeout):
    return pickle.loads(pickle.dumps(snapshot))


@pytest.mark.slow  # processes of their own
def test_another_process_reads_every_version_where_it_lies(ray_session):
    exporter = CudaIpcTransport(allocate)
    sampler = ray.remote(Sampler).options(num_cpus=0).remote()
    for version in range(4):
        snapshot = exporter.export(tensors_of(version))
        assert snapshot.num_bytes == 128  # 48 bytes and 10, tied ones once, aligned
        weights = PublishedWeights(version, ref=(ray.put(snapshot),))
        total, head = ray.get(sampler.receive.remote(weights))
        assert (total, head) == (12.0 * version, 5 * [version + 1.0])


def test_each_buffer_is_mapped_once_and_only_two_are_kept():
    exporter, reader = CudaIpcTransport(allocate), CudaIpcTransport(allocate)
    for version in range(6):
        with reader.open(exporter.export(tensors_of(version))) as flat:
            assert isinstance(flat, FlatBuffer)
            assert float(unpack(flat)["weight"][0, 0]) == version
    assert len(memories) == 4  # two by either side
    larger = {"weight": torch.ones(100)}
    for _ in range(2):
        with reader.open(exporter.export(larger)) as flat:
            assert float(unpack(flat)["weight"].sum()) == 100
    assert len(memories) == 8
    assert len(reader._attached) == 2


def test_a_snapshot_is_gone_after_two_more():
    exporter, sampler = CudaIpcTransport(allocate), Sampler(get_itself)
    first = exporter.export(tensors_of(1))
    exporter.export(tensors_of(2))
    assert sampler.receive(published(1, first)) == (12.0, 5 * [2.0])
    exporter.export(tensors_of(3))
    with pytest.raises(WeightsLostError, match="weights 7 .* was written over"):
        sampler.receive(published(7, first))
    assert sampler.receiver.metrics()["failures/TicketError"] == 1


def test_weights_written_over_while_they_are_copied_are_loaded_again():
    exporter, sampler = CudaIpcTransport(allocate), Sampler(get_itself)
    weights = published(1, exporter.export(tensors_of(1)))
    assert sampler.receive(weights) == (12.0, 5 * [2.0])
    torn = published(2, exporter.export(tensors_of(2)))

    def load_slowly(flat):
        sampler.loader.load(sampler.module, flat)
        exporter.export(tensors_of(3))
        exporter.export(tensors_of(4))

    with pytest.raises(WeightsLostError, match="snapshot 2 was written over"):
        sampler.receiver.receive(torn, load_slowly)
    assert sampler.receiver.version == -1  # what it holds counts for nothing
    newest = published(3, exporter.export(tensors_of(5)))
    assert sampler.receive(newest) == (60.0, 5 * [6.0])


def test_what_was_published_can_be_compared_with():
    exporter, sampler = CudaIpcTransport(allocate), Sampler(get_itself)
    sampler.receive(published(1, exporter.export(tensors_of(1))))
    copy = sampler.receiver.published_bytes()
    exporter.export(tensors_of(2))
    exporter.export(tensors_of(3))
    assert float(unpack(copy)["weight"].sum()) == 12.0


def test_a_device_that_this_process_does_not_see_is_named():
    with pytest.raises(TicketError, match="GPU-far must be among"):
        CudaMemory("key", "GPU-far", ()).attach()
    # The one argument that is replaced, for processes number devices in their own way.
    assert "storage_device" in inspect.signature(rebuild_cuda_tensor).parameters


def test_a_learner_without_a_device_says_so_and_the_store_takes_over(ray_session):
    learner = tiny_learners.build(ppo())
    publisher = WeightsPublisher(LocalGroup(learner), shared_module=False, transport="cuda_ipc")
    with pytest.raises(ValueError, match="'cpu'.* Or set num_gpus_per_learner"):
        publisher.publish(1)
    for published_anew in (publisher.publish_again("no GPU"), publisher.publish(2)):
        assert isinstance(ray.get(published_anew.ref[0]), FlatBuffer)


def _read_on_cuda(pipe):
    """A process that reads snapshots on its own and sends what it found."""
    receiver, found = WeightsReceiver(get=get_itself), {}
    while (weights := pipe.recv()) is not None:
        receiver.receive(weights, lambda flat: found.update(
            {name: tensor.clone().cpu() for name, tensor in unpack(flat).items()}
        ))  # fmt: skip
        pipe.send(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_process_on_the_same_gpu_reads_bit_for_bit():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_read_on_cuda, args=(there,), daemon=True)
    process.start()
    exporter = CudaIpcTransport()
    torch.manual_seed(0)
    for version in range(5):
        weight = torch.randn(1000, 7, device="cuda").bfloat16()
        snapshot = exporter.export({"x": weight, "tied": weight.detach(), "y": weight.float() * 2})
        here.send(published(version, snapshot))
        assert here.poll(120), "the other process ended or hangs"
        found = here.recv()
        assert torch.equal(found["tied"].view(torch.int16), weight.cpu().view(torch.int16))
        assert torch.equal(found["y"], weight.cpu().float() * 2)
    here.send(None)
    process.join(60)
    assert process.exitcode == 0
