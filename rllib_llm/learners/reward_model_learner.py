"""Reward-model training on preference pairs (Bradley-Terry)."""

from __future__ import annotations

from typing import Any

import torch

from rllib_llm import columns
from rllib_llm.learners.language_model_learner import LanguageModelLearner
from rllib_llm.learners.shared_passes import Batch
from rllib_llm.numerics.losses import preference_loss


class RewardModelLearner(LanguageModelLearner):
    """Loss: mean over pairs of -log σ(score of the chosen − score of the rejected)."""

    def start_minibatch(self, minibatch: Batch) -> None:
        self._num_pairs = len(minibatch[columns.CHOSEN_IDS])
        for name in ("loss/reward_model", "train/accuracy"):
            self.means.add_count(name, self._num_pairs)

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: Batch, fwd_out: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        chosen, rejected = fwd_out[columns.SCORES].chunk(2)
        per_pair, correct = preference_loss(chosen, rejected)
        loss = per_pair.sum()
        # Scores are defined up to a constant: hold their mean near 0 (Eisenstein et al. 2023).
        if config.center_rewards_coeff:
            loss = loss + config.center_rewards_coeff * (chosen + rejected).square().sum()
        self.means.add_total("loss/reward_model", per_pair.sum())
        self.means.add_total("train/accuracy", correct.sum())
        return loss / self._num_pairs

    def evaluate_batch(self, batch: Batch) -> dict[str, float]:
        """Sums over pairs of loss and correct order, and of the scores and their squares."""
        sums = dict.fromkeys(("loss_sum", "accuracy_sum", "score_sum", "score_square_sum"), 0.0)
        num_pairs = 0
        batch = {name: column.to(self._device) for name, column in batch.items()}
        for _, outputs in self.evaluated(batch):
            scores = outputs[columns.SCORES]
            per_pair, correct = preference_loss(*scores.chunk(2))
            sums["loss_sum"] += float(per_pair.sum())
            sums["accuracy_sum"] += float(correct.sum())
            sums["score_sum"] += float(scores.sum())
            sums["score_square_sum"] += float(scores.double().square().sum())
            num_pairs += len(correct)
        return {
            **sums,
            "loss_count": num_pairs,
            "accuracy_count": num_pairs,
            "score_count": 2 * num_pairs,
        }

    def score_texts(self, batch: Batch) -> dict[str, float]:
        """Sums over this learner's texts (`input_ids`, `attention_mask` [N, L]) of their scores
        and the squares."""
        sums = dict.fromkeys(("score_sum", "score_square_sum", "score_count"), 0.0)
        batch = {name: column.to(self._device) for name, column in batch.items()}
        for _, outputs in self.evaluated(batch):
            scores = outputs[columns.SCORES].double()
            sums["score_sum"] += float(scores.sum())
            sums["score_square_sum"] += float(scores.square().sum())
            sums["score_count"] += len(scores)
        return sums
