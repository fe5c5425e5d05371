"""GRPO of two policies from the same batch: each row is learnt by the policy that sampled it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.learners.critic_free_learners import GRPOLearner
from rllib_llm.learners.shared_passes import Batch
from rllib_llm.shared import columns
from rllib_llm.weights.exporter import OPPONENT, TwoModules, WeightsExporter

POLICIES = (DEFAULT_MODULE_ID, OPPONENT)
"""Module ids by the value of `columns.POLICY`."""


class SelfPlayLearner(GRPOLearner):
    """The module is a MultiRLModule of two. Advantages come from groups, which belong to one policy
    each; a mini-batch has rows of both, and a micro-batch of one."""

    def _build(self) -> None:
        super()._build()
        both = (self.module[name].unwrapped() for name in POLICIES)
        self.weights_exporter = WeightsExporter(TwoModules(*both))

    def forward(self, micro_batch: Batch, **options: Any) -> Batch:
        """`forward_train` of the policy whose rows these are."""
        (place,) = micro_batch[columns.POLICY].unique().tolist()
        return self.module[POLICIES[place]].unwrapped().forward_train(micro_batch, **options)

    def micro_batch_rows(self, batch: Batch, rank: int | None = None) -> list[torch.Tensor]:
        """As of all learners, rows of one policy each."""
        whose = batch[columns.POLICY].cpu()
        return [
            part
            for rows in super().micro_batch_rows(batch, rank)
            for part in _by_value(rows, whose[rows])
        ]

    def _map_module_to_device(self, module: Any) -> None:
        super()._map_module_to_device(module)
        module[OPPONENT].unwrapped().make_computing_copies()

    def _step(self) -> None:
        super()._step()
        self.module[OPPONENT].unwrapped().cast_weights()

    def _log_objective(
        self, batch: Batch, processed: torch.Tensor, kl: torch.Tensor | None
    ) -> None:
        """As of all learners, over the policy's own rows: the opponent's scores are another thing,
        and stand among the environment's metrics."""
        own = batch[columns.POLICY] == 0
        mine = {name: column[own] for name, column in batch.items()}
        super()._log_objective(mine, processed[own], None if kl is None else kl[own])


def _by_value(rows: torch.Tensor, values: torch.Tensor) -> Iterator[torch.Tensor]:
    """`rows` [n] by the value that each has in `values` [n]."""
    for value in values.unique().tolist():
        yield rows[values == value]


def copy_weights(modules: Mapping[str, Any]) -> None:
    """Gives the opponent the policy's weights."""
    state = modules[DEFAULT_MODULE_ID].unwrapped().get_state()
    modules[OPPONENT].unwrapped().set_state(state)
