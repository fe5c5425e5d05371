"""On-policy distillation: the policy samples, a teacher says what it would have written (Agarwal et
al. 2024, "On-Policy Distillation of Language Models")."""

from __future__ import annotations

from rllib_llm.algorithms.rlhf import RLHF
from rllib_llm.algorithms.rlhf_config import CriticFreeConfig


class DistillationConfig(CriticFreeConfig):
    """The divergence from a teacher at each token that the policy wrote. Rewards are optional: they
    are measured. The settings are those of distillation beside other algorithms (`distill_coeff`).

    `on_policy_share` below 1 is GKD's mixture with a data set's completions, 0 alone is supervised
    learning from a teacher's distributions. `teacher="policy"` with `teacher_prompt` is
    self-distillation (SDFT, OPSD).
    """

    ignored_settings = (
        *CriticFreeConfig.ignored_settings,
        "gamma",
        "lambda_",
        "scale_by_std",
        "whiten_advantages",
        "whiten_rewards",
        "drop_zero_variance_groups",
        "reward_aggregation",
        "turn_advantages",
        "turn_advantage_coeff",
    )
    learner_path = "rllib_llm.learners.policy_learners:DistillationLearner"

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or Distillation)
        self.num_completions = 1
        self.ref_kl_coeff = 0.0
        self.distill_coeff = 1.0


class Distillation(RLHF):
    """RLlib Algorithm; see `DistillationConfig`."""

    config_class = DistillationConfig
