"""The pretend GPU itself: what it refuses, what it counts, what it has not done yet."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.nn import functional as F

from rllib_llm.engines.decode_step import CudaGraph
from tests.device import pretend


def test_numbers_are_the_processor_s(gpu):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 3, generator=generator), torch.randn(5, 3, generator=generator)
    x_there, w_there = x.to("cuda"), w.to("cuda:0").requires_grad_()
    loss = F.linear(x_there, w_there).logsumexp(-1).sum()
    loss.backward()
    w.requires_grad_()
    F.linear(x, w).logsumexp(-1).sum().backward()
    assert x_there.device == torch.device("cuda", 0) and x_there.is_cuda
    assert torch.equal(w_there.grad.cpu(), w.grad)
    assert loss.dtype == torch.float32 and loss.device.type == "cuda"


def test_factories_make_tensors_there(gpu):
    made = [
        torch.zeros(2, device="cuda"), torch.arange(3, device="cuda"),
        torch.tensor([1.0], device="cuda:0"), torch.full((2,), 7, device=torch.device("cuda")),
        torch.ones(3, device="cuda").new_zeros(2),
    ]  # fmt: skip
    assert {tensor.device for tensor in made} == {torch.device("cuda", 0)}
    assert made[1].tolist() == [0, 1, 2]


REFUSED = {
    "a sum with the host": lambda x: x + torch.ones(3),
    "a product": lambda x: torch.ones(2, 3) @ x,
    "an index on the host's tensor": lambda x: torch.ones(3)[x.long()],
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
    "where": lambda x: x.where(torch.ones(3, dtype=torch.bool), 0.0),
    "stack": lambda x: torch.stack([x.sum(), torch.tensor(1.0)]),
    "cat": lambda x: torch.cat([x, torch.ones(3)]),
    "equal": lambda x: torch.equal(x, torch.ones(3)),
    "another device": lambda x: x.to("cuda:1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cuda_refuses_is_refused(what, gpu):
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError):
        REFUSED[what](x)


def test_numpy_is_refused_and_numbers_of_the_host_may_go_along(gpu):
    x = torch.ones(3, device="cuda")
    with pytest.raises(TypeError, match="Use Tensor.cpu"):
        x.numpy()
    assert (x * torch.tensor(2.0) + 1).tolist() == [3.0] * 3
    assert x[torch.tensor([0, 2])].tolist() == [1.0] * 2  # the host's index


def test_modules_move_there_and_back_with_their_ties(gpu):
    embedding, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, head)
    before = model.state_dict()["0.weight"].clone()
    model.to("cuda")
    assert model[0].weight is model[1].weight and model[0].weight.is_cuda
    assert isinstance(model[0].weight, torch.nn.Parameter)
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight and twin[0].weight is not model[0].weight
    assert pickle.loads(pickle.dumps(model[0].weight)).tolist() == before.tolist()
    model.to("cpu")
    assert torch.equal(model[1].weight, before) and not model[0].weight.is_cuda


def test_transfers_are_counted(gpu):
    x = torch.ones(3).to("cuda")
    assert gpu.counted() == {"to_device": 1}
    float(x.sum())
    x.cpu()
    x.tolist()
    assert gpu.counted() == {"to_device": 1, "to_host": 3}
    x[x > 0]
    x.nonzero()
    assert gpu.counted()["wait"] == 2
    (x * 2).sum()  # nothing leaves the device
    assert sum(gpu.counted().values()) == 6


def test_copies_to_page_locked_memory_arrive_when_they_are_waited_for(gpu):
    x = torch.ones(3, device="cuda")
    pinned = torch.empty(3, pin_memory=True).zero_()
    assert pinned.is_pinned() and not torch.empty(3).is_pinned()
    pinned.copy_(x, non_blocking=True)
    assert pinned.tolist() == [0.0] * 3
    torch.cuda.synchronize()
    assert pinned.tolist() == [1.0] * 3


def test_a_graph_computes_when_it_is_replayed(gpu):
    x = torch.zeros(2, device="cuda")
    seen = torch.zeros(2, device="cuda")

    def run():
        seen.add_(1)
        return (x * 2 + torch.arange(2, device="cuda")).reshape(2)

    graph = CudaGraph(run, None, torch.device("cuda", 0))
    assert seen.tolist() == [1.0] * 2  # the call before the capture
    x.fill_(3)
    assert graph.replay().tolist() == [6.0, 7.0]
    x.fill_(4)
    assert graph.replay().tolist() == [8.0, 9.0] and seen.tolist() == [3.0] * 2
    assert gpu.calls["capture"] == 1 and gpu.calls["replay"] == 2


WAITS = {
    "item": lambda x: x.sum().item(),
    "a mask": lambda x: x[x > 0],
    "a copy to the host": lambda x: x.cpu(),
    "a copy from the host": lambda x: x + torch.ones(2).to("cuda"),
    "nonzero": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_graph_may_not_wait_for_the_device(what, gpu):
    x = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        CudaGraph(lambda: WAITS[what](x), None, torch.device("cuda", 0))


def test_memory_runs_out(gpu):
    gpu.largest_tensor = 1000
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1001, dtype=torch.uint8, device="cuda")


def test_it_is_gone_afterwards():
    with pretend.gpu():
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert not torch.cuda.is_available()
    assert torch.inference_mode.__module__.startswith("torch.")
    x = torch.nn.Parameter(torch.ones(2))
    x.data = torch.zeros(2)
    assert x.tolist() == [0.0, 0.0]
    x.sum().backward()
    with torch.random.fork_rng():
        torch.manual_seed(1)
