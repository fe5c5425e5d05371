"""REINFORCE++: advantages normalised over the whole batch (Hu 2025)."""

from __future__ import annotations

from rllib_llm.algorithms.rlhf import RLHF
from rllib_llm.algorithms.rlhf_config import CriticFreeConfig
from rllib_llm.shared.setting import Section, Settings, setting, when


class Baseline(Settings):
    """The baseline."""

    baseline: float = setting(
        0.0, "a constant that is taken off each token's return",
        acts=(when("whiten_advantages", "is off", lambda value: not value, "Turn that off",
                   ", which takes the mean off"),),
    )  # fmt: skip


class ReinforcePPConfig(CriticFreeConfig):
    """Global advantage normalisation. `whiten_advantages=False` is REINFORCE with a constant
    `baseline`."""

    sections: tuple[Section, ...] = (*CriticFreeConfig.sections, Section.of("training", Baseline))
    ignored_settings = (
        *CriticFreeConfig.ignored_settings,
        "lambda_",
        "whiten_rewards",
        "scale_by_std",
        "drop_zero_variance_groups",
        "reward_aggregation",
        "turn_advantages",
        "turn_advantage_coeff",
    )
    learner_path = "rllib_llm.learners.policy_learners:ReinforcePPLearner"

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or ReinforcePP)


class ReinforcePP(RLHF):
    """RLlib Algorithm; see `ReinforcePPConfig`."""

    config_class = ReinforcePPConfig
