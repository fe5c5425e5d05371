"""The base of GRPO, RLOO and REINFORCE++: the RLHF loop without a critic."""

from __future__ import annotations

from rllib_llm.algorithms.rlhf_config import RLHFConfig
from rllib_llm.config.checks import require


class CriticFreeConfig(RLHFConfig):
    """Settings of algorithms whose advantages come from scores alone."""

    ignored_settings: tuple[str, ...] = ("critic_model", "vf_clip_param", "vf_loss_coeff")

    def validate(self) -> None:
        super().validate()
        require(
            self.critic == "none", "critic", self.critic, "'none'",
            "advantages come from the group or the batch, and a value head would not be trained",
            "Use PPOPtx to train a critic",
        )  # fmt: skip


def require_group(config: RLHFConfig) -> None:
    """Raises ValueError where a group algorithm is given single completions."""
    require(
        config.num_completions >= 2, "num_completions", config.num_completions, "at least 2",
        "the baseline is the rest of the group", "Use 4 to 16",
    )  # fmt: skip
