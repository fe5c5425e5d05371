"""How learners share weights and gradients. FSDP2: weights, gradients and optimiser are spread over
them, and a layer is gathered at a time.

    layer i's shards ─ gather ─▶ forward ─▶ free        (again in the backward pass)
    layer i's gradient ─ sum over learners ─▶ each keeps its shard

Gathering takes every learner, so all must run the same number of forward and backward passes:
`LanguageModelLearner.idle_rounds` sees to that. Gradients are summed, not averaged: losses here are
sums over global denominators. Where each learner holds all weights, `GradientSums` does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from rllib_llm.learners.optimizer import buckets
from rllib_llm.modules.multimodal import other_parts
from rllib_llm.modules.precision import trained_weight
from rllib_llm.modules.rl_modules import ValueHead
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
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    towers = {id(part) for model in models for name in other_parts(model)
              for part in model.get_submodule(name).modules()}  # fmt: skip
    # These checks run the models, so before all learners have to take part in it.
    for model in models:
        if model.get_output_embeddings() is not None:
            take_apart(model)
        elif model.base_model is model and id(model) not in towers:  # which read no tokens
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


class GradientSums:
    """Sums the gradients of one optimiser step over all learners that hold all weights, in place.

        last backward pass    layer n ──▶ ... ──▶ layer 1 ──▶ embedding
        all-reduce                └─ bucket n ─▶ ...  └─ bucket 1 ─▶ ...  `finish`

    Buckets are sent in the same order by all learners, from the last to the first, each in the
    last backward pass once its gradients are there; `finish` sends the rest. A parameter without a
    gradient counts as zero: this learner had no rows, or never uses it. The sums lie in the
    buckets, of which `param.grad` are views, so that no gradient is held twice.
    """

    def __init__(self, params: list[nn.Parameter], bucket_bytes: int = _BUCKET_BYTES) -> None:
        self._unsent = list(buckets(params, bucket_bytes))
        self._place = {id(p): i for i, bucket in enumerate(self._unsent) for p in bucket}
        self._num_to_come: Counter[int] = Counter()  # gradients of each bucket in this pass
        self._sent: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # with its gradient and the sum
        self._works: list[Any] = []

    @property
    def num_sent(self) -> int:
        """Buckets that were sent so far."""
        return len(self._works)

    @contextmanager
    def during(self, loss: Tensor) -> Iterator[None]:
        """Sends buckets in the backward pass of `loss`, the last that adds gradients.

        If that pass fails for lack of memory, all passes may be repeated: buckets that were sent
        hold whole gradients, and are not sent again.
        """
        found = ((leaf, self._place.get(id(trained_weight(leaf)))) for leaf in _leaves(loss))
        leaves = [(leaf, place) for leaf, place in found if place is not None]
        self._num_to_come = Counter(place for _, place in leaves)
        num_unsent = len(self._unsent)

        def arrived(leaf: Tensor, place: int) -> None:
            if place >= num_unsent:  # sent in a pass that failed later
                trained_weight(leaf).grad = None
                return
            assert place < len(self._unsent), "a gradient arrived after its bucket was sent"
            self._num_to_come[place] -= 1
            self._send_full()

        hooks = [
            leaf.register_post_accumulate_grad_hook(partial(arrived, place=place))
            for leaf, place in leaves
        ]
        try:
            if leaves:
                self._send_full()
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> None:
        """Sends what was not sent, and waits for all sums."""
        while self._unsent:
            self._send_next()
        for work in self._works:
            work.wait()
        for param, grad, total in self._sent:
            param.grad = grad if grad is total else grad.copy_(total)

    def _send_full(self) -> None:
        while self._unsent and not self._num_to_come[len(self._unsent) - 1]:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._unsent[-1]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        alone = len(grads) == 1 and grads[0].is_contiguous()
        flat = grads[0].view(-1) if alone else torch.cat([grad.reshape(-1) for grad in grads])
        self._works.append(torch.distributed.all_reduce(flat, async_op=True))
        self._unsent.pop()  # memory may have run out before
        parts = flat.split([grad.numel() for grad in grads])
        for param, grad, part in zip(bucket, grads, parts, strict=True):
            total = part.view(grad.shape)
            # Fused optimisers read a gradient that lies in memory as its weight does.
            param.grad = total if grad.is_contiguous() else grad
            self._sent.append((param, param.grad, total))


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that get a gradient from the backward pass of `loss`; [] where that cannot be
    known, since parts of the graph are made in the pass (checkpoints that are re-entrant)."""
    nodes, seen, leaves = [loss.grad_fn], {None}, []
    while nodes:
        if (node := nodes.pop()) in seen:
            continue
        seen.add(node)
        if type(node).__name__.startswith("CheckpointFunction"):
            return []
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves
