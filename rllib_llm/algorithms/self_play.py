"""Self-play: two policies in one MultiRLModule, or one against a frozen copy, by GRPO.

games ─▶ rows of both players ─▶ advantages by player ─▶ each row's own policy
"""

from __future__ import annotations

import copy
from typing import Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec

from rllib_llm.algorithms.grpo import GRPO, GRPOConfig
from rllib_llm.config.checks import require
from rllib_llm.config.section_method import SectionMethod
from rllib_llm.config.setting import Section
from rllib_llm.config.tables.self_play import SELF_PLAY
from rllib_llm.shared.ray_compat import local_learner
from rllib_llm.weights.exporter import OPPONENT


class SelfPlayConfig(GRPOConfig):
    """GRPO's, and the second player. Environments are subclasses of `envs.self_play.SelfPlayEnv`.

    A batch has `train_batch_size_per_learner` games, and rows of both players. Both learn in the
    driver's process; samplers are given the weights of both.
    """

    sections: tuple[Section, ...] = (*GRPOConfig.sections, SELF_PLAY)
    self_play = SectionMethod()

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or SelfPlay)

    def get_default_learner_class(self) -> type:
        from rllib_llm.learners.self_play_learner import SelfPlayLearner

        return SelfPlayLearner

    def get_multi_rl_module_spec(self, **kwargs: Any) -> MultiRLModuleSpec:
        """RLlib's spec of the policy, and one like it of the opponent."""
        spec = super().get_multi_rl_module_spec(**kwargs)
        own = spec.rl_module_specs[DEFAULT_MODULE_ID]
        other = copy.copy(own)
        if self.opponent_model is not None:
            other.model_config = {**own.model_config, "pretrained_model": self.opponent_model}
        spec.rl_module_specs = {DEFAULT_MODULE_ID: own, OPPONENT: other}
        return spec

    def validate(self) -> None:
        super().validate()
        require(
            not self.num_learners, "num_learners", self.num_learners, "0",
            "both players learn in the driver's process", "Leave it out",
        )  # fmt: skip
        require(
            not self.streams and self.off_policy is None, "max_staleness, oversample and filters",
            (self.max_staleness, self.oversample, self.filters), "their defaults",
            "both players sample with the newest weights", "Leave them out",
        )  # fmt: skip
        require(
            self.opponent_model is None or not self.ref_kl_coeff, "ref_kl_coeff",
            self.ref_kl_coeff, "0 with an opponent_model",
            "the reference is what the policy started from, not the opponent", "Set it to 0",
        )  # fmt: skip
        frozen = self.opponent == "frozen"
        self.policies_to_train = [DEFAULT_MODULE_ID] if frozen else None


class SelfPlay(GRPO):
    """RLlib Algorithm; see `SelfPlayConfig`."""

    config: SelfPlayConfig

    @classmethod
    def get_default_config(cls) -> SelfPlayConfig:
        return SelfPlayConfig(algo_class=cls)

    def setup(self, config) -> None:
        super().setup(config)
        opponent = local_learner(self.learner_group).module[OPPONENT].unwrapped()
        named = (group.local_env_runner for _, group in self.evaluation_groups.values())
        for runner in (self.env_runner, self.eval_env_runner, *named):
            if runner is not None:
                runner.sampler.share_opponent(opponent)

    def publish_next(self) -> None:
        """As of all loops; a frozen opponent may be given the policy's weights."""
        from rllib_llm.learners.self_play_learner import copy_weights

        every, version = self.config.opponent_every, self.weights_version + 1
        if self.config.opponent == "frozen" and every and version % every == 0:
            copy_weights(local_learner(self.learner_group).module)
        super().publish_next()
