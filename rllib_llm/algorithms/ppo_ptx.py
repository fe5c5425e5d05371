"""PPO-ptx (Ouyang et al. 2022): PPO with a KL to the SFT model and a pretraining loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_llm.algorithms.rlhf import RLHF
from rllib_llm.algorithms.rlhf_config import RLHFConfig
from rllib_llm.config.sections import wrong
from rllib_llm.shared.errors import Problem
from rllib_llm.shared.setting import Section, Settings, setting


class Ptx(Settings):
    """The pretraining loss."""

    ptx_coeff: float = setting(
        0.0, "γ, the weight of the mean cross-entropy of pretraining tokens",
        note="InstructGPT: 27.8 against a loss summed differently; here 0.05 to 1 is a start. 0: "
        "only measured.", least=0, also="ptx_coef ptx_loss_coef gamma_ptx",
    )  # fmt: skip
    ptx_data: Any = setting(
        None, "a file, data set, hub id or dotted path of pretraining texts",
        note="Or a list of {path: ..., weight: ...}. None: no pretraining loss.",
        also="pretrain_data pretraining_data",
    )  # fmt: skip
    ptx_eval_data: Any = setting(
        None, "held-out pretraining texts in the same form",
        note="Every evaluation reports their loss as eval/ptx_loss, in nats per token. None: not "
        "measured.",
    )  # fmt: skip
    ptx_batch_size: int = setting(
        8, "the pretraining texts per optimiser step and learner", unit="texts", least=1
    )
    ptx_max_length: int = setting(
        128, "how much of each pretraining text is kept", unit="tokens", least=2
    )


PTX = Section.of("training", Ptx)


class PPOPtxConfig(RLHFConfig):
    """`ptx_coeff=0` (the default) is plain PPO for language models."""

    sections: tuple[Section, ...] = (*RLHFConfig.sections, PTX)
    ignored_settings = (
        "scale_by_std",
        "drop_zero_variance_groups",
        "reward_aggregation",
        "turn_advantages",
        "turn_advantage_coeff",
    )
    learner_path = "rllib_llm.learners.policy_learners:PPOPtxLearner"

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or PPOPtx)
        self.critic = "shared"
        self.num_epochs = 4
        self.minibatch_size = 32

    def critic_rules(self) -> Iterator[Problem]:
        """There is a critic, and text for the pretraining loss."""
        if self.critic not in ("shared", "separate"):
            yield wrong(self, "critic", "'shared' or 'separate'",
                        "PPO's advantages come from a critic",
                        "Use GRPO or RLOO to train without one")  # fmt: skip
        if self.ptx_coeff and self.ptx_data is None:
            yield wrong(self, "ptx_data", f"given with ptx_coeff={self.ptx_coeff}",
                        "the pretraining loss needs text",
                        "Name a text file, or set ptx_coeff=0")  # fmt: skip

    rules = (*RLHFConfig.rules, critic_rules)


class PPOPtx(RLHF):
    """RLlib Algorithm; see `PPOPtxConfig`. Adds to the results of `RLHF`: loss/ptx_avg, and
    eval/ptx_loss with `ptx_eval_data`."""

    config_class = PPOPtxConfig

    def held_out_losses(self) -> dict[str, float]:
        if self.config.ptx_eval_data is None:
            return {}
        sums = self.learner_group.foreach_learner(lambda learner: learner.held_out_ptx_loss())
        totals, counts = zip(*(result.get() for result in sums), strict=True)
        return {"ptx_loss": sum(totals) / sum(counts)}
