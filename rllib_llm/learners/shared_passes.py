"""How rows are shared among learners, cut into micro-batches and passed through the model.

    whole batch ─▶ this learner's rows ─▶ micro-batches ─▶ `forward`

A learner's shares are a function of the batch, which all learners have: they need not ask.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner

from rllib_llm.learners.batching import (
    balanced_shares,
    even_micro_batches,
    micro_batch_indices,
    restore_rows,
    row_lengths,
    take_rows,
    trim,
)
from rllib_llm.modules.logprobs import ReferencePolicy
from rllib_llm.modules.lora import adapters_off, has_adapters
from rllib_llm.modules.precision import multiplies_by_onednn, warn_of_emulation
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.modules.rl_modules import CausalLMModule
from rllib_llm.shared import columns

if TYPE_CHECKING:
    from rllib_llm.learners.sharding import ShardedModule

Batch = dict[str, torch.Tensor]
Result = TypeVar("Result")


class SharedPasses(TorchLearner):
    """Forward passes over this learner's share of a batch."""

    _sharded: ShardedModule | None = None  # with the strategy "fsdp"
    _passes_names = True  # whether the module is given the names of needed outputs
    _num_parts = 1  # that each micro-batch is cut into, more where memory did not suffice

    # --- learners ----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank() if self.distributed else 0

    @property
    def world_size(self) -> int:
        return torch.distributed.get_world_size() if self.distributed else 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over all learners, in place."""
        if self.distributed:
            torch.distributed.all_reduce(tensor)
        return tensor

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are sharded over learners."""
        return self._sharded is not None

    # --- the model ---------------------------------------------------------------------------

    def _make_modules_ddp_if_necessary(self) -> None:
        """Modules stay bare: gradients are summed once per optimiser step, in its last backward
        pass (`GradientSums`), whatever losses and micro-batches there are before."""

    def _map_module_to_device(self, module) -> None:
        ours = module[DEFAULT_MODULE_ID].unwrapped()
        # A user's own may read outputs that the learner does not ask for.
        defines = next(one for one in type(ours).__mro__ if "_forward_train" in vars(one))
        self._passes_names = defines is CausalLMModule
        if not (self.distributed and self.config.learner_strategy == "fsdp"):
            super()._map_module_to_device(module)
            ours.make_computing_copies()
            warn_of_emulation(ours.computing_dtype, self._device)
            return
        from rllib_llm.learners.sharding import shard_module  # few runs need it

        self._sharded = shard_module(
            ours, torch.device(self._device), param_dtype=ours.computing_dtype
        )

    def forward(self, micro_batch: Batch, **options: Any) -> Batch:
        """`forward_train` of the module. With shards, all learners call it equally often."""
        if self._sharded is None:
            return self.module[DEFAULT_MODULE_ID].unwrapped().forward_train(micro_batch, **options)
        outputs = self._sharded(micro_batch, **options)
        if not torch.is_grad_enabled():
            # No backward pass will do it, and what is gathered now would be used after the step.
            self._sharded.reshard()
        return outputs

    # --- micro-batches -----------------------------------------------------------------------

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """This learner's rows of `batch`, cut into micro-batches without dead padding."""
        for rows in self.micro_batch_rows(batch):
            yield trim(take_rows(batch, rows))

    def micro_batch_rows(self, batch: Batch, rank: int | None = None) -> list[torch.Tensor]:
        """Row indices of each micro-batch of this learner, or of another."""
        lengths = row_lengths(batch)
        rank = self.rank if rank is None else rank
        size, budget = self.config.micro_batch_size, self.config.micro_batch_tokens
        cuts = {"micro_batch_size": size, "token_budget": budget}
        if self.is_sharded:  # the layers of each micro-batch are gathered from all learners
            return even_micro_batches(lengths, self.world_size, **cuts)[rank]
        mine = balanced_shares(lengths, self.world_size)[rank]
        if len(mine) == 0:
            return []
        indices = micro_batch_indices(lengths[mine], **cuts)
        return [mine[part] for index in indices for part in index.chunk(self._num_parts)]

    def in_memory(self, run: Callable[[], Result], batch: Batch) -> Result:
        """Returns `run()`, which makes passes over the micro-batches of `batch`; it is called again
        with micro-batches of half as many rows whenever a GPU runs out of memory.

        Raises:
            torch.OutOfMemoryError: a row is too much, or there are shards, whose passes all
                learners have to make equally often.
        """
        while True:
            try:
                return run()
            except torch.OutOfMemoryError:
                rows = max(len(part) for part in self.micro_batch_rows(batch))
                if rows == 1 or self.is_sharded:
                    raise
            # Out of the handler, since what was raised holds on to the tensors.
            self._num_parts *= 2
            warnings.warn(
                f"{rows} rows at once do not fit into the GPU's memory: micro-batches are cut into "
                f"{self._num_parts} from now on, which changes speed only. micro_batch_tokens or "
                "micro_batch_size says so from the start.", stacklevel=2,
            )  # fmt: skip
            torch.cuda.empty_cache()

    def idle_rounds(self, batch: Batch) -> Iterator[Batch]:
        """The shortest row of `batch`, as often as another learner has more micro-batches of it.

        Nothing is learnt from it: the weights' shards are gathered by all learners or none.
        All know the whole batch, so they need not ask.
        """
        if self._sharded is None:
            return
        counts = [len(self.micro_batch_rows(batch, rank)) for rank in range(self.world_size)]
        shortest = row_lengths(batch).argmin().reshape(1)
        for _ in range(max(counts) - counts[self.rank]):
            yield trim(take_rows(batch, shortest))

    @torch.no_grad()
    def evaluated(self, batch: Batch, **options: Any) -> Iterator[tuple[Batch, Batch]]:
        """(micro-batch, outputs) for this learner's rows, without gradient."""
        for micro_batch in self.micro_batches(batch):
            yield micro_batch, self.forward(micro_batch, **options)
        for idle in self.idle_rounds(batch):
            self.forward(idle, **options)

    @torch.no_grad()
    def evaluate_rows(self, batch: Batch, names: list[str], **options: Any) -> Batch:
        """Outputs [B, T] of all rows of completions, without gradient; each row is computed by one
        learner. Only those called `names` are computed, unless the module's class is a user's own
        that overrides `_forward_train`."""
        if self._passes_names:
            options["names"] = names

        def passes() -> list[Batch]:
            return [outputs for _, outputs in self.evaluated(batch, **options)]

        outputs = self.in_memory(passes, batch)
        rows = self.micro_batch_rows(batch)
        like = batch[columns.COMPLETION_MASK]

        def whole(name: str) -> torch.Tensor:
            empty = torch.zeros(like.shape, device=like.device)
            return restore_rows(empty, [out[name] for out in outputs], rows)

        return {name: self.all_reduce(whole(name)) for name in names}


