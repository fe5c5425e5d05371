"""GRPO, RLOO and REINFORCE++: what each makes of scores and KL; all else is `RLHFLearner`'s."""

from __future__ import annotations

import torch

from rllib_llm.learners.rlhf_learner import RLHFLearner
from rllib_llm.learners.shared_passes import Batch
from rllib_llm.numerics.advantages import (
    group_normalized,
    leave_one_out,
    masked_whiten,
    reinforce_returns,
    zero_variance_rows,
)
from rllib_llm.numerics.scores import RolloutRows
from rllib_llm.shared import columns


class GroupLearner(RLHFLearner):
    """Base of algorithms with one advantage per completion, computed within its group."""

    def row_advantages(
        self, scores: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Advantage [B] of each completion from the processed scores [B]; `groups` [B]: rows alike
        in it are completions of one prompt."""
        raise NotImplementedError(f"{type(self).__name__} must define row_advantages.")

    def compute_advantages(self, batch: Batch, scores: torch.Tensor, kl: torch.Tensor) -> Batch:
        groups, valid, mask = (
            batch[columns.GROUP], batch[columns.VALID], columns.sampled_mask(batch)
        )  # fmt: skip
        rows = RolloutRows.of_batch(batch)
        valid = valid & rows.is_first  # a forked conversation counts once in its group
        # KL is taken into the score before the baseline.
        scores = scores - self.reward_kl_coeff * rows.total(kl.sum(dim=1))
        advantages = rows.spread(self.row_advantages(scores, groups, valid))
        flat = zero_variance_rows(scores, groups, valid)
        share = torch.tensor(len(groups[flat].unique()) / len(groups.unique()))
        self.means.add("train/zero_variance_groups", share / self.world_size, 1)
        if self.config.drop_zero_variance_groups:
            batch[columns.LOSS_MASK] = mask = mask & ~flat.unsqueeze(1)
        return {columns.ADVANTAGES: advantages.unsqueeze(1) * mask}


class GRPOLearner(GroupLearner):
    """A_i = (s_i − mean)/(std + 1e-4) (Shao et al. 2024); without std: Dr. GRPO."""

    def row_advantages(
        self, scores: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        return group_normalized(scores, groups, scale_by_std=self.config.scale_by_std, valid=valid)


class RLOOLearner(GroupLearner):
    """A_i = s_i − mean of the others (Ahmadian et al. 2024)."""

    def row_advantages(
        self, scores: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        advantages = leave_one_out(scores, groups, valid)
        if not self.config.whiten_advantages:
            return advantages
        return masked_whiten(advantages.unsqueeze(1), valid.unsqueeze(1)).squeeze(1)


class ReinforcePPLearner(RLHFLearner):
    """REINFORCE++ (Hu 2025): discounted reward-to-go of token rewards, whitened globally; without
    whitening it is REINFORCE without a baseline."""

    def compute_advantages(self, batch: Batch, scores: torch.Tensor, kl: torch.Tensor) -> Batch:
        mask = columns.sampled_mask(batch)
        rewards = self.token_rewards(batch, scores, kl)
        returns = reinforce_returns(rewards, mask, self.config.gamma)
        if self.config.whiten_advantages:
            returns = masked_whiten(returns, mask)
        return {columns.ADVANTAGES: returns}
