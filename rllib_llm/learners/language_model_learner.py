"""What every learner here shares: mini-batches, micro-batches, one optimiser step for all learners.

    update(batch) -> prepare(batch) -> for each mini-batch:
        for each micro-batch: forward_train -> compute_loss_for_module -> backward
        sum gradients over learners -> check -> clip -> step

Every learner receives the whole batch and takes its share of each mini-batch's rows. So
advantages, whitening and loss denominators are global without communication, mini-batches are
the same however many learners there are, and no learner runs out of rows and hangs the others.
Losses are sums over global denominators: gradients are summed over micro-batches and learners.
With the strategy "ddp" each learner holds all weights, with "fsdp" a share (`sharding.py`).
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData

from rllib_llm import columns
from rllib_llm.learners.batching import (
    micro_batch_indices,
    minibatch_indices,
    minibatch_indices_by_tokens,
    row_lengths,
    take_rows,
    trim,
)
from rllib_llm.learners.metrics import WeightedMeans
from rllib_llm.learners.schedule import learning_rate_factor
from rllib_llm.learners.sharding import (
    ShardedModule,
    clip_gradients_,
    gradient_norm,
    shard_module,
    shard_optimizer_state,
)
from rllib_llm.modules.pretrained import resolve_dtype
from rllib_llm.modules.shards import gather

logger = logging.getLogger(__name__)
Batch = dict[str, torch.Tensor]

STATE_KEY = "rllib_llm"  # our share of the learner's state
MAX_CONSECUTIVE_REFUSALS = 3


class LanguageModelLearner(TorchLearner):
    """Subclasses say what a batch becomes before the update and what the loss is:

    prepare(batch): adds the columns that are computed once per update.
    start_minibatch(minibatch): sets the denominators of the losses to come (whole mini-batch).
    compute_loss_for_module(...): the loss of a micro-batch, a sum over those denominators.
    """

    def build(self) -> None:
        self.num_updates = 0  # optimiser steps taken, what schedules count in
        self.num_refused_updates = 0
        self._consecutive_refusals = 0
        self.means = WeightedMeans()
        self._sharded: ShardedModule | None = None
        super().build()

    # --- hooks -------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> Batch:
        """The whole batch with the columns that are computed once per update."""
        return batch

    def start_minibatch(self, minibatch: Batch) -> None:
        """Called with the whole mini-batch, before its micro-batches."""

    def extra_losses(self) -> Iterator[torch.Tensor]:
        """Further losses of the current mini-batch, each backpropagated by itself."""
        return iter(())

    def forward_options(self) -> dict[str, Any]:
        """Keyword arguments of the forward passes whose losses are learnt from."""
        return {}

    def should_stop(self) -> bool:
        """Whether the remaining mini-batches of this update are skipped (asked after each)."""
        return False

    def num_completions_per_group(self) -> int | None:
        """Rows that must stay in one mini-batch, or None where rows are independent."""
        return None

    # --- distribution ------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank() if self.distributed else 0

    @property
    def world_size(self) -> int:
        return torch.distributed.get_world_size() if self.distributed else 1

    def _make_modules_ddp_if_necessary(self) -> None:
        """Modules stay bare: gradients are summed once per optimiser step, after all
        micro-batches, which needs no DDP reducer and forgives unused parameters."""

    def _map_module_to_device(self, module) -> None:
        if not (self.distributed and self.config.learner_strategy == "fsdp"):
            super()._map_module_to_device(module)
            return
        autocast = self.config.autocast_dtype
        self._sharded = shard_module(
            module[DEFAULT_MODULE_ID].unwrapped(),
            torch.device(self._device),
            param_dtype=None if autocast is None else resolve_dtype(autocast),
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

    def share(self, rows: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """This learner's (or another's) part of row indices [n]: every world_size-th."""
        return rows[self.rank if rank is None else rank :: self.world_size]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over all learners, in place."""
        if self.distributed:
            torch.distributed.all_reduce(tensor)
        return tensor

    # --- optimiser ---------------------------------------------------------------------------

    def configure_optimizers_for_module(self, module_id, config=None) -> None:
        """AdamW; its learning rate is set before every step from `lr` and the schedule."""
        params = [p for p in self.get_parameters(self._module[module_id]) if p.requires_grad]
        optimizer = torch.optim.AdamW(
            params,
            lr=float(config.lr),
            betas=tuple(config.adam_betas),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.register_optimizer(module_id=module_id, optimizer=optimizer, params=params)

    def _get_optimizer_state(self) -> dict[str, Any]:
        """Whole moments as tensors on the CPU; with shards, {} at all learners but the first."""
        states = {}
        for name, optimizer in self._named_optimizers.items():
            state = optimizer.state_dict()
            tensors = gather(
                {(i, key): value for i, entry in state["state"].items()
                 for key, value in entry.items()}
            )  # fmt: skip
            whole: dict[int, dict[str, torch.Tensor]] = {}
            for (i, key), tensor in tensors.items():
                whole.setdefault(i, {})[key] = tensor.cpu()
            states[name] = {
                "module_id": self._optimizer_name_to_module[name],
                "state": {**state, "state": whole},
            }
        return states

    def _cut_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with moments of its own, and where weights are shards, their shards."""
        cut = {}
        for name, entry in state.items():
            params = self._named_optimizers[name].param_groups[0]["params"]
            whole = entry["state"]
            shards = shard_optimizer_state(whole["state"], params)
            cut[name] = {**entry, "state": {**whole, "state": shards}}
        return cut

    def _set_optimizer_state(self, state: dict[str, Any]) -> None:
        """The moments of a checkpoint under the settings of this config, which may be others
        (population-based search)."""
        own = {
            name: [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]
            for name, opt in self._named_optimizers.items()
        }
        super()._set_optimizer_state(self._cut_optimizer_state(state))
        for name, groups in own.items():
            for group, settings in zip(
                self._named_optimizers[name].param_groups, groups, strict=True
            ):
                group.update(settings)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next optimiser step."""
        return float(self.config.lr) * learning_rate_factor(
            self.num_updates,
            schedule=self.config.lr_schedule,
            num_warmup_updates=self.config.lr_num_warmup_updates,
            num_total_updates=self.config.lr_num_updates,
        )

    # --- the update --------------------------------------------------------------------------

    def update(
        self, batch=None, *, training_data=None, batch_refs=None, timesteps=None, **kwargs
    ) -> dict[str, Any]:
        """Takes all optimiser steps for one batch; the same batch goes to every learner."""
        self._check_is_built()
        timesteps = timesteps or {}
        self.before_gradient_based_update(timesteps=timesteps)
        if training_data is None:
            training_data = TrainingData(batch=batch, batch_refs=batch_refs)
        rows = self.prepare(self._columns(training_data))
        self._weights_seq_no += 1
        for indices in self._minibatches(rows):
            self._update_minibatch({name: column[indices] for name, column in rows.items()})
            if self.should_stop():
                break
        self._log_means()
        self.after_gradient_based_update(timesteps=timesteps)
        return self.metrics.reduce()

    def _columns(self, training_data: TrainingData) -> Batch:
        training_data.validate()
        training_data.solve_refs()
        batch = training_data.batch.policy_batches[DEFAULT_MODULE_ID]
        return {name: torch.as_tensor(column).to(self._device) for name, column in batch.items()}

    def _minibatches(self, rows: Batch) -> Iterator[torch.Tensor]:
        """Row indices of every mini-batch of every epoch: a function of seed and update count."""
        num_rows = len(next(iter(rows.values())))
        size = self.config.minibatch_size
        generator = torch.Generator().manual_seed(
            (self.config.seed or 0) * 1_000_003 + self._weights_seq_no
        )
        if self.config.minibatch_tokens is not None:
            return minibatch_indices_by_tokens(
                row_lengths(rows),
                self.config.minibatch_tokens * self.world_size,
                self.config.num_epochs,
                generator,
                group_size=self.num_completions_per_group(),
            )
        return iter(
            minibatch_indices(
                num_rows,
                size * self.world_size if size else num_rows,
                self.config.num_epochs,
                generator,
                group_size=self.num_completions_per_group(),
            )
        )

    def _update_minibatch(self, minibatch: Batch) -> None:
        self.start_minibatch(minibatch)
        for optimizer in self._named_optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self._device)
        options = self.forward_options()
        for micro_batch in self.micro_batches(minibatch):
            loss += self._backward(micro_batch, options)
        for idle in self.idle_rounds(minibatch):
            zero_loss(self.forward(idle, **options)).backward()
        for extra in self.extra_losses():
            extra.backward()
            loss += extra.detach()
        self._step(loss, minibatch)

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """This learner's rows of `batch`, cut into micro-batches without dead padding."""
        for rows in self.micro_batch_rows(batch):
            yield trim(take_rows(batch, rows))

    def micro_batch_rows(self, batch: Batch, rank: int | None = None) -> list[torch.Tensor]:
        """Row indices of each micro-batch of this learner, or of another."""
        mine = self.share(torch.arange(len(next(iter(batch.values())))), rank)
        if len(mine) == 0:
            return []
        indices = micro_batch_indices(
            take_rows(batch, mine),
            micro_batch_size=self.config.micro_batch_size,
            token_budget=self.config.micro_batch_tokens,
        )
        return [mine[index.cpu()] for index in indices]

    def idle_rounds(self, batch: Batch) -> Iterator[Batch]:
        """The shortest row of `batch`, as often as another learner has more micro-batches of it.

        Nothing is learnt from it: the weights' shards are gathered by all learners or none.
        Everyone knows the whole batch, so nobody has to ask.
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
        """Outputs [B, T] of all rows of completions, without gradient; each row by one learner."""
        like = batch[columns.COMPLETION_MASK]
        whole = {name: torch.zeros(like.shape, device=like.device) for name in names}
        rows = self.micro_batch_rows(batch)
        outputs = [out for _, out in self.evaluated(batch, **options)]
        for index, out in zip(rows, outputs, strict=True):
            for name in names:
                whole[name][index.to(like.device), : out[name].shape[1]] = out[name]
        return {name: self.all_reduce(column) for name, column in whole.items()}

    def _backward(self, micro_batch: Batch, options: dict[str, Any]) -> torch.Tensor:
        outputs = self.forward(micro_batch, **options)
        loss = self.compute_loss_for_module(
            module_id=DEFAULT_MODULE_ID, config=self.config, batch=micro_batch, fwd_out=outputs
        )
        loss.backward()
        return loss.detach()

    def _step(self, loss: torch.Tensor, minibatch: Batch) -> None:
        """Sums gradients over learners, refuses what is not finite, clips, steps."""
        params = [param for param in self._params.values() if param.requires_grad]
        self._sum_gradients(params)
        self.all_reduce(loss)
        grads = [param.grad for param in params if param.grad is not None]
        norm = gradient_norm(grads)
        if not (torch.isfinite(loss) and torch.isfinite(norm)):
            self._refuse(loss, norm, minibatch)
            return
        self._consecutive_refusals = 0
        if self.config.grad_clip is not None:
            clip_gradients_(grads, norm, self.config.grad_clip)
        for optimizer in self._named_optimizers.values():
            self._set_optimizer_lr(optimizer, self.learning_rate)
            optimizer.step()
        self.means.add("lr", self.learning_rate, 1)
        self.means.add("grad_norm", norm, 1)
        self.num_updates += 1

    def _sum_gradients(self, params: list[torch.nn.Parameter]) -> None:
        if not self.distributed or self._sharded is not None:  # shards are summed as they are made
            return
        for param in params:
            if param.grad is None:  # this learner had no rows, or never uses it
                param.grad = torch.zeros_like(param)
        flat = torch.cat([param.grad.reshape(-1) for param in params])
        self.all_reduce(flat)
        for param, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
            param.grad.copy_(grad.view_as(param))

    def _refuse(self, loss: torch.Tensor, norm: torch.Tensor, minibatch: Batch) -> None:
        """Leaves weights and optimiser as they are, and keeps the batch for inspection.

        Raises:
            FloatingPointError: it happened several times in a row.
        """
        self.num_refused_updates += 1
        self._consecutive_refusals += 1
        folder = Path(self.config.refused_batch_dir or tempfile.gettempdir())
        path = folder / f"refused_batch_{self.num_refused_updates}_{self.rank}.pt"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(minibatch, path)
        message = (
            f"loss={loss.item()} and gradient norm={norm.item()} must be finite: the update was "
            f"refused, weights and optimiser are unchanged. The mini-batch is in {path}."
        )
        logger.error(message)
        if self._consecutive_refusals >= MAX_CONSECUTIVE_REFUSALS:
            raise FloatingPointError(f"{message} It happened {self._consecutive_refusals} times "
                                     "in a row: lower lr, or look at the scores in that batch.")

    def _log_means(self) -> None:
        """Each learner logs its share of the mean; RLlib sums the shares."""
        local_only = {"lr", "grad_norm"}
        for name, value in self.means.pop().items():
            if not math.isfinite(value):
                continue
            share = value / self.world_size if name in local_only else value
            self.metrics.log_value((DEFAULT_MODULE_ID, name), share, reduce="sum")
        refused = self.num_refused_updates / self.world_size
        self.metrics.log_value((DEFAULT_MODULE_ID, "num_refused_updates"), refused, reduce="sum")

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Learning rates are set per step by us: RLlib's own schedules have nothing to do."""

    # --- state -------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """What this learner knows beside module, optimiser and RLlib's own counters."""
        return {"num_updates": self.num_updates, "num_refused_updates": self.num_refused_updates}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.num_updates = state["num_updates"]
        self.num_refused_updates = state["num_refused_updates"]

    def get_state(self, components=None, *, not_components=None, **kwargs) -> dict[str, Any]:
        state = super().get_state(components, not_components=not_components, **kwargs)
        if self._check_component(STATE_KEY, components, not_components):
            state[STATE_KEY] = self.get_extra_state()
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        # RLlib keeps the newer of two weights; a restore must be able to go back.
        self._weights_seq_no = 0
        super().set_state(state)
        if STATE_KEY in state:
            self.set_extra_state(state[STATE_KEY])

    def export_model(self, folder: str) -> None:
        """Writes the model as it is now, as `from_pretrained` reads it; all learners must call it,
        and the first one writes."""
        module = self.module[DEFAULT_MODULE_ID].unwrapped()
        state = module.get_state()
        if self.rank == 0:
            module.export_pretrained(folder, state=state)


def zero_loss(outputs: Batch) -> torch.Tensor:
    """A loss of 0 that goes through everything the outputs came from."""
    return sum(0.0 * output.sum() for output in outputs.values() if output.requires_grad)
