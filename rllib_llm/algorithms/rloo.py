"""RLOO: the baseline is the rest of the group (Ahmadian et al. 2024, "Back to Basics")."""

from __future__ import annotations

from rllib_llm.algorithms.rlhf import RLHF
from rllib_llm.algorithms.rlhf_config import CriticFreeConfig, group_rules


class RLOOConfig(CriticFreeConfig):
    """Leave-one-out baseline, KL in the score.

    The loss is PPO's of each token, as in OpenRLHF and verl. The paper's and TRL's, where the whole
    completion is one action, is `policy_loss="rloo"`, which makes `loss_reduction` "sequence_mean".
    """

    ignored_settings = (
        *CriticFreeConfig.ignored_settings,
        "lambda_",
        "scale_by_std",
        "reward_aggregation",
        "whiten_rewards",
    )
    learner_path = "rllib_llm.learners.policy_learners:RLOOLearner"

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or RLOO)
        self.num_completions = 4
        self.whiten_advantages = False

    rules = (*CriticFreeConfig.rules, group_rules)


class RLOO(RLHF):
    """RLlib Algorithm; see `RLOOConfig`."""

    config_class = RLOOConfig
