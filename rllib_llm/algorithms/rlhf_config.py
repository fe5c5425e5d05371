"""Settings that every RLHF algorithm shares: sampling, scores, advantages, the KL and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_llm.algorithms.evaluation import evaluate_held_out
from rllib_llm.algorithms.language_model import LanguageModelConfig
from rllib_llm.algorithms.settings.checks import check_reference, require
from rllib_llm.algorithms.settings.engine_checks import check_engine, check_pipeline
from rllib_llm.algorithms.settings.lookup import defaults
from rllib_llm.algorithms.settings.rlhf_checks import (
    check_evaluation,
    check_loss,
    check_sampling,
    check_transport,
)
from rllib_llm.algorithms.settings.section_method import SectionMethod
from rllib_llm.algorithms.settings.setting import Section
from rllib_llm.algorithms.settings.tables import rllib
from rllib_llm.algorithms.settings.tables.environment import PROMPTS, REWARDS
from rllib_llm.algorithms.settings.tables.loss import LOSS, REFERENCE
from rllib_llm.algorithms.settings.tables.model import SAMPLER_FAULTS
from rllib_llm.algorithms.settings.tables.sampling import SAMPLING
from rllib_llm.algorithms.settings.tables.weights import WEIGHTS
from rllib_llm.rollouts.env_runner import RLHFEnvRunner


class RLHFConfig(LanguageModelConfig):
    """Settings shared by PPO-ptx, GRPO, RLOO and REINFORCE++."""

    sections: tuple[Section, ...] = (
        *LanguageModelConfig.sections,
        SAMPLING,
        PROMPTS,
        REWARDS,
        REFERENCE,
        LOSS,
        WEIGHTS,
        SAMPLER_FAULTS,
    )
    rllib_sections: tuple[Section, ...] = (*rllib.COMMON, *rllib.ONLINE)

    sampling = SectionMethod()
    prompts = SectionMethod()
    rewards = SectionMethod()
    reference = SectionMethod()
    weights = SectionMethod()
    weight_broadcast = SectionMethod("weights")  # its name before there were sections

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class)
        # Runner: whole completions, judged in batches; its state is a position, kept here.
        self.env_runner_cls = RLHFEnvRunner
        self.batch_mode = "complete_episodes"
        self.merge_env_runner_states = False
        self.broadcast_env_runner_states = False
        self.sample_timeout_s = None
        self.delay_between_env_runner_restarts_s = 1.0
        self.num_env_runners = 0
        self.create_local_env_runner = False
        self.enable_connectors = False
        # Evaluation on held-out prompts, greedy, through RLlib's evaluation samplers.
        self.evaluation_duration = 64
        self.evaluation_duration_unit = "episodes"
        self.custom_evaluation_function = evaluate_held_out
        self.evaluation_error_after_n_consecutive_skips = 3

    def implied(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The loss of whole completions weighs each completion alike, unless told otherwise."""
        follows = super().implied(given)
        is_default = self.loss_reduction == defaults(type(self)).loss_reduction
        if given.get("policy_loss") == "rloo" and is_default:
            follows["loss_reduction"] = "sequence_mean"
        return follows

    def get_evaluation_config_object(self):
        """As RLlib's; evaluation is greedy unless its config has `explore: true`."""
        config = super().get_evaluation_config_object()
        if config is not None and not isinstance(self.evaluation_config, AlgorithmConfig):
            config.explore = (self.evaluation_config or {}).get("explore", False)
        return config

    def module_class(self) -> type:
        from rllib_llm.modules.causal_lm import CausalLMModule

        return CausalLMModule

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return super()._model_config_auto_includes | {
            "temperature": self.temperature,
            "critic": self.critic,
            "critic_model": self.critic_model,
        }

    @property
    def reference_place(self) -> str:
        """Who computes the reference's log-probs: "environment", "policy" or "learner"."""
        return self.reference_in or ("environment" if self.lora is None else "policy")

    @property
    def num_prompts_per_iteration(self) -> int:
        """Prompt groups that one iteration samples."""
        return self.total_train_batch_size // self.num_completions

    def validate(self) -> None:
        super().validate()
        check_loss(self)
        check_reference(self)
        check_sampling(self)
        check_transport(self)
        check_engine(self)
        check_pipeline(self)
        require(
            self.env is not None, "env", self.env, "an environment's name or class",
            "prompts and rewards come from it", "Set env: rllib_llm/RLHF-v0, say",
        )  # fmt: skip
        check_evaluation(self)
