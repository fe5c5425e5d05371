"""Gradients summed over learners in buckets, in two processes of gloo, while passes go on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rllib_llm.learners.sharding import GradientSums, buckets
from rllib_llm.modules.precision import ComputingCopy

SHAPES = ((3, 4), (1,), (50,), (2, 2), (7,))


def _params(rank: int) -> list[nn.Parameter]:
    """The fourth has no gradient in rank 1; the second's is transposed in memory."""
    params = []
    for number, shape in enumerate(SHAPES):
        param = nn.Parameter(torch.zeros(shape))
        grad = torch.arange(param.numel(), dtype=torch.float32).view(shape) + 100 * number + rank
        param.grad = grad.t().contiguous().t() if number == 0 else grad
        params.append(param)
    if rank == 1:
        params[3].grad = None
    return params


class _Watched(torch.autograd.Function):
    """The identity, whose backward pass calls a function."""

    @staticmethod
    def forward(ctx, inputs: Tensor, seen: Callable[[], None]) -> Tensor:
        ctx.seen = seen
        return inputs.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen()
        return grad, None


class _Model(nn.Module):
    """Tied embeddings, a frozen layer, one of two experts, and a head that some passes leave out;
    the first layer's backward pass comes before that of the embedding alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.first, self.frozen, self.second = (nn.Linear(8, 8) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)
        self.frozen.requires_grad_(False)
        self.seen: Callable[[], None] = lambda: None
        self.is_checkpointed = False

    def layers(self, states: Tensor, expert: int) -> Tensor:
        states = _Watched.apply(states, lambda: self.seen())
        states = self.frozen(torch.tanh(self.first(states)))
        return self.experts[expert](torch.tanh(self.second(states)))

    def forward(self, ids: Tensor, expert: int, with_head: bool) -> Tensor:
        states = self.embedding(ids)
        if self.is_checkpointed:
            states = checkpoint(self.layers, states, expert, use_reentrant=True)
        else:
            states = self.layers(states, expert)
        loss = (states @ self.embedding.weight.t()).square().sum()
        return loss + self.head(states).sum() if with_head else loss


WAYS = ("plain", "repeated", "copies", "checkpoints")


def _gradients(rank: int, way: str, begins: bool) -> tuple[list[Tensor], list[int]]:
    """The sums over both ranks of two passes; how many buckets were sent whenever the last one
    reached the first layer."""
    model = computing = _Model()
    params = [param for param in model.parameters() if param.requires_grad]
    if way == "copies":
        computing = ComputingCopy(model, torch.bfloat16).model
    computing.is_checkpointed = way == "checkpoints"
    sums, num_sent = GradientSums(params, bucket_bytes=64), []

    def passes(runs_out: bool) -> None:
        for param in params:
            param.grad = None

        def seen() -> None:
            num_sent.append(sums.num_sent)
            if runs_out:
                raise torch.OutOfMemoryError

        for number in range(2):
            ids = torch.arange(4) + 2 * rank + number
            # In the last pass neither the head nor one rank's expert gets a gradient.
            loss = computing(ids, expert=rank, with_head=number == 0)
            with sums.during(loss) if number and begins else nullcontext():
                computing.seen = seen if number and begins else computing.seen
                loss.backward()
        computing.seen = lambda: None

    if way == "repeated" and begins:
        with pytest.raises(torch.OutOfMemoryError):
            passes(runs_out=rank == 0)
            raise torch.OutOfMemoryError  # the other has memory, and waits
        computing.seen = lambda: None
    if way != "repeated" or rank == 0 or not begins:
        passes(runs_out=False)
    sums.finish()
    return [param.grad for param in params], num_sent


def _in_process(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    params = _params(rank)
    GradientSums(params, 64).finish()
    found = {"set": [param.grad for param in params]}
    for way in WAYS:
        found[way] = [_gradients(rank, way, begins) for begins in (True, False)]
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of both processes."""
    folder = tmp_path_factory.mktemp("sums")
    torch.multiprocessing.spawn(_in_process, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow  # processes of their own
def test_every_learner_gets_the_sum_of_both(found):
    other = _params(1)
    other[3].grad = torch.zeros(2, 2)
    expected = [one.grad + two.grad for one, two in zip(_params(0), other, strict=True)]
    for rank in range(2):
        for grad, total, param in zip(found[rank]["set"], expected, _params(0), strict=True):
            assert torch.equal(grad, total)
            assert grad.stride() == param.grad.stride()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_sums_that_begin_during_the_last_pass_are_the_sums_after_it(found, way):
    """Bit for bit, as they are cut alike: after a pass that memory ended, too, with copies that
    compute, and where the graph does not show what gets a gradient. In the last pass the head, one
    of two experts and whatever is frozen get none."""
    for of_rank in found:
        (overlapped, num_sent), (after, _) = of_rank[way]
        for one, other in zip(overlapped, after, strict=True):
            assert torch.equal(one, other)
        # Nine buckets; of the embedding and of the first layer nothing can be sent before.
        assert num_sent and (num_sent[-1] == 0) == (way == "checkpoints"), num_sent
    for one, other in zip(found[0][way][0][0], found[1][way][0][0], strict=True):
        assert torch.equal(one, other)


def test_a_bucket_ends_where_it_is_full_or_the_dtype_changes():
    params = _params(0)
    params[4].data, params[4].grad = torch.zeros(7, dtype=torch.bfloat16), None
    sizes = [[param.numel() for param in bucket] for bucket in buckets(params, 64)]
    assert sizes == [[12, 1, 50], [4], [7]]  # 52 bytes are less than 64, 252 are more
