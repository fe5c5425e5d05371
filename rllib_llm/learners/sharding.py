"""FSDP2: weights, gradients and optimiser spread over the learners, a layer gathered at a time.

    layer i's shards ─ gather ─▶ forward ─▶ free        (again in the backward pass)
    layer i's gradient ─ sum over learners ─▶ each keeps its shard

Gathering takes every learner, so all must run the same number of forward and backward passes:
`LanguageModelLearner.idle_rounds` sees to that. Gradients are summed, not averaged: losses here are
sums over global denominators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from rllib_llm.modules.rl_modules import ValueHead
from rllib_llm.modules.shards import local_data, shard_like
from rllib_llm.modules.trunk import reads_dense, take_apart

_BUCKET_BYTES = 64 * 1024**2


class ShardedModule(nn.Module):
    """Root of the shards: what belongs to no layer (embeddings, norm, heads) is gathered while its
    forward runs, which is the RLModule's `forward_train`."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, batch: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        outputs = self.module.forward_train(batch, **kwargs)
        # FSDP2 hooks its gathering for the backward pass to outputs, and a view can lose the hook.
        return {name: column.clone() for name, column in outputs.items()}


def shard_module(
    module: nn.Module, device: torch.device, *, param_dtype: torch.dtype | None = None
) -> ShardedModule:
    """Shards every parameter of an RLModule over all learners, in place, and moves it to `device`.

    Layers are moved one by one: on a GPU the whole model never has to fit. All learners must hold
    the same weights.

    param_dtype: of gathered weights and thereby of the layers' arithmetic; None: their own. Shards,
        optimiser and the sum of gradients stay as they are, and float32; so do value heads.
    """
    # These checks run the models, so before all learners have to take part in it.
    for model in module.modules():
        if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None:
            take_apart(model)
        elif isinstance(model, PreTrainedModel) and model.base_model is model:
            reads_dense(model)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    # Inputs of the root are token ids and float32 columns; they must stay what they are.
    precision = MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False)
    for layer in _layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype, torch.float32))
    own_dtype = MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)
    for head in [part for part in module.modules() if isinstance(part, ValueHead)]:
        fully_shard(head, mesh=mesh, mp_policy=own_dtype)
    root = fully_shard(ShardedModule(module), mesh=mesh, mp_policy=precision)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    root.to(device)  # buffers outside the layers
    return root


def shard_reference(model: nn.Module, device: torch.device) -> None:
    """Shards the layers of a frozen model over all learners, in place, and moves it to `device`.

    What belongs to no layer (embeddings, norm, head) stays whole: it is used outside of a forward
    that could gather it. Layers are moved one by one, as by `shard_module`.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    model.to(device)


def _layers(module: nn.Module) -> list[nn.Module]:
    """The transformer layers of every Hugging Face model inside, by the names they declare."""
    names: set[str] = set()
    for model in module.modules():
        if isinstance(model, PreTrainedModel):
            names.update(model._no_split_modules or ())
    return [part for part in module.modules() if type(part).__name__ in names]


def gradient_norm(grads: list[Tensor]) -> Tensor:
    """L2 norm of all gradients, a scalar; for sharded weights over all learners."""
    if not any(local_data(grad) is not grad for grad in grads):
        return torch.nn.utils.get_total_norm(grads)
    square = torch.nn.utils.get_total_norm([local_data(grad) for grad in grads]).square()
    torch.distributed.all_reduce(square)
    return square.sqrt()


def clip_gradients_(grads: list[Tensor], norm: Tensor, limit: float) -> None:
    """Scales gradients, or shards of them, of total `norm` to at most `limit`, in place."""
    # As torch.nn.utils.clip_grad_norm_, which does not ask the device either whether it is below 1.
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local_data(grad).mul_(factor.to(grad.device))


def shard_optimizer_state(state: dict[int, Any], params: list[nn.Parameter]) -> dict[int, Any]:
    """An optimiser's whole state, by parameter number, copied and cut as its parameters are."""

    def cut(value: Any, param: nn.Parameter) -> Any:
        if isinstance(value, int):
            return value
        value = torch.as_tensor(value)
        return shard_like(value, param) if value.shape == param.shape else value.clone()

    return {
        index: {name: cut(value, params[index]) for name, value in entry.items()}
        for index, entry in state.items()
    }


def sum_gradients_(params: list[nn.Parameter], bucket_bytes: int = _BUCKET_BYTES) -> None:
    """Sums the gradients of `params` over all learners, in place, in buckets of at least
    `bucket_bytes`. A bucket is sent while the next is filled, so two are in memory at a time.

    A parameter without a gradient counts as zero: this learner had no rows, or never uses it.
    Transfers begin after the backward passes: one that memory ends is tried again in smaller parts,
    and a transfer that has begun cannot be taken back.
    """
    last = None
    for grads in _buckets(params, bucket_bytes):
        alone = len(grads) == 1 and grads[0].is_contiguous()
        flat = grads[0].view(-1) if alone else torch.cat([grad.reshape(-1) for grad in grads])
        work = torch.distributed.all_reduce(flat, async_op=True)
        if last is not None:
            _take_back(*last)
        last = work, flat, grads
    if last is not None:
        _take_back(*last)


def _buckets(params: list[nn.Parameter], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Gradients of neighbours, of one dtype and at least `bucket_bytes` but for the last."""
    bucket: list[Tensor] = []
    size = 0
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if bucket and (size >= bucket_bytes or param.grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(param.grad)
        size += param.grad.nbytes
    if bucket:
        yield bucket


def _take_back(work: Any, flat: Tensor, grads: list[Tensor]) -> None:
    work.wait()
    if flat.data_ptr() == grads[0].data_ptr():
        return
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
