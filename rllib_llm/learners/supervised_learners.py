"""Learners of given data: texts (SFT), and preference pairs (a reward model, DPO).

The arithmetic is in `numerics/losses.py` and `numerics/preference_losses.py`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from rllib_llm.learners.language_model_learner import LanguageModelLearner
from rllib_llm.learners.shared_passes import Batch, own_reference
from rllib_llm.modules.images import is_image
from rllib_llm.numerics.losses import (
    cross_entropy_tokens,
    kto_reference_point,
    preference_loss,
    preference_losses,
)
from rllib_llm.shared import columns

# --- supervised fine-tuning ---------------------------------------------------------------------


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
        return total / self._num_targets + self.router_loss(fwd_out, mask.sum(), self._num_targets)

    def evaluate_batch(self, batch: Batch) -> dict[str, float]:
        """{"loss": nats per target token, "num_tokens"} of texts, weights untouched."""
        total, count = self.loss_of_texts(batch)
        return {"loss_sum": total, "loss_count": count}


# --- reward models ------------------------------------------------------------------------------


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
        for _, outputs in self.evaluated(self._on_device(batch)):
            scores = outputs[columns.SCORES]
            per_pair, correct = preference_loss(*scores.chunk(2))
            sums["loss_sum"] += float(per_pair.sum())
            sums["accuracy_sum"] += float(correct.sum())
            sums["score_sum"] += float(scores.sum())
            sums["score_square_sum"] += float(scores.double().square().sum())
            num_pairs += len(correct)
        counts = {"loss": num_pairs, "accuracy": num_pairs, "score": 2 * num_pairs}
        return sums | {f"{name}_count": count for name, count in counts.items()}

    def score_texts(self, batch: Batch) -> dict[str, float]:
        """Sums over this learner's texts (`input_ids`, `attention_mask` [N, L]) of their scores
        and the squares."""
        sums = dict.fromkeys(("score_sum", "score_square_sum", "score_count"), 0.0)
        for _, outputs in self.evaluated(self._on_device(batch)):
            scores = outputs[columns.SCORES].double()
            sums["score_sum"] += float(scores.sum())
            sums["score_square_sum"] += float(scores.square().sum())
            sums["score_count"] += len(scores)
        return sums


# --- direct preference optimisation -------------------------------------------------------------

LOGPROBS = (columns.CHOSEN_LOGPROBS, columns.REJECTED_LOGPROBS)
REF_LOGPROBS = (columns.REF_CHOSEN_LOGPROBS, columns.REF_REJECTED_LOGPROBS)
# Metrics of pairs: name in training, name in an evaluation.
MEANS = {
    "loss/dpo": "loss",
    "train/accuracy": "accuracy",
    **{
        name: name
        for name in (
            "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen",
            "logps/rejected",
        )
    },
}  # fmt: skip


class DPOLearner(LanguageModelLearner):
    """Loss: mean over pairs of `config.loss_type`; see `preference_losses`."""

    def build(self) -> None:
        super().build()
        self.reference = None
        if not self.config.reference_free:
            self.reference = own_reference(self, copy=self.config.lora is None)

    def prepare(self, batch: Batch) -> Batch:
        return {**batch, **self._reference_logprobs(batch)}

    def start_minibatch(self, minibatch: Batch) -> None:
        counts = self._counts(minibatch)
        self._num_items = counts["loss/dpo"].sum()
        for name in MEANS:
            self.means.add_count(name, counts[name].sum())
        self._kl = self._reference_point(minibatch)
        if self._kl is not None:
            self.means.add("train/kto_kl", self._kl / self.world_size, 1)

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: Batch, fwd_out: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        per_pair = self._per_pair(batch, fwd_out, self._kl)
        for name in MEANS:
            self.means.add_total(name, per_pair[name].sum())
        return per_pair["loss/dpo"].sum() / self._num_items

    def evaluate_batch(self, batch: Batch) -> dict[str, float]:
        """Sums over this learner's pairs, by name, and their count."""
        batch = self._on_device(batch)
        batch |= self._reference_logprobs(batch)
        kl = self._reference_point(batch)
        sums: defaultdict[str, float] = defaultdict(float)
        for micro_batch, outputs in self.evaluated(batch):
            counts = self._counts(micro_batch)
            for name, values in self._per_pair(micro_batch, outputs, kl).items():
                sums[f"{MEANS[name]}_sum"] += float(values.sum())
                sums[f"{MEANS[name]}_count"] += float(counts[name].sum())
        return dict(sums)

    def _counts(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The weight [pairs] of each row in each mean: rows may have one completion alone."""
        chosen, rejected = (
            batch[name].any(dim=1).float() for name in (columns.CHOSEN_MASK, columns.REJECTED_MASK)
        )
        of_row = 0.5 * (chosen + rejected) if self.config.loss_type == "kto" else chosen
        sides = {"chosen": chosen, "rejected": rejected}
        return {n: sides.get(n.partition("/")[2], chosen * rejected) for n in MEANS} | {
            "loss/dpo": of_row
        }

    def _per_pair(
        self, batch: Batch, outputs: Batch, kl: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The loss [pairs] of each pair, with gradient, and its metrics."""
        chosen_logprobs, rejected_logprobs = (outputs[name] for name in LOGPROBS)
        chosen, rejected = _log_ratios(batch, outputs)
        beta = self.config.ref_kl_coeff
        lengths = {
            name: batch[sampled if sampled in batch else mask].sum(dim=1)
            for name, mask, sampled in (
                ("chosen_lengths", columns.CHOSEN_MASK, columns.CHOSEN_LOSS_MASK),
                ("rejected_lengths", columns.REJECTED_MASK, columns.REJECTED_LOSS_MASK),
            )
        }  # fmt: skip
        losses = preference_losses(
            self.config.loss_type, chosen, rejected, kl_coeff=beta, kl=kl, **lengths,
            label_smoothing=self.config.label_smoothing, target_margin=self.config.target_margin,
            kto_weights=(self.config.desirable_weight, self.config.undesirable_weight),
        )  # fmt: skip
        rewards = beta * chosen.detach(), beta * rejected.detach()
        counts = self._counts(batch)
        found = {
            "train/accuracy": (rewards[0] > rewards[1]).float(),
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/margins": rewards[0] - rewards[1],
            "logps/chosen": chosen_logprobs.detach(),
            "logps/rejected": rejected_logprobs.detach(),
        }
        return {"loss/dpo": losses} | {name: x * counts[name] for name, x in found.items()}

    def _reference_logprobs(self, batch: Batch) -> Batch:
        """The reference's log-probs [pairs] of all pairs, each computed by one learner; {} without
        a reference."""
        if self.reference is None:
            return {}
        rows = self.micro_batch_rows(batch)
        outputs = [out for _, out in self.evaluated(batch, ref_logprobs_of=self.reference)]
        whole: Batch = {}
        for name in REF_LOGPROBS:
            column = torch.zeros(len(batch[columns.CHOSEN_IDS]), device=self._device)
            for index, out in zip(rows, outputs, strict=True):
                column[index.to(column.device, non_blocking=True)] = out[name]
            whole[name] = self.all_reduce(column)
        return whole

    @torch.no_grad()
    def _reference_point(self, batch: Batch) -> torch.Tensor | None:
        """KTO's z of a mini-batch, a scalar: 0 where there is but one pair; None for other losses.

        Completions follow the prompt of the next pair, as in TRL's KTOTrainer.
        """
        if self.config.loss_type != "kto":
            return None
        total = torch.zeros((), device=self._device)
        if len(batch[columns.CHOSEN_IDS]) > 1:
            prompts = [columns.PROMPT_IDS, columns.PROMPT_MASK]
            prompts += [name for name in batch if name == columns.IMAGE_ROW or is_image(name)]
            answers = (
                columns.CHOSEN_IDS, columns.CHOSEN_MASK, columns.REJECTED_IDS,
                columns.REJECTED_MASK, columns.CHOSEN_LOSS_MASK, columns.REJECTED_LOSS_MASK,
            )  # fmt: skip
            mismatched = {name: batch[name] for name in prompts}
            mismatched |= {n: batch[n].roll(1, dims=0) for n in answers if n in batch}
            mismatched |= self._reference_logprobs(mismatched)
            for micro_batch, outputs in self.evaluated(mismatched):
                total += torch.cat(_log_ratios(micro_batch, outputs)).sum()
            self.all_reduce(total)
        return kto_reference_point(total, 2 * self._counts(batch)["loss/dpo"].sum())


def _log_ratios(batch: Batch, outputs: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """log π − log π_ref of both completions [pairs]; log π where there is no reference."""
    chosen, rejected = (outputs[name] for name in LOGPROBS)
    if columns.REF_CHOSEN_LOGPROBS not in batch:
        return chosen, rejected
    ref_chosen, ref_rejected = (batch[name] for name in REF_LOGPROBS)
    return chosen - ref_chosen, rejected - ref_rejected
