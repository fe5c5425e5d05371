"""GRPO, RLOO and REINFORCE++: the RLHF loop without a critic."""

from __future__ import annotations

from rllib_llm.algorithms.rlhf import RLHF
from rllib_llm.algorithms.rlhf_config import RLHFConfig
from rllib_llm.algorithms.settings.checks import require


class GRPOConfig(RLHFConfig):
    """Group-normalised advantages, k3 KL in the loss (Shao et al. 2024, "DeepSeekMath").

    Published variants are settings: Dr. GRPO `loss_reduction="dr_grpo", scale_by_std=False`; DAPO
    `loss_reduction="token_mean", clip_param_high=0.28, ref_kl_coeff=0, overlong_buffer=...,
    drop_zero_variance_groups=True`; GSPO `policy_loss="gspo"`, clip ranges near 3e-4; CISPO
    `policy_loss="cispo", clip_param=1.0, clip_param_high=4.0, loss_reduction="token_mean"`: weights
    up to 5, nothing held from below.
    """

    ignored_settings = ("gamma", "lambda_", "whiten_advantages", "whiten_rewards")

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or GRPO)
        self.num_completions = 8
        self.ref_kl_in = "loss"
        self.ref_kl_estimator = "k3"
        self.ref_kl_coeff = 0.04
        self.loss_reduction = "sequence_mean"

    def get_default_learner_class(self) -> type:
        from rllib_llm.learners.critic_free_learners import GRPOLearner

        return GRPOLearner

    def validate(self) -> None:
        super().validate()
        require_group(self)


class RLOOConfig(RLHFConfig):
    """Leave-one-out baseline, KL in the score (Ahmadian et al. 2024, "Back to Basics").

    The loss is PPO's of each token, as in OpenRLHF and verl. The paper's and TRL's, where the whole
    completion is one action, is `policy_loss="rloo", loss_reduction="sequence_mean"`.
    """

    ignored_settings = ("gamma", "lambda_", "scale_by_std", "whiten_rewards")

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or RLOO)
        self.num_completions = 4
        self.whiten_advantages = False

    def get_default_learner_class(self) -> type:
        from rllib_llm.learners.critic_free_learners import RLOOLearner

        return RLOOLearner

    def validate(self) -> None:
        super().validate()
        require_group(self)


class ReinforcePPConfig(RLHFConfig):
    """REINFORCE++ with global advantage normalisation (Hu 2025).

    `whiten_advantages=False` is REINFORCE with nothing taken off the reward.
    """

    ignored_settings = ("lambda_", "whiten_rewards", "scale_by_std", "drop_zero_variance_groups")

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or ReinforcePP)

    def get_default_learner_class(self) -> type:
        from rllib_llm.learners.critic_free_learners import ReinforcePPLearner

        return ReinforcePPLearner


def require_group(config: RLHFConfig) -> None:
    """Raises ValueError where a group algorithm is given single completions or a critic."""
    require(
        config.num_completions >= 2, "num_completions", config.num_completions, "at least 2",
        "the baseline is the rest of the group", "Use 4 to 16",
    )  # fmt: skip
    require(
        config.critic == "none", "critic", config.critic, "'none'",
        "advantages come from the group", "Use PPOPtx to train a critic",
    )  # fmt: skip


class GRPO(RLHF):
    """RLlib Algorithm; see `GRPOConfig`."""

    @classmethod
    def get_default_config(cls) -> GRPOConfig:
        return GRPOConfig(algo_class=cls)


class RLOO(RLHF):
    """RLlib Algorithm; see `RLOOConfig`."""

    @classmethod
    def get_default_config(cls) -> RLOOConfig:
        return RLOOConfig(algo_class=cls)


class ReinforcePP(RLHF):
    """RLlib Algorithm; see `ReinforcePPConfig`."""

    @classmethod
    def get_default_config(cls) -> ReinforcePPConfig:
        return ReinforcePPConfig(algo_class=cls)
