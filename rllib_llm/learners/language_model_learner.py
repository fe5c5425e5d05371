"""The base of all learners: mini-batches, micro-batches, one optimiser step for all learners.

    update(batch) -> prepare(batch) -> for each mini-batch:
        for each micro-batch: forward_train -> compute_loss_for_module -> backward
        sum gradients over learners (begun in the last backward) -> check -> clip -> step

Every learner receives the whole batch and takes its share of each mini-batch's rows. So
advantages, whitening and loss denominators are global without communication, mini-batches are
the same however many learners there are, and no learner runs out of rows and hangs the others.
Losses are sums over global denominators: gradients are summed over micro-batches and learners.
With the strategy "ddp" each learner holds all weights, with "fsdp" a share (`sharding.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.metrics import NUM_NON_TRAINABLE_PARAMETERS, NUM_TRAINABLE_PARAMETERS

from rllib_llm.learners.batching import (
    minibatch_indices,
    take_rows,
)
from rllib_llm.learners.learner_group import LEARNER_DONE, CallOrderError
from rllib_llm.learners.metrics import (
    MEANS,
    MESSAGES,
    NUM_PARAMETERS,
    REPORT,
    EffectiveSettings,
    RefusedUpdates,
    WeightedMeans,
)
from rllib_llm.learners.optimizer import (
    load_state,
    make_optimizers,
    offloaded_step,
    whole_state,
)
from rllib_llm.learners.shared_passes import Batch, SharedPasses, seeded_dropout
from rllib_llm.modules.shards import local_data
from rllib_llm.numerics.learning_rate import learning_rate_factor
from rllib_llm.numerics.losses import cross_entropy_tokens
from rllib_llm.shared import columns
from rllib_llm.shared.columns import IMAGE_ROW, moved, remember_all
from rllib_llm.shared.errors import require
from rllib_llm.shared.messages import Listener, TrialMessage
from rllib_llm.shared.process import keep_freed_memory
from rllib_llm.weights.transport import WeightsExporter

if TYPE_CHECKING:
    from rllib_llm.learners.sharding import GradientSums

STATE_KEY = "rllib_llm"  # our share of the learner's state


class LanguageModelLearner(SharedPasses):
    """Base of all learners here. Subclasses define how a batch is prepared and what the loss is:

    prepare(batch): adds the columns that are computed once per update.
    start_minibatch(minibatch): sets the denominators of the losses to come (whole mini-batch).
    compute_loss_for_module(...): the loss of a micro-batch, a sum over those denominators.
    """

    def build(self) -> None:
        self.num_updates = 0  # optimiser steps taken, what schedules count in
        self.means = WeightedMeans()
        self.effective = EffectiveSettings()
        self._accumulated: list[tuple[torch.Tensor, Batch]] = []  # losses and batches since a step
        self._sums: GradientSums | None = None  # that began before the step
        self._num_parameters: dict[str, dict[str, int]] = {}  # of each module
        self._listener = Listener("learner") if self.config.num_learners else None
        with self._listening():
            super().build()
            if torch.device(self._device).type == "cpu":
                keep_freed_memory()
            # Where a seed is set RLlib has torch compute deterministically, which then also fills
            # all memory that it hands out before it is written: a twentieth of the time, and no
            # number.
            torch.utils.deterministic.fill_uninitialized_memory = False
            module = self.module[DEFAULT_MODULE_ID].unwrapped()
            self.weights_exporter = WeightsExporter(module)
            if self.config.torch_compile_learner:  # RLlib leaves out modules inside a MultiRLModule
                module.compile(self._torch_compile_cfg)
            self._refusals = RefusedUpdates(self.config.refused_batch_dir, self.rank)
            if self._listener is not None:
                self._listener.speaker = f"learner {self.rank}"

    def _listening(self) -> AbstractContextManager[Any]:
        """Records warnings and log lines while a block runs, if this process is an actor."""
        return self._listener or nullcontext()

    def report(self) -> dict[str, Any]:
        """Values returned with an update under `REPORT`: messages of this process, and its share of
        the means over all learners. (RLlib's logger, which handles `metrics`, takes 0.1 ms for each
        name.)"""
        shares = {f"effective/{name}": value for name, value in self.effective.pop().items()}
        shares["num_refused_updates"] = self._refusals.num_refused
        shares = {name: value / self.world_size for name, value in shares.items()}
        for name, value in self.means.pop(uncounted="grad_norm").items():
            if math.isfinite(value):
                is_whole = name in ("lr", "grad_norm")  # each learner has all of it
                shares[name] = value / self.world_size if is_whole else value
        messages = self.take_messages()
        return {MESSAGES: messages, MEANS: shares, NUM_PARAMETERS: self._num_parameters}

    def take_messages(self) -> list[TrialMessage]:
        """The messages of an actor since the last call."""
        return self._listener.take() if self._listener is not None else []

    # --- hooks -------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> Batch:
        """The whole batch with the columns that are computed once per update."""
        return batch

    def start_update(self, rows: Batch, minibatches: list[torch.Tensor]) -> None:
        """Called with the prepared batch and the row indices of all mini-batches."""

    def start_minibatch(self, minibatch: Batch) -> None:
        """Called with the whole mini-batch, before its micro-batches."""

    def before_loss(self, micro_batch: Batch, outputs: Batch) -> Batch:
        """The micro-batch as its loss reads it, given the outputs of its forward pass."""
        return micro_batch

    def forget_passes(self) -> None:
        """Discards the sums collected in passes over the current mini-batch, before the passes are
        repeated. Gradients and means are discarded by the caller."""

    def extra_losses(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Functions that compute additional losses of the current mini-batch, each backpropagated
        separately."""
        return iter(())

    def forward_options(self) -> dict[str, Any]:
        """Keyword arguments of the training forward passes."""
        return {"router_aux": True} if self._router_aux_coeff else {}

    @property
    def _router_aux_coeff(self) -> float:
        return getattr(self.config, "router_aux_coeff", 0.0)

    def router_loss(
        self, outputs: Batch, num_tokens: torch.Tensor, total: torch.Tensor
    ) -> torch.Tensor | float:
        """The share of the routers' loss of a micro-batch that has `num_tokens` of the mini-batch's
        `total` sampled tokens; 0 where it is off."""
        if not self._router_aux_coeff:
            return 0.0
        loss = outputs[columns.ROUTER_AUX_LOSS] * num_tokens / total
        self.means.add_total("train/router_aux_loss", loss)
        return self.effective.use("router_aux_coeff", self._router_aux_coeff) * loss

    def after_step(self) -> None:
        """Called after each optimiser step that was taken."""

    def should_stop(self) -> bool:
        """Whether the remaining mini-batches of this update are skipped (asked after each)."""
        return False

    # --- optimiser ---------------------------------------------------------------------------

    def configure_optimizers_for_module(self, module_id, config=None) -> None:
        """As `config.optimizer` says; learning rates are set before every step from `lr` and the
        schedule. Norms and biases do not decay."""
        params = [p for p in self.get_parameters(self._module[module_id]) if p.requires_grad]
        made = make_optimizers(config or self.config, self._module[module_id], params)
        for name, optimizer, own in made:
            named = {"optimizer_name": name} if name else {}
            self.register_optimizer(module_id=module_id, optimizer=optimizer, params=own, **named)

    def _get_optimizer_state(self) -> dict[str, Any]:
        return {
            name: {
                "module_id": self._optimizer_name_to_module[name],
                "state": whole_state(optimizer, self._optimizer_parameters[optimizer]),
            }
            for name, optimizer in self._named_optimizers.items()
        }

    def _set_optimizer_state(self, state: dict[str, Any]) -> None:
        for name, entry in state.items():
            require(name in self._named_optimizers, "optimizer", self.config.optimizer,
                    "be that of the checkpoint", f"it has the state of {[*state]}",
                    "Set the optimizer that it was trained with")  # fmt: skip
            optimizer = self._named_optimizers[name]
            load_state(optimizer, entry["state"], self._optimizer_parameters[optimizer])

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next optimiser step."""
        config = self.config
        return float(config.lr) * learning_rate_factor(
            self.num_updates, schedule=config.lr_schedule,
            num_warmup_updates=config.lr_num_warmup_updates,
            num_total_updates=config.lr_num_updates,
        )  # fmt: skip

    # --- the update --------------------------------------------------------------------------

    def update(
        self, batch=None, *, training_data=None, batch_refs=None, timesteps=None,
        version: int | None = None, **kwargs,
    ) -> dict[str, Any]:  # fmt: skip
        """Takes all optimiser steps for one batch, which every learner receives in whole. The
        results contain `report` under `REPORT`, which saves a separate call.

        `version`: see `forward_backward`; None: each update publishes one.
        """
        self._check_is_built()
        if self._accumulated:
            raise CallOrderError("call optimizer_step() before train() or submit()")
        with self._listening():
            self.before_gradient_based_update(timesteps=timesteps or {})
            if training_data is None:
                training_data = TrainingData(batch=batch, batch_refs=batch_refs)
            training_data.validate()
            training_data.solve_refs()
            columns = training_data.batch.policy_batches[DEFAULT_MODULE_ID]
            rows = self.prepare(self._on_device(columns))
            if version is not None:
                self._weights_seq_no = version
            self._weights_seq_no += 1
            # A function of seed and update count.
            generator = torch.Generator().manual_seed(
                (self.config.seed or 0) * 1_000_003 + self._weights_seq_no
            )
            size = (self.config.minibatch_size or 0) * self.world_size or None
            minibatches = [*minibatch_indices(
                _num_rows(rows), size, self.config.num_epochs, generator
            )]  # fmt: skip
            self.start_update(rows, minibatches)
            with self._training(self._weights_seq_no):
                for indices in minibatches:
                    self._add_gradient(take_rows(rows, indices), is_last=True)
                    self._step()
                    if self.should_stop():
                        break
            self.after_gradient_based_update(timesteps=timesteps or {})
        return {**self.metrics.reduce(), REPORT: self.report()}

    def forward_backward(self, batch: dict[str, Any], version: int) -> dict[str, Any]:
        """Adds the gradient of a batch's loss, the whole batch as one mini-batch, to what
        `optimizer_step` takes next; results as those of `update`.

        `version`: of the policy, updates done. Ages of tokens count from it: steps that make no
        version, and batches that failed, make nothing older.
        """
        with self._listening():
            self._weights_seq_no = version + 1
            rows = self.prepare(self._on_device(batch))
            self.start_update(rows, [torch.arange(_num_rows(rows))])
            with self._training(self.num_updates + 1):
                self._add_gradient(rows)
        return {**self.metrics.reduce(), REPORT: self.report()}

    def optimizer_step(self) -> dict[str, Any]:
        """Takes one optimiser step with the gradients added up; results as those of `update`.

        Raises:
            CallOrderError: there are none.
        """
        if not self._accumulated:
            raise CallOrderError("call forward_backward(batch) before optimizer_step()")
        with self._listening():
            self._step()
        return {**self.metrics.reduce(), REPORT: self.report()}

    def _on_device(self, batch: Mapping[str, Any]) -> Batch:
        given = {name: torch.as_tensor(column) for name, column in batch.items()}
        shows = given.get(IMAGE_ROW)
        # All learners call a tower whose layers are spread over them, or none.
        require(shows is None or not self.is_sharded or bool((shows >= 0).all()),
                "learner_strategy", "fsdp", "be 'ddp' where some prompts have images and others not"
                )  # fmt: skip
        there: Batch = {}
        for name, column in given.items():
            move = moved if column.device.type == "cpu" else torch.Tensor.to
            there[name] = move(column, self._device)
        remember_all(there)
        return there

    def loss_of_texts(self, texts: Mapping[str, Any]) -> tuple[float, int]:
        """(cross-entropy in nats, target tokens), summed over this learner's share of texts."""
        total, num_tokens = 0.0, 0
        for micro_batch, outputs in self.evaluated(self._on_device(texts)):
            mask = micro_batch[columns.LOSS_MASK]
            total += float(cross_entropy_tokens(outputs[columns.TEXT_LOGPROBS], mask).sum())
            num_tokens += int(mask.sum())
        return total, num_tokens

    @contextmanager
    def _training(self, place: int) -> Iterator[None]:
        """Seeds dropout. Afterwards the module is in eval mode: a sampler may share it."""
        try:
            with seeded_dropout(self.config, place, self.rank, len(self._accumulated)):
                yield
        finally:
            self.module[DEFAULT_MODULE_ID].unwrapped().eval()

    def _add_gradient(self, minibatch: Batch, *, is_last: bool = False) -> None:
        """Adds the gradient of the mini-batch's loss to those of the next step, the `is_last` one
        before it. If that fails, all are dropped, since partial gradients cannot be separated."""
        others, self._accumulated = self._accumulated, []
        before = self.means.copy()
        if is_last and self._sums_gradients:
            self._sums = self._new_sums()
        if self._router_aux_coeff:
            self.means.add_count("train/router_aux_loss", 1)
        try:
            self.start_minibatch(minibatch)
            loss = self._passes(minibatch) if others else self._first_passes(minibatch)
        except BaseException:
            self.means.take(before)  # the next batch's means are its own
            self._sums = None
            raise
        self._accumulated = [*others, (loss, minibatch)]

    def _first_passes(self, minibatch: Batch) -> torch.Tensor:
        """As `_passes`, where no other mini-batch has added gradients."""
        before = self.means.copy()

        def passes() -> torch.Tensor:
            for optimizer in self._named_optimizers.values():
                optimizer.zero_grad(set_to_none=True)
            self.means.take(before)
            self.forget_passes()
            return self._passes(minibatch)

        return self.in_memory(passes, minibatch)

    def _passes(self, minibatch: Batch) -> torch.Tensor:
        """Adds the gradient of the mini-batch's loss; this learner's share of the loss."""
        total = torch.zeros((), device=self._device)
        options = self.forward_options()
        loss_of = partial(self._loss, options=options)
        losses = itertools.chain(self.losses_of(minibatch, loss_of, options), self.extra_losses())
        following = next(losses, None)
        while following is not None:
            compute, following = following, next(losses, None)
            loss = compute()
            sums = self._sums if following is None else None
            with sums.during(loss) if sums is not None else nullcontext():
                self.backward(loss)
            total += loss.detach().reshape(())
        return total

    def losses_of(
        self, batch: Batch, loss: Callable[[Batch], torch.Tensor], options: dict[str, Any]
    ) -> Iterator[Callable[[], torch.Tensor]]:
        """Functions that compute `loss` of each micro-batch, and the idle passes beside them."""
        for micro_batch in self.micro_batches(batch):
            yield partial(loss, micro_batch)
        for idle in self.idle_rounds(batch):
            yield partial(self._idle_loss, idle, options)

    def _idle_loss(self, idle: Batch, options: dict[str, Any]) -> torch.Tensor:
        """A loss of 0 that goes through everything the outputs came from."""
        outputs = self.forward(idle, **options).values()
        return sum(0.0 * output.sum() for output in outputs if output.requires_grad)

    def _loss(self, micro_batch: Batch, options: dict[str, Any]) -> torch.Tensor:
        outputs = self.forward(micro_batch, **options)
        loss = self.compute_loss_for_module(
            module_id=DEFAULT_MODULE_ID, config=self.config, fwd_out=outputs,
            batch=self.before_loss(micro_batch, outputs),
        )  # fmt: skip
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            name = f"{type(self).__name__}.compute_loss_for_module"
            raise TypeError(f"{name} must return a tensor of one number, and returned {loss!r:.99}")
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradient of `loss` to that of this learner's other micro-batches."""
        loss.backward()

    def _step(self) -> None:
        """Sums gradients over learners, rejects non-finite ones, clips, steps."""
        loss = torch.stack([loss for loss, _ in self._accumulated]).sum()
        minibatch = self._accumulated[-1][1]
        self._accumulated = []
        params = self._trained()
        if self._sums_gradients:
            (self._sums or self._new_sums()).finish()
            self._sums = None
        self.all_reduce(loss)
        grads = [param.grad for param in params if param.grad is not None]
        if self.is_sharded:  # this learner's shards
            grads = [local_data(grad) for grad in grads]
        norm = torch.nn.utils.get_total_norm(grads)
        if self.is_sharded:
            norm = self.all_reduce(norm.square()).sqrt()
        if not torch.isfinite(torch.stack([loss, norm])).all():  # a GPU is waited for once
            self._refusals.refuse(loss, norm, minibatch)
            return
        self._refusals.num_in_a_row = 0
        if self.config.grad_clip is not None:
            limit = self.effective.use("grad_clip", self.config.grad_clip)
            # As torch.nn.utils.clip_grad_norm_, which does not ask the device either whether it is
            # below 1; of shards as well.
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            for grad in grads:
                grad.mul_(factor.to(grad.device))
        for optimizer in self._named_optimizers.values():
            self._set_optimizer_lr(optimizer, self.learning_rate)
            if self.config.optimizer_offload:
                offloaded_step(optimizer)
            else:
                optimizer.step()
            self.effective.read_optimizer(optimizer)
        self.module[DEFAULT_MODULE_ID].unwrapped().cast_weights()
        self.means.add("lr", self.learning_rate, 1)
        self.means.add("grad_norm", norm, 1)
        self.num_updates += 1
        self.after_step()

    @property
    def _sums_gradients(self) -> bool:
        """Whether gradients are summed over learners here; those of shards are as they are made."""
        return self.distributed and self._sharded is None

    def _new_sums(self) -> GradientSums:
        from rllib_llm.learners.sharding import GradientSums  # of several learners

        return GradientSums(self._trained())

    def _trained(self) -> list[torch.nn.Parameter]:
        return [param for param in self._params.values() if param.requires_grad]

    def _log_trainable_parameters(self) -> None:
        """Reports the number of trainable parameters with each update; RLlib logs it once and then
        NaN."""
        for module_id in self.module.keys():  # noqa: SIM118  (RLlib's module is no mapping)
            counts = {NUM_TRAINABLE_PARAMETERS: 0, NUM_NON_TRAINABLE_PARAMETERS: 0}
            for parameter in self.module[module_id].unwrapped().parameters():
                is_trained = parameter.requires_grad
                name = NUM_TRAINABLE_PARAMETERS if is_trained else NUM_NON_TRAINABLE_PARAMETERS
                counts[name] += parameter.numel()
            self._num_parameters[module_id] = counts

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Learning rates are set per step by us: RLlib's own schedules have nothing to do."""

    # --- state -------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """This learner's state besides module, optimiser and RLlib's own counters."""
        return {"num_updates": self.num_updates, "num_refused_updates": self._refusals.num_refused}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.num_updates = state["num_updates"]
        self._refusals.num_refused = state["num_refused_updates"]

    def get_state(self, components=None, *, not_components=None, **kwargs) -> dict[str, Any]:
        state = super().get_state(components, not_components=not_components, **kwargs)
        if self._check_component(STATE_KEY, components, not_components):
            state[STATE_KEY] = self.get_extra_state()
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        # RLlib keeps the newer of two weights; a restore must be able to go back.
        self._weights_seq_no = 0
        self._accumulated = []  # gradients of other weights
        super().set_state(state)
        if STATE_KEY in state:
            self.set_extra_state(state[STATE_KEY])

    def save_to_path(self, path=None, **kwargs: Any) -> str:
        path = super().save_to_path(path, **kwargs)
        (Path(path) / LEARNER_DONE).touch()
        return path

    def export_model(self, folder: str, how: str = "export_pretrained") -> None:
        """Writes the model as it is now, as `from_pretrained` reads it, or by another method of the
        module; all learners must call it, and the first one writes."""
        module = self.module[DEFAULT_MODULE_ID].unwrapped()
        state = module.get_state()
        if self.rank == 0:
            getattr(module, how)(folder, state=state)


def _num_rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))