# --- dropout ------------------------------------------------------------------------------------


@contextmanager
def seeded_dropout(
    config: Any, num_updates: int, rank: int, num_batches: int = 0
) -> Iterator[None]:
    """Seeds torch for one update of one learner, where adapters have dropout; the global random
    state is untouched. All other dropout is off here. `num_batches`: that have added gradients to
    this update before."""
    if not (config.lora or {}).get("dropout"):
        yield
        return
    with torch.random.fork_rng():
        place = num_updates + num_batches * 1_000_000_007
        torch.manual_seed(((config.seed or 0) * 1_000_003 + place) * 1_009 + rank)
        yield


# --- a reference that a learner owns ------------------------------------------------------------


def own_reference(learner: Any, *, copy: bool) -> ReferencePolicy:
    """The policy's trunk with its adapters off, or a `copy` of what training started from.

    The copy is neither trained, nor published, nor kept in checkpoints: the learner holds it as a
    plain attribute. With the strategy "fsdp" its layers are spread over the learners, too.
    """
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    model = module.computing_model
    if not copy:
        assert has_adapters(model), "only a policy under adapters contains its reference"
        return ReferencePolicy(model, functools.partial(adapters_off, model))
    return ReferencePolicy(frozen_policy(learner, learner.config.pretrained_model))


def frozen_policy(
    learner: Any, source: Any, *, quantization: str = "none", dtype: str | None = None,
    device: Any = None,
) -> Any:  # fmt: skip
    """A causal language model that is not trained, on the policy's device, where its products are
    the policy's; with the strategy "fsdp" its layers are spread over the learners.

    dtype: None: that in which the policy computes.
    """
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    from rllib_llm.modules.frozen import load_quantized  # samplers do without

    model = module.computing_model
    policy_device = torch.device(device or next(model.parameters()).device)
    first = torch.device("cpu") if learner.is_sharded else policy_device
    frozen = load_quantized(
        load_causal_lm, source, quantization=quantization, device=first,
        dtype=dtype or module.computing_dtype or learner.config.dtype,
        products="onednn" if multiplies_by_onednn(model) else "mkl",  # equal weights, equal numbers
    )  # fmt: skip
    if learner.is_sharded:
        from rllib_llm.learners.sharding import shard_reference  # few runs need it

        shard_reference(frozen, policy_device)
    return frozen
