"""Supervised fine-tuning: mean cross-entropy of the target tokens."""

from __future__ import annotations

from typing import Any

import torch

from rllib_llm import columns
from rllib_llm.learners.language_model_learner import LanguageModelLearner
from rllib_llm.learners.shared_passes import Batch
from rllib_llm.numerics.losses import cross_entropy_tokens


class SFTLearner(LanguageModelLearner):
    """Loss: Σ cross-entropy / number of target tokens of the whole mini-batch."""

    def start_minibatch(self, minibatch: Batch) -> None:
        self._num_targets = minibatch[columns.LOSS_MASK].sum().clamp(min=1)
        self.means.add_count("loss/sft", self._num_targets)

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: Batch, fwd_out: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        mask = batch[columns.LOSS_MASK]
        total = cross_entropy_tokens(fwd_out[columns.TEXT_LOGPROBS], mask).sum()
        self.means.add_total("loss/sft", total)
        return total / self._num_targets

    def evaluate_batch(self, batch: Batch) -> dict[str, float]:
        """{"loss": nats per target token, "num_tokens"} of texts, weights untouched."""
        total, count = 0.0, 0
        batch = {name: column.to(self._device) for name, column in batch.items()}
        for micro_batch, outputs in self.evaluated(batch):
            mask = micro_batch[columns.LOSS_MASK]
            total += float(cross_entropy_tokens(outputs[columns.TEXT_LOGPROBS], mask).sum())
            count += int(mask.sum())
        return {"loss_sum": total, "loss_count": count}
