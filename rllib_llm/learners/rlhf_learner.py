"""From judged completions to one policy update: scores → token rewards → advantages → loss.

`prepare` runs once per update on the whole batch; `compute_loss_for_module` per micro-batch.
An algorithm is a subclass with one method, `compute_advantages`. The arithmetic is in `kl`,
`advantages`, `scores` and `losses`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.learners.batching import take_rows
from rllib_llm.learners.language_model_learner import LanguageModelLearner
from rllib_llm.learners.shared_passes import Batch, frozen_policy, own_reference
from rllib_llm.modules.logprobs import ReferencePolicy, Teacher
from rllib_llm.modules.model_source import TEACHER, check_vocabulary
from rllib_llm.numerics import losses, scores
from rllib_llm.numerics.advantages import masked_whiten, token_rewards
from rllib_llm.numerics.kl import KLCoefficient, kl_estimate
from rllib_llm.numerics.scores import RolloutRows, with_turn_rewards
from rllib_llm.shared import columns
from rllib_llm.shared.errors import require

if TYPE_CHECKING:
    from rllib_llm.learners.moving_average import MovingAverage
    from rllib_llm.learners.off_policy import OffPolicyCorrection, OldLogprobs
    from rllib_llm.numerics.entropy import AdaptiveEntropyCoefficient


class RLHFLearner(LanguageModelLearner):
    """Policy-gradient learner for whole completions; see the module docstring."""

    def build(self) -> None:
        self.ref_kl = KLCoefficient(
            self.config.ref_kl_coeff, self.config.ref_kl_target, self.config.ref_kl_horizon
        )
        self.entropy_coeff: AdaptiveEntropyCoefficient | None = None  # where there is a target
        if (target := self.config.entropy_target) is not None:
            from rllib_llm.numerics.entropy import AdaptiveEntropyCoefficient  # few runs need it

            self.entropy_coeff = AdaptiveEntropyCoefficient(
                self.config.entropy_coeff, target, self.config.entropy_coeff_delta
            )
        temperatures = [each.temperature for each in self.config.env_configs().values()]
        # By number of the environment, where one has another than the run.
        have_own = {*temperatures} != {self.config.temperature}
        self._temperatures = torch.tensor(temperatures) if have_own else None
        self.score_scales = {0: scores.RunningScoreScale()}  # by number of the environment
        self._advantages: torch.Tensor | None = None  # [B, T] of the update, where they are kept
        self._num_minibatches = 0  # of the current update, begun so far
        self._old_logprobs: OldLogprobs | None = None  # in half precision, of the current update
        super().build()
        self.correction: OffPolicyCorrection | None = None
        if self.config.off_policy is not None:
            from rllib_llm.learners.off_policy import OffPolicyCorrection  # few runs need it

            self.correction = OffPolicyCorrection.from_config(self.config, self.means)
        self._averages: list[MovingAverage] = []  # frozen copies that follow the policy
        # Of its own, unless the environment has it or the KL is off.
        place, is_on = self.config.reference_place, bool(self.config.ref_kl_coeff)
        self.reference: ReferencePolicy | None = None
        if is_on and place != "environment":
            self.reference = own_reference(self, copy=place != "policy")
        every, mix = self.config.reference_update_every, self.config.reference_update_mix
        self._follow(self.reference, every, mix)
        self.teacher = self._make_teacher()

    def compute_advantages(self, batch: Batch, scores: torch.Tensor, kl: torch.Tensor) -> Batch:
        """The columns `advantages` [B, T] and, with a critic, `returns` [B, T].

        `batch[columns.LOSS_MASK]` [B, T] says which tokens count: sampled by the policy, in rows
        that were judged. `scores` [B]: processed, 0 in invalid rows. `kl` [B, T]: estimate against
        the reference, 0 where masked out; to be used only with `self.reward_kl_coeff`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute_advantages.")

    def token_rewards(self, batch: Batch, scores: torch.Tensor, kl: torch.Tensor) -> torch.Tensor:
        """Reward of each token [B, T], as `numerics.advantages.token_rewards`; what conversations
        earned at their turns stands there."""
        mask = columns.sampled_mask(batch)
        rewards = token_rewards(scores, kl, mask, self.reward_kl_coeff)
        if columns.REWARDS not in batch:
            return rewards
        return with_turn_rewards(rewards, batch[columns.REWARDS], mask, RolloutRows.of_batch(batch))

    @property
    def reward_kl_coeff(self) -> float:
        """The KL coefficient for rewards: 0 when the KL is part of the loss instead."""
        if self.config.ref_kl_in != "reward":
            return 0.0
        return self.effective.use("ref_kl_coeff", self.ref_kl.value)

    # --- once per update ---------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Also the first learner's advantages, where rollouts are kept."""
        found, self._advantages = self._advantages, None
        return super().report() | ({} if found is None else {columns.ADVANTAGES: found})

    def prepare(self, batch: Batch) -> Batch:
        self._num_minibatches = 0
        batch = dict(batch)
        # A row whose judge failed keeps its tokens out of every sum.
        sampled, valid = columns.sampled_mask(batch), batch[columns.VALID]
        mask, is_valid = columns.fetched((sampled, valid))
        batch[columns.LOSS_MASK] = columns.moved(mask & is_valid.unsqueeze(1), self._device)
        require(columns.COMPLETION_EXPERTS in batch or not self.config.routing_replay,
                "routing_replay", True, "be False with this environment or sampler",
                "completions came without the experts that were chosen")  # fmt: skip
        if self._temperatures is not None:
            (numbers,) = columns.fetched([batch[columns.ENVIRONMENT]])
            of_rows = self._temperatures[numbers.long()]
            batch[columns.TEMPERATURE] = columns.moved(of_rows, self._device)
        batch.update(self._old_policy(batch))
        measured = self._reference_kl(batch)
        kl = torch.zeros_like(batch[columns.OLD_LOGPROBS]) if measured is None else measured
        processed, factors = self._process_scores(batch)
        if columns.REWARDS in batch:  # parts of the scores, which stay parts of them
            scale = columns.moved(factors, self._device).unsqueeze(1)
            batch[columns.REWARDS] = batch[columns.REWARDS] * scale
        # Before advantages: groups that these drop from the loss were sampled all the same.
        self._log_objective(batch, processed, measured)
        batch.update(self.compute_advantages(batch, processed, kl))
        if self.config.distill_coeff and self.teacher is None:
            require(columns.TEACHER_LOGPROBS in batch, "teacher_in", self.config.teacher_in,
                    "be 'learner' with this environment", "it says nothing of a teacher",
                    "Set teacher_in='learner'")  # fmt: skip
        if self.config.distill_coeff and not self._distills:
            self._add_teacher(batch)
        if self.config.mask_truncated:
            self._mask_truncated(batch)
        if self.config.top_entropy_share < 1:
            self._keep_high_entropy(batch)
        if self.entropy_coeff is not None:
            self._steer_entropy(self.entropy_coeff, batch, sampled)
        columns.remember_all(batch)  # it may have masked out more
        if self.config.store_rollouts and self.rank == 0:  # there when the means are
            self._advantages = batch[columns.ADVANTAGES].to("cpu", non_blocking=True)
        if measured is not None and self.config.ref_kl_target is not None:
            num_valid = (valid & RolloutRows.of_batch(batch).is_first).sum()
            mean_kl, num = torch.stack([kl.sum() / num_valid, num_valid]).tolist()
            # A KL that is not finite makes the loss so, and that update is refused.
            if num and math.isfinite(mean_kl):
                self.ref_kl.update(mean_kl, int(num))
        return batch

    def _mask_truncated(self, batch: Batch) -> None:
        """Takes completions that were cut off out of the loss."""
        here = columns.on_host(batch)
        mask, whole = columns.sampled_mask(here), RolloutRows.of_batch(here)
        finished = whole.at_end(here[columns.FINISHED])
        is_cut = ~finished & mask.any(dim=1)
        batch[columns.LOSS_MASK] = columns.moved(mask & finished.unsqueeze(1), self._device)
        self.means.add("train/masked_truncated", is_cut.float().mean() / self.world_size, 1)

    def _keep_high_entropy(self, batch: Batch) -> None:
        """Leaves the tokens of highest entropy an advantage."""
        from rllib_llm.numerics.entropy import high_entropy_tokens  # few runs need it

        entropies = self.evaluate_rows(batch, [columns.ENTROPY])[columns.ENTROPY]
        share = self.effective.use("top_entropy_share", self.config.top_entropy_share)
        kept = high_entropy_tokens(entropies, columns.sampled_mask(batch), share)
        batch[columns.ADVANTAGES] = batch[columns.ADVANTAGES].where(kept, 0.0)

    def _steer_entropy(
        self, coeff: AdaptiveEntropyCoefficient, batch: Batch, sampled: torch.Tensor
    ) -> None:
        """Takes the mean of -log π over tokens that π sampled as its entropy. They came from the
        host, where they still are: nothing is waited for."""
        given = (batch[columns.SAMPLER_LOGPROBS], sampled, batch[columns.VALID])
        logprobs, mask, valid = columns.fetched(given)
        mask = mask & valid.unsqueeze(1)
        entropy = -logprobs.double().where(mask, 0.0).sum() / mask.sum()
        coeff.update(float(entropy))

    def _make_teacher(self) -> ReferencePolicy | None:
        """The teacher that this learner owns. None where the environment has it, or none is."""
        config, chosen = self.config, dict(self.config.teacher_settings)
        if not config.distill_coeff or config.teacher_in == "environment":
            return None
        source = chosen.pop("model")
        if source == "policy":
            teacher = own_reference(self, copy=config.lora is None)
            self._follow(teacher, config.teacher_update_every, config.teacher_update_mix)
            return teacher
        tokenizer = self.module[DEFAULT_MODULE_ID].unwrapped().tokenizer
        check_vocabulary(TEACHER, source, tokenizer)
        return ReferencePolicy(frozen_policy(self, source, **chosen))

    def _add_teacher(self, batch: Batch) -> None:
        """Adds log teacher - log policy of the sampled tokens to their advantages."""
        from rllib_llm.numerics.distillation import sampled_advantages  # few runs need it

        name = columns.TEACHER_LOGPROBS
        if self.teacher is not None:
            rows = dict(batch)
            for its, own in columns.TEACHER_PROMPTS.items():
                rows[own] = rows.pop(its, rows[own])
            scored = self.evaluate_rows(
                rows, [columns.REF_LOGPROBS], ref_logprobs_of=self.teacher
            )
            batch[name] = scored[columns.REF_LOGPROBS]
        mask, coeff = columns.sampled_mask(batch), self.config.distill_coeff
        gain = sampled_advantages(batch[columns.OLD_LOGPROBS], batch[name], mask)
        coeff = self.effective.use("distill_coeff", coeff)
        batch[columns.ADVANTAGES] = batch[columns.ADVANTAGES] + coeff * gain
        share = mask.sum() * self.world_size
        self.means.add("train/teacher_kl", -gain.sum(), share)

    @property
    def _distills(self) -> bool:
        """Whether the divergence from a teacher is a part of the loss."""
        return bool(self.config.distill_coeff) and self.config.distill_loss == "divergence"

    def _follow(self, frozen: ReferencePolicy | None, every: int | None, mix: float) -> None:
        """Makes the weights of a frozen copy follow the policy's."""
        if frozen is not None and every is not None:
            from rllib_llm.learners.moving_average import MovingAverage  # few runs need it

            policy = self.module[DEFAULT_MODULE_ID].unwrapped().model
            self._averages.append(MovingAverage(frozen.model, policy, every, mix))

    def after_step(self) -> None:
        for average in self._averages:
            average.follow(self.num_updates)

    def _reference_kl(self, batch: Batch) -> torch.Tensor | None:
        """KL of the policy before the update from the reference, [B, T], None without one; adds
        the reference's log-probs to `batch` unless the environment did."""
        in_reward, estimator = self.config.ref_kl_in == "reward", self.config.ref_kl_estimator
        mask = columns.sampled_mask(batch)
        if self.reference is not None and in_reward and estimator == "full":
            name = columns.FULL_KL
            return self.evaluate_rows(batch, [name], full_kl_to=self.reference)[name]
        if self.reference is not None:
            name = columns.REF_LOGPROBS
            batch.update(self.evaluate_rows(batch, [name], ref_logprobs_of=self.reference))
        if columns.REF_LOGPROBS not in batch:
            require(self.ref_kl.value <= 0, "ref_kl_coeff", self.ref_kl.value,
                    "be 0 without a reference", "the environment gave no reference log-probs",
                    "Set env_config.reference or reference_in='learner'")  # fmt: skip
            return None
        estimate = kl_estimate(
            batch[columns.OLD_LOGPROBS],
            batch[columns.REF_LOGPROBS],
            estimator if in_reward else "k1",
        )
        return estimate.where(mask, 0.0)

    def forward_options(self) -> dict[str, Any]:
        full = self.config.ref_kl_in == "loss" and self.config.ref_kl_estimator == "full"
        options = super().forward_options()
        if full and self.ref_kl.value > 0:
            options["full_kl_to"] = self.reference
        if self._distills:
            options["distill_to"] = Teacher(self.config.distill_beta, self.teacher)
        return options

    def _old_policy(self, batch: Batch) -> Batch:
        """Log-probs and values of the policy before the update, each row by one learner.

        They are the sampler's, who had these weights, unless `off_policy` is set: log-probs are
        then recomputed where it says so, values always. Remote samplers have no critic. Log-probs
        are recomputed here where the KL of rewards, or its coefficient, is made of them, or a
        critic on the policy's trunk makes that pass anyway; else `start_update` asks for those that
        no other pass gives.
        """
        module = self.module[DEFAULT_MODULE_ID].unwrapped()
        has_critic = module.has_critic
        shares_trunk = has_critic and module.model_config["critic"] == "shared"
        fresh = self.config.off_policy is None
        has_reference = self.reference is not None or columns.REF_LOGPROBS in batch
        adapts = self.config.ref_kl_target is not None
        makes_kl = has_reference and (self.config.ref_kl_in == "reward" or adapts)
        recomputes = self.config.off_policy == "decoupled" and (makes_kl or shares_trunk)
        recomputes |= fresh and self._is_half and shares_trunk
        self._has_own_logprobs = recomputes
        old = {columns.OLD_LOGPROBS: batch[columns.SAMPLER_LOGPROBS]}
        names = {columns.LOGPROBS: columns.OLD_LOGPROBS} if recomputes else {}
        if fresh and has_critic and not recomputes and columns.SAMPLER_VALUES in batch:
            mask = columns.sampled_mask(batch)
            old[columns.OLD_VALUES] = batch[columns.SAMPLER_VALUES].where(mask, 0.0)
        elif has_critic:
            names[columns.VALUES] = columns.OLD_VALUES
        if names:
            outputs = self.evaluate_rows(batch, list(names))
            old.update({names[name]: column for name, column in outputs.items()})
        return old

    @property
    def _is_half(self) -> bool:
        """Whether log-probs of the same weights differ from pass to pass by more than round-off."""
        return self.config.dtype != "float32" or self.config.mixed_precision is not None

    def start_update(self, rows: Batch, minibatches: list[torch.Tensor]) -> None:
        """Old log-probs that are the learner's own, see `off_policy.py`."""
        self._old_logprobs = None
        mode = self.config.off_policy
        if not self._is_half and (self._has_own_logprobs or mode != "decoupled"):
            return
        if mode not in (None, "decoupled"):
            return
        from rllib_llm.learners.off_policy import OldLogprobs  # few runs need it

        self._old_logprobs = OldLogprobs(rows, minibatches[0], self.all_reduce)
        later = self._old_logprobs.later
        if len(later) and not self._has_own_logprobs:
            scored = self.evaluate_rows(take_rows(rows, later), [columns.LOGPROBS])
            old = rows[columns.OLD_LOGPROBS].clone()
            old[later] = scored[columns.LOGPROBS]
            rows[columns.OLD_LOGPROBS] = old

    def _process_scores(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [B] after penalties, clipping and running scaling, in this order, equal for all
        rows of a rollout; and on the host the factors [B] by which parts of a score must be
        multiplied to be scaled and clipped alike. All is computed there, and remembered."""
        config, batch = self.config, columns.on_host(batch)
        whole = RolloutRows.of_batch(batch)
        lengths = whole.total(columns.written_mask(batch).sum(dim=1))
        score = batch[columns.SCORES].float()
        factors = torch.ones_like(score)
        if config.missing_eos_penalty:
            finished = whole.at_end(batch[columns.FINISHED])
            score = scores.missing_eos_penalty(score, finished, config.missing_eos_penalty)
        if config.length_penalty:
            score = scores.length_penalty(score, lengths, config.length_penalty)
        if config.overlong_buffer:
            score = scores.overlong_penalty(
                score, lengths, config.max_new_tokens, config.overlong_buffer
            )
        if config.score_clip is not None:
            clipped = scores.clip_scores(score, config.score_clip)
            factors = torch.where(clipped == score, factors, clipped / score)
            score = clipped
        if config.scale_scores:
            counted = batch[columns.VALID] & whole.is_first
            for number, rows in self._by_environment(batch):
                scale = self.score_scales.setdefault(number, scores.RunningScoreScale())
                scale.update(score, counted & rows)
                score = torch.where(rows, scale.scale(score), score)
                factors = torch.where(rows, factors * scale.factor, factors)
        score = score.where(batch[columns.VALID], 0.0)
        return columns.moved(score, self._device), factors

    def _by_environment(self, batch: Batch) -> list[tuple[int, torch.Tensor]]:
        """The number of each environment that is scaled for itself, and its rows [B] bool; all as
        one where there is one, or the batch is scaled as a whole."""
        if columns.ENVIRONMENT not in batch or self.config.scale_scores_by == "batch":
            return [(0, torch.ones_like(batch[columns.VALID]))]
        (numbers,) = columns.fetched([batch[columns.ENVIRONMENT]])
        of_rows = batch[columns.ENVIRONMENT]
        return [(number, of_rows == number) for number in numbers.unique().tolist()]

    def whitened(
        self, batch: Batch, x: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True
    ) -> torch.Tensor:
        """`masked_whiten` of `x` [B, T], each environment for itself."""
        parts = [
            masked_whiten(x, mask & rows.unsqueeze(1), shift_mean=shift_mean)
            for _, rows in self._by_environment(batch)
        ]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)

    # --- per micro-batch ---------------------------------------------------------------------

    def start_minibatch(self, minibatch: Batch) -> None:
        mask = columns.sampled_mask(minibatch)
        self.denominators = losses.LossDenominators.count(
            mask, self.config.max_new_tokens, minibatch.get(columns.ROW_WEIGHT)
        )
        self._approx_kl_total = torch.zeros((), device=self._device)
        for name in (
            "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "val/clipfrac_avg",
            "val/ratio", "val/ratio_square", "loss/ref_kl_avg",
        ):  # fmt: skip
            self.means.add_count(name, self.denominators.num_tokens)
        self._num_minibatches += 1
        if self._num_minibatches == 1:
            self.means.add_count("sampler/logprob_gap", self.denominators.num_tokens)
        elif self._old_logprobs is not None:
            self._old_logprobs.recall(minibatch)
        if self.correction is not None:
            self.correction.start_minibatch(
                minibatch, mask, self._version, is_first=self._num_minibatches == 1
            )
        for name in ("loss/policy_avg", "loss/value_avg"):
            self.means.add_count(name, 1)
        if self._distills:
            for name in _TEACHER_MEANS.values():
                self.means.add_count(name, self.denominators.num_tokens)

    def before_loss(self, micro_batch: Batch, outputs: Batch) -> Batch:
        if self._old_logprobs is None or self._num_minibatches > 1:
            return micro_batch
        return self._old_logprobs.of_this_pass(micro_batch, outputs[columns.LOGPROBS])

    def forget_passes(self) -> None:
        self._approx_kl_total.zero_()

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: Batch, fwd_out: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        mask = columns.sampled_mask(batch)
        logprobs = fwd_out[columns.LOGPROBS]
        weights = batch.get(columns.ROW_WEIGHT)
        use = self.effective.use
        importance = None
        if self.correction is not None:
            batch, importance = self.correction.apply(batch, logprobs, mask)
        policy = losses.policy_loss(
            logprobs,
            batch[columns.OLD_LOGPROBS],
            batch[columns.ADVANTAGES],
            mask,
            kind=config.policy_loss,
            clip_low=use("clip_param", config.clip_param),
            clip_high=use(
                "clip_param_high",
                config.clip_param if config.clip_param_high is None else config.clip_param_high,
            ),
            dual_clip=use("dual_clip", config.dual_clip),
            weights=importance,
        )
        loss = policy_loss = self._reduce(policy.per_token, mask, weights)
        if config.ref_kl_in == "loss" and self.ref_kl.value > 0:
            loss = loss + use("ref_kl_coeff", self.ref_kl.value) * self._reduce(
                self._loss_kl(logprobs, batch, mask, fwd_out.get(columns.FULL_KL)), mask, weights
            )
        steered = self.entropy_coeff
        if coeff := config.entropy_coeff if steered is None else steered.value:
            loss = loss - use("entropy_coeff", coeff) * self._reduce(
                fwd_out[columns.ENTROPY].where(mask, 0.0), mask, weights
            )
        if columns.RETURNS in batch:
            vf_coeff = use("vf_loss_coeff", config.vf_loss_coeff)
            loss = loss + vf_coeff * self._value_loss(batch, fwd_out, mask)
        if self._distills:
            divergence = fwd_out[columns.DIVERGENCE].where(mask, 0.0)
            distill_coeff = use("distill_coeff", config.distill_coeff)
            loss = loss + distill_coeff * self._reduce(divergence, mask, weights)
            for column, name in _TEACHER_MEANS.items():
                self.means.add_total(name, fwd_out[column].where(mask, 0.0).sum())
        loss = loss + self.router_loss(fwd_out, mask.sum(), self.denominators.num_tokens)
        self.means.add_total("loss/policy_avg", policy_loss)
        self._log_policy(batch, fwd_out, policy.stats, mask)
        return loss

    def _reduce(
        self, per_token: torch.Tensor, mask: torch.Tensor, row_weights: torch.Tensor | None
    ) -> torch.Tensor:
        return losses.reduce_loss(
            per_token, mask, self.config.loss_reduction, self.denominators, row_weights
        )

    @property
    def _version(self) -> int:
        """The version of the weights before the current update, as samplers know it."""
        return self._weights_seq_no - 1

    def _loss_kl(
        self, logprobs: torch.Tensor, batch: Batch, mask: torch.Tensor,
        full: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """KL to the reference at each token, [B, T], with its gradient; `full`: the exact one."""
        if full is None:
            ratio = None
            if self.config.ref_kl_unbiased:
                ratio = losses.importance_ratio(logprobs, batch[columns.OLD_LOGPROBS], mask)
            full = kl_estimate(
                logprobs, batch[columns.REF_LOGPROBS], self.config.ref_kl_estimator, ratio=ratio
            )
        kl = full.where(mask, 0.0)
        self.means.add_total("loss/ref_kl_avg", kl.sum())
        return kl

    def _value_loss(self, batch: Batch, fwd_out: dict, mask: torch.Tensor) -> torch.Tensor:
        per_token, clipped = losses.value_loss(
            fwd_out[columns.VALUES], batch[columns.OLD_VALUES], batch[columns.RETURNS], mask,
            clip=self.effective.use("vf_clip_param", self.config.vf_clip_param),
        )  # fmt: skip
        value_loss = losses.reduce_loss(per_token, mask, "token_mean", self.denominators)
        self.means.add_total("loss/value_avg", value_loss)
        self.means.add_total("val/clipfrac_avg", clipped.sum())
        return value_loss

    def should_stop(self) -> bool:
        """Stops the epochs once the policy is too far from the one that sampled."""
        target = self.config.target_kl
        if target is None:
            return False
        total = self.all_reduce(self._approx_kl_total.clone())
        return bool(total / self.denominators.num_tokens > 1.5 * target)

    # --- metrics -----------------------------------------------------------------------------

    def _log_objective(
        self, batch: Batch, processed: torch.Tensor, kl: torch.Tensor | None
    ) -> None:
        """Known names of the field (TRL's PPO); means over valid rollouts. The whole batch is
        here, so each learner adds its share of them only. Without a reference (`kl` None) there is
        no KL to tell: a 0 would look measured."""
        mask, whole = columns.sampled_mask(batch), RolloutRows.of_batch(batch)
        valid = batch[columns.VALID] & whole.is_first
        kl_sum = torch.zeros_like(processed) if kl is None else whole.total(kl.sum(dim=1))
        non_score = -self.reward_kl_coeff * kl_sum
        entropy = -batch[columns.OLD_LOGPROBS].where(mask, 0.0).sum(dim=1)
        per_row = {
            **({} if kl is None else {"objective/kl": kl_sum}),
            "objective/entropy": whole.total(entropy),
            "objective/non_score_reward": non_score,
            "objective/rlhf_reward": processed + non_score,
            "objective/scores": batch[columns.SCORES].float(),
            "val/finished": whole.at_end(batch[columns.FINISHED]).float(),
            "train/output_length": whole.total(mask.sum(dim=1)).float(),
        }
        mine = torch.zeros_like(valid)
        mine[self.rank :: self.world_size] = True
        mine &= whole.is_first
        totals = torch.stack(list(per_row.values())).where(valid & mine, 0.0).sum(dim=1)
        num_valid = valid.sum()
        for name, total in zip(per_row, totals, strict=True):
            self.means.add(name, total, num_valid)
            if name == "val/finished":  # TRL's count of generated EOS tokens
                self.means.add("val/num_eos_tokens", total, 1)
        self.means.add("objective/ref_kl_coeff", self.ref_kl.value / self.world_size, 1)
        self.means.add("train/num_invalid", (~valid & mine).sum(), 1)

    def _log_policy(self, batch: Batch, fwd_out: dict, stats: dict, mask: torch.Tensor) -> None:
        with torch.no_grad():
            logprobs = fwd_out[columns.LOGPROBS]
            change = (logprobs - batch[columns.OLD_LOGPROBS]).where(mask, 0.0)
            ratio = stats["ratio"].where(mask, 0.0)
            approx_kl = 0.5 * change.square().sum()
            self._approx_kl_total += approx_kl
            self.means.add_total("policy/approxkl_avg", approx_kl)
            self.means.add_total("policy/clipfrac_avg", stats["clipped"].sum())
            entropy = fwd_out[columns.ENTROPY].where(mask, 0.0).sum()
            self.means.add_total("policy/entropy_avg", entropy)
            self.means.add_total("val/ratio", ratio.sum())
            self.means.add_total("val/ratio_square", ratio.square().sum())
            if self._num_minibatches == 1:  # the weights are still those that sampled
                gap = (logprobs - batch[columns.SAMPLER_LOGPROBS]).where(mask, 0.0)
                self.means.add_total("sampler/logprob_gap", gap.abs().sum())
            computed, padding = fwd_out[columns.COMPUTED_AND_PADDING].tolist()
            self.means.add("train/padding_share", padding / self.world_size, computed)

    # --- state -------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        return {
            **super().get_extra_state(),
            "ref_kl": self.ref_kl.state_dict(),
            "ref_kl_init": self.config.ref_kl_coeff,
            "score_scales": {n: scale.state_dict() for n, scale in self.score_scales.items()},
            "averages": [average.state_dict() for average in self._averages],
            "entropy_coeff": self.entropy_coeff and self.entropy_coeff.state_dict(),
            "entropy_init": self.config.entropy_coeff,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        scales = state.get("score_scales") or {0: state["score_scale"]}
        for number, scale in scales.items():
            known = self.score_scales.setdefault(int(number), scores.RunningScoreScale())
            known.load_state_dict(scale)
        # A coefficient that was set anew (population-based search) wins over the checkpoint's.
        if state["ref_kl_init"] == self.config.ref_kl_coeff and self.config.ref_kl_target:
            self.ref_kl.load_state_dict(state["ref_kl"])
        for average, kept in zip(self._averages, state.get("averages", ()), strict=False):
            average.load_state_dict(kept)
        steered, is_same = state.get("entropy_coeff"), state.get("entropy_init")
        if self.entropy_coeff and steered and is_same == self.config.entropy_coeff:
            self.entropy_coeff.load_state_dict(steered)


_TEACHER_MEANS = {
    columns.DIVERGENCE: "loss/distill_avg", columns.TEACHER_KL: "train/teacher_kl",
    columns.TEACHER_AGREES: "train/teacher_agreement",
}  # fmt: skip
