"""Gradients summed over learners in buckets, in two processes of gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from rllib_llm.learners.sharding import _buckets, sum_gradients_

SHAPES = ((3, 4), (1,), (50,), (2, 2), (7,))


def _params(rank: int) -> list[torch.nn.Parameter]:
    """The fourth has no gradient in rank 1; the second's is transposed in memory."""
    params = []
    for number, shape in enumerate(SHAPES):
        param = torch.nn.Parameter(torch.zeros(shape))
        grad = torch.arange(param.numel(), dtype=torch.float32).view(shape) + 100 * number + rank
        param.grad = grad.t().contiguous().t() if number == 0 else grad
        params.append(param)
    if rank == 1:
        params[3].grad = None
    return params


def _sum(rank: int, folder: str, bucket_bytes: int) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    params = _params(rank)
    sum_gradients_(params, bucket_bytes)
    torch.save([param.grad for param in params], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow  # processes of their own
def test_every_learner_gets_the_sum_of_both(tmp_path):
    torch.multiprocessing.spawn(_sum, (str(tmp_path), 64), nprocs=2)
    other = _params(1)
    other[3].grad = torch.zeros(2, 2)
    expected = [one.grad + two.grad for one, two in zip(_params(0), other, strict=True)]
    for rank in range(2):
        for grad, total in zip(torch.load(tmp_path / f"{rank}.pt"), expected, strict=True):
            assert torch.equal(grad, total)


def test_a_bucket_ends_where_it_is_full_or_the_dtype_changes():
    params = _params(0)
    params[4].data, params[4].grad = torch.zeros(7, dtype=torch.bfloat16), None
    sizes = [[grad.numel() for grad in bucket] for bucket in _buckets(params, 64)]
    assert sizes == [[12, 1, 50], [4], [7]]  # 52 bytes are less than 64, 252 are more
