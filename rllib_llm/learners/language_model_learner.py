"""What every learner here shares: mini-batches, micro-batches, one optimiser step for all learners.

    update(batch) -> prepare(batch) -> for each mini-batch:
        for each micro-batch: forward_train -> compute_loss_for_module -> backward
        sum gradients over learners -> check -> clip -> step

Every learner receives the whole batch and takes its share of each mini-batch's rows. So
advantages, whitening and loss denominators are global without communication, mini-batches are
the same however many learners there are, and no learner runs out of rows and hangs the others.
Losses are sums over global denominators: gradients are summed over micro-batches and learners.
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

from rllib_llm.learners.batching import micro_batches, minibatch_indices, trim
from rllib_llm.learners.metrics import WeightedMeans
from rllib_llm.learners.schedule import learning_rate_factor

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

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """This learner's part of row indices [n]: every world_size-th."""
        return rows[self.rank :: self.world_size]

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

    def _set_optimizer_state(self, state: dict[str, Any]) -> None:
        """The moments of a checkpoint under the settings of this config, which may be others
        (population-based search)."""
        own = {
            name: [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]
            for name, opt in self._named_optimizers.items()
        }
        super()._set_optimizer_state(state)
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
        for micro_batch in self.micro_batches(minibatch):
            share = self._backward(micro_batch)
            loss += share
        for extra in self.extra_losses():
            extra.backward()
            loss += extra.detach()
        self._step(loss, minibatch)

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """This learner's rows of `batch`, cut into micro-batches without dead padding."""
        num_rows = len(next(iter(batch.values())))
        mine = self.share(torch.arange(num_rows))
        if len(mine) == 0:
            return
        own = {name: column[mine] for name, column in batch.items()}
        for micro_batch in micro_batches(
            own,
            micro_batch_size=self.config.micro_batch_size,
            token_budget=self.config.micro_batch_tokens,
        ):
            yield trim(micro_batch)

    def _backward(self, micro_batch: Batch) -> torch.Tensor:
        module = self.module[DEFAULT_MODULE_ID]
        outputs = module.forward_train(micro_batch)
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
        norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        if not (torch.isfinite(loss) and torch.isfinite(norm)):
            self._refuse(loss, norm, minibatch)
            return
        self._consecutive_refusals = 0
        if self.config.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(params, self.config.grad_clip, norm)
        for optimizer in self._named_optimizers.values():
            self._set_optimizer_lr(optimizer, self.learning_rate)
            optimizer.step()
        self.means.add("lr", self.learning_rate, 1)
        self.means.add("grad_norm", norm, 1)
        self.num_updates += 1

    def _sum_gradients(self, params: list[torch.nn.Parameter]) -> None:
        if not self.distributed:
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
