"""Parameters that are spread over several learners (FSDP2's DTensors): reading and writing them.

Whatever is no shard passes through unchanged, so that callers need not ask.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Name = TypeVar("Name", bound=Hashable)


def is_sharded(module: nn.Module) -> bool:
    """Whether some of its parameters are shards."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def gather(tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
    """The tensors, detached; shards are put together on the CPU of the first learner.

    With shards all learners must call it at the same time, and all but the first get {}: each
    tensor is whole on every learner for a moment, the model on one alone. Tied tensors stay one.
    """
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    keep = not sharded or torch.distributed.get_rank() == 0
    whole: dict[int, Tensor] = {}
    gathered: dict[Name, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in whole:
            full = _full(tensor)
            whole[id(tensor)] = full if keep else full.new_empty(0)
        if keep:
            gathered[name] = whole[id(tensor)]
    return gathered


def own_parts(tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
    """This learner's parts of the tensors, detached, sharing their memory; what is no shard is left
    to the first learner. Without communication. Parts of all learners, in the order of their ranks,
    are the tensor along its first dimension."""
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    is_first = not sharded or torch.distributed.get_rank() == 0
    return {
        name: local_data(tensor).detach()
        for name, tensor in tensors.items()
        if is_first or isinstance(tensor, DTensor)
    }


def _full(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        full = tensor.detach().full_tensor()
        return full.cpu() if torch.distributed.get_rank() == 0 else full
    return tensor.detach()


def local_data(tensor: Tensor) -> Tensor:
    """This learner's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def write_(target: Tensor, source: Tensor) -> None:
    """Copies the whole tensor `source` into `target`, or into this learner's part of it."""
    if isinstance(target, DTensor):
        target.to_local().copy_(shard_like(source, target).to_local())
    elif source.data_ptr() != target.data_ptr():
        target.copy_(source)


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """A copy of `whole`, which every learner has, cut as `like` is, without communication."""
    if not isinstance(like, DTensor):
        return whole.clone()
    return distribute_tensor(
        whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
