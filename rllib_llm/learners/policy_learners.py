"""PPO-ptx, GRPO, RLOO and REINFORCE++: what each makes of scores and KL.

PPO-ptx (Ouyang et al. 2022, eq. 2): PPO with a critic and a KL to the reference in the reward, plus
γ_ptx times the cross-entropy of pretraining text in the same optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.learners.batching import take_rows
from rllib_llm.learners.rlhf_learner import RLHFLearner
from rllib_llm.learners.shared_passes import Batch
from rllib_llm.numerics.advantages import (
    Turns,
    gae,
    group_normalized,
    leave_one_out,
    masked_whiten,
    normalized_sum,
    reinforce_returns,
    zero_variance_rows,
)
from rllib_llm.numerics.losses import cross_entropy_tokens
from rllib_llm.numerics.scores import RolloutRows
from rllib_llm.shared import columns
from rllib_llm.shared.errors import require

if TYPE_CHECKING:
    from rllib_llm.data.mixture import MixedSource
    from rllib_llm.data.texts import BatchSource


class GroupLearner(RLHFLearner):
    """Base of algorithms with one advantage per completion, computed within its group."""

    def row_advantages(
        self, scores: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Advantage [B] of each completion from the processed scores [B]; `groups` [B]: rows alike
        in it are completions of one prompt."""
        raise NotImplementedError(f"{type(self).__name__} must define row_advantages.")

    def compute_advantages(self, batch: Batch, scores: torch.Tensor, kl: torch.Tensor) -> Batch:
        mask, rows = columns.sampled_mask(batch), RolloutRows.of_batch(batch)
        valid = batch[columns.VALID] & rows.is_first  # a forked conversation counts once
        # Before the KL is taken into the score: its round-off would tell equal scores apart.
        here = columns.on_host({**batch, columns.SCORES: scores})
        counts = here[columns.VALID] & RolloutRows.of_batch(here).is_first
        flat, share = zero_variance_rows(here[columns.SCORES], here[columns.GROUP], counts)
        with_kl = scores - self.reward_kl_coeff * rows.total(kl.sum(dim=1))  # before the baseline
        advantages = rows.spread(self.rollout_advantages(batch, with_kl, valid)).unsqueeze(1)
        if self.config.turn_advantages is not None:
            coeff = self.effective.use("turn_advantage_coeff", self.config.turn_advantage_coeff)
            rewards = self.token_rewards(batch, scores, kl)
            advantages = advantages + coeff * self._turn_advantages(batch, rewards)
        self.means.add("train/zero_variance_groups", share / self.world_size, 1)
        if self.config.drop_zero_variance_groups:
            kept = columns.sampled_mask(here) & ~flat.unsqueeze(1)
            batch[columns.LOSS_MASK] = mask = columns.moved(kept, mask.device)
        return {columns.ADVANTAGES: advantages * mask}

    def rollout_advantages(
        self, batch: Batch, scores: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Advantage [B] at each rollout's first row, where `valid` [B] is True."""
        return self.row_advantages(scores, batch[columns.GROUP], valid)

    def _turn_advantages(self, batch: Batch, rewards: torch.Tensor) -> torch.Tensor:
        """Advantage [B, T] of each turn among its peers, from token rewards [B, T]."""
        names = (columns.GROUP, columns.ROW_ID, columns.PROMPT_IDS, columns.PROMPT_MASK,
                 columns.COMPLETION_IDS)  # fmt: skip
        given = [*(batch[name] for name in names), columns.sampled_mask(batch)]
        groups, row_ids, prompt_ids, prompt_mask, ids, mask = columns.fetched(given)
        owners = torch.arange(len(mask))
        if columns.ROW_WEIGHT in batch:  # conversations that fork
            owners = RolloutRows.of(row_ids).owners
        turns = Turns.of(mask, owners)
        if not len(turns.owners):  # nothing could be judged
            return torch.zeros_like(rewards)
        peers = turns.numbers
        if self.config.turn_advantages == "state":
            peers = _states(prompt_ids, prompt_mask, ids, mask)
        keys = torch.stack([groups[turns.owners], peers], dim=1)
        keys = keys.unique(dim=0, return_inverse=True)[1]
        returns = turns.returns(rewards, self.effective.use("gamma", self.config.gamma))
        # All turns may be alone, which a group of one would refuse: one stands twice.
        keys = torch.cat([keys, keys[:1]])
        there = columns.moved(keys, returns.device)
        valid = torch.arange(len(keys), device=returns.device) < len(keys) - 1
        padded = torch.nn.functional.pad(returns, (0, 1))
        return turns.spread(self.row_advantages(padded, there, valid)[:-1])


def _states(
    prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """A number for each turn [S] int64, alike where the same tokens that the policy did not sample
    stand before it: what the environment said last, at a row's beginning its prompt."""
    numbers: dict[tuple[int, ...], int] = {}
    found: list[int] = []
    for prompt, is_real, tokens, sampled in zip(
        prompt_ids.tolist(), prompt_mask.tolist(), ids.tolist(), mask.tolist(), strict=True
    ):
        said = [token for token, real in zip(prompt, is_real, strict=True) if real]
        was_sampled = False
        for token, is_sampled in zip(tokens, sampled, strict=True):
            if is_sampled and not was_sampled:
                found.append(numbers.setdefault(tuple(said), len(numbers)))
                said = []
            elif not is_sampled:
                said.append(token)
            was_sampled = is_sampled
    return torch.tensor(found, dtype=torch.int64)


class GRPOLearner(GroupLearner):
    """A_i = (s_i − mean)/(std + 1e-4) (Shao et al. 2024); without std: Dr. GRPO."""

    def row_advantages(
        self, scores: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        return group_normalized(scores, groups, scale_by_std=self.config.scale_by_std, valid=valid)

    def rollout_advantages(
        self, batch: Batch, scores: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Also GDPO's, from the parts of the scores."""
        if self.config.reward_aggregation == "sum_then_normalize":
            return super().rollout_advantages(batch, scores, valid)
        names = [name for name in sorted(batch) if name.startswith(columns.REWARD_PART)]
        require(len(names) > 1, "reward_aggregation", self.config.reward_aggregation,
                "be 'sum_then_normalize' without several rewards", "there is nothing to add up",
                "Leave it out")  # fmt: skip
        weights = [n.replace(columns.REWARD_PART, columns.REWARD_WEIGHT) for n in names]
        parts, weights = (torch.stack([batch[n] for n in each]) for each in (names, weights))
        return normalized_sum(
            parts, weights, batch[columns.GROUP], scale_by_std=self.config.scale_by_std, valid=valid
        )


class RLOOLearner(GroupLearner):
    """A_i = s_i − mean of the others (Ahmadian et al. 2024)."""

    def row_advantages(
        self, scores: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        advantages = leave_one_out(scores, groups, valid)
        return masked_whiten(advantages, valid) if self.config.whiten_advantages else advantages

    def rollout_advantages(
        self, batch: Batch, scores: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Those of each environment for themselves, where `whiten_advantages` acts."""
        parts = self._by_environment(batch) if self.config.whiten_advantages else []
        if len(parts) < 2:
            return super().rollout_advantages(batch, scores, valid)
        groups = batch[columns.GROUP]
        found = [self.row_advantages(scores, groups, valid & rows).where(rows, 0.0)
                 for _, rows in parts]  # fmt: skip
        return torch.stack(found).sum(dim=0)


class ReinforcePPLearner(RLHFLearner):
    """REINFORCE++ (Hu 2025): discounted reward-to-go of token rewards, whitened globally; without
    whitening it is REINFORCE with a constant baseline."""

    def compute_advantages(self, batch: Batch, scores: torch.Tensor, kl: torch.Tensor) -> Batch:
        mask = columns.sampled_mask(batch)
        rewards = self.token_rewards(batch, scores, kl)
        returns = reinforce_returns(rewards, mask, self.config.gamma)
        if self.config.whiten_advantages:
            returns = self.whitened(batch, returns, mask)
        elif self.config.baseline:
            returns = (returns - self.config.baseline) * mask
        return {columns.ADVANTAGES: returns}


class DistillationLearner(RLHFLearner):
    """On-policy distillation (Agarwal et al. 2024, "GKD"): scores are measured, not learnt from."""

    def prepare(self, batch: Batch) -> Batch:
        """Rows of a data set get the policy's log-probs, as if it had written them: ratios and the
        distance from the policy before the update are then what they are of the others."""
        if columns.FROM_DATA in batch:
            rows = columns.fetched([batch[columns.FROM_DATA]])[0].nonzero().squeeze(1)
            scored = self.evaluate_rows(take_rows(batch, rows), [columns.LOGPROBS])
            logprobs, rows = batch[columns.SAMPLER_LOGPROBS], rows.to(self._device)
            logprobs = logprobs.index_copy(0, rows, scored[columns.LOGPROBS])
            batch = {**batch, columns.SAMPLER_LOGPROBS: logprobs}
        return super().prepare(batch)

    def _log_objective(
        self, batch: Batch, processed: torch.Tensor, kl: torch.Tensor | None
    ) -> None:
        """Leaves out rows of a data set."""
        if columns.FROM_DATA in batch:
            rows = (~columns.fetched([batch[columns.FROM_DATA]])[0]).nonzero().squeeze(1)
            if not len(rows):
                return
            batch, rows = take_rows(batch, rows), rows.to(processed.device, non_blocking=True)
            processed, kl = processed[rows], None if kl is None else kl[rows]
        super()._log_objective(batch, processed, kl)

    def compute_advantages(self, batch: Batch, scores: torch.Tensor, kl: torch.Tensor) -> Batch:
        return {columns.ADVANTAGES: torch.zeros_like(batch[columns.OLD_LOGPROBS])}


class PPOPtxLearner(RLHFLearner):
    """γ_ptx is `ptx_coeff`; 0 is plain PPO."""

    def build(self) -> None:
        super().build()
        self.num_ptx_texts = 0  # position in the pretraining text
        self._ptx_source = self._text_source("ptx_data")
        self._ptx_eval_source = self._text_source("ptx_eval_data")

    def _text_source(self, name: str) -> BatchSource | MixedSource | None:
        if (data := getattr(self.config, name)) is None:
            return None
        # Here, since other algorithms read no texts.
        from rllib_llm.data.mixture import batches_of
        from rllib_llm.data.texts import TextSource

        return batches_of(
            TextSource, data, name=name,
            tokenizer=self.module[DEFAULT_MODULE_ID].unwrapped().tokenizer,
            max_length=self.config.ptx_max_length, seed=self.config.seed or 0, loss_on="all",
            model=self.config.pretrained_model, chat_template=self.config.chat_template,
        )  # fmt: skip

    def prepare(self, batch: Batch) -> Batch:
        self._text_not_measured = True
        return super().prepare(batch)

    def start_minibatch(self, minibatch: Batch) -> None:
        """Also takes the mini-batch's texts: with γ_ptx = 0 they are still measured, on one
        mini-batch per update."""
        super().start_minibatch(minibatch)
        self._texts: Batch | None = None
        if self._ptx_source is not None and (self.config.ptx_coeff or self._text_not_measured):
            self._text_not_measured = False
            num_texts = self.config.ptx_batch_size * self.world_size
            self._texts = self._on_device(self._ptx_source.batch(self.num_ptx_texts, num_texts))
            self.num_ptx_texts += num_texts
            self.means.add_count("loss/ptx_avg", 1)

    def compute_advantages(self, batch: Batch, scores: torch.Tensor, kl: torch.Tensor) -> Batch:
        mask = columns.sampled_mask(batch)
        rewards = self.token_rewards(batch, scores, kl)
        if self.config.whiten_rewards:
            rewards = self.whitened(batch, rewards, mask, shift_mean=False)
        gamma = self.effective.use("gamma", self.config.gamma)
        lambda_ = self.effective.use("lambda_", self.config.lambda_)
        advantages, returns = gae(rewards, batch[columns.OLD_VALUES], mask, gamma, lambda_)
        if self.config.whiten_advantages:
            advantages = self.whitened(batch, advantages, mask)
        return {columns.ADVANTAGES: advantages, columns.RETURNS: returns}

    def extra_losses(self) -> Iterator[Callable[[], torch.Tensor]]:
        """γ_ptx · mean cross-entropy over the tokens of `ptx_batch_size` texts per learner."""
        texts = self._texts
        if texts is None:
            return
        num_tokens = texts[columns.LOSS_MASK].sum().clamp(min=1)
        if not self.effective.use("ptx_coeff", self.config.ptx_coeff):
            for micro_batch, outputs in self.evaluated(texts):
                self._text_loss(micro_batch, outputs, num_tokens)
            return

        def text_loss(micro_batch: Batch) -> torch.Tensor:
            coeff = self.effective.use("ptx_coeff", self.config.ptx_coeff)
            return coeff * self._text_loss(micro_batch, self.forward(micro_batch), num_tokens)

        yield from self.losses_of(texts, text_loss, {})

    def _text_loss(self, texts: Batch, outputs: Batch, num_tokens: torch.Tensor) -> torch.Tensor:
        losses = cross_entropy_tokens(outputs[columns.TEXT_LOGPROBS], texts[columns.LOSS_MASK])
        loss = losses.sum() / num_tokens
        self.means.add_total("loss/ptx_avg", loss)
        return loss

    def held_out_ptx_loss(self) -> tuple[float, int]:
        """(cross-entropy in nats, tokens), summed over this learner's share of the held-out
        pretraining texts, if there are any; weights and position are untouched."""
        source = self._ptx_eval_source
        return (0.0, 0) if source is None else self.loss_of_texts(source.batch(0, len(source)))

    def get_extra_state(self) -> dict[str, Any]:
        return {**super().get_extra_state(), "num_ptx_texts": self.num_ptx_texts}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        self.num_ptx_texts = state["num_ptx_texts"]
