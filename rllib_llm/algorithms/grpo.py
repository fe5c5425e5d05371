"""GRPO: advantages from the scores of a group, no critic (Shao et al. 2024, "DeepSeekMath")."""

from __future__ import annotations

from rllib_llm.algorithms.rlhf import RLHF
from rllib_llm.algorithms.rlhf_config import CriticFreeConfig, group_rules


class GRPOConfig(CriticFreeConfig):
    """Group-normalised advantages, k3 KL in the loss.

    Published variants are settings: Dr. GRPO `loss_reduction="dr_grpo", scale_by_std=False`; DAPO
    `loss_reduction="token_mean", clip_param_high=0.28, ref_kl_coeff=0, overlong_buffer=...,
    filters=["reward_spread"]` (dynamic sampling); GSPO `policy_loss="gspo"`, clip ranges near 3e-4;
    CISPO `policy_loss="cispo", clip_param=1.0, clip_param_high=4.0, loss_reduction="token_mean"`:
    weights up to 5, nothing held from below.
    """

    ignored_settings = (
        *CriticFreeConfig.ignored_settings,
        "lambda_",
        "whiten_advantages",
        "whiten_rewards",
    )
    learner_path = "rllib_llm.learners.policy_learners:GRPOLearner"

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or GRPO)
        self.num_completions = 8
        self.ref_kl_in = "loss"
        self.ref_kl_estimator = "k3"
        self.ref_kl_coeff = 0.04
        self.loss_reduction = "sequence_mean"

    rules = (*CriticFreeConfig.rules, group_rules)


class GRPO(RLHF):
    """RLlib Algorithm; see `GRPOConfig`."""

    config_class = GRPOConfig
