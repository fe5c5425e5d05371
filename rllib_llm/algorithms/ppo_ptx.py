"""PPO-ptx (Ouyang et al. 2022): PPO with a KL to the SFT model and a pretraining loss."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.algorithm_config import NotProvided

from rllib_llm.algorithms.rlhf import RLHF
from rllib_llm.algorithms.rlhf_config import RLHFConfig
from rllib_llm.algorithms.settings.checks import check_range, require


class PPOPtxConfig(RLHFConfig):
    """`ptx_coeff=0` (the default) is plain PPO for language models."""

    ignored_settings = ("scale_by_std", "drop_zero_variance_groups")

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or PPOPtx)
        self.critic = "shared"
        self.num_epochs = 4
        self.minibatch_size = 32
        self.ptx_coeff = 0.0
        self.ptx_data: Any = None
        self.ptx_eval_data: Any = None
        self.ptx_batch_size = 8
        self.ptx_max_length = 128

    def training(
        self,
        *,
        ptx_coeff: float = NotProvided,
        ptx_data: Any = NotProvided,
        ptx_eval_data: Any = NotProvided,
        ptx_batch_size: int = NotProvided,
        ptx_max_length: int = NotProvided,
        **kwargs,
    ):
        """Settings of the pretraining loss; others are passed on to `RLHFConfig`.

        Args:
            ptx_coeff: γ, weight of the mean cross-entropy of pretraining tokens (InstructGPT: 27.8
                against a loss summed differently; here 0.1 to 1 is a start). 0: only measured.
            ptx_data: file, data set, hub id or dotted path of texts; None: no pretraining loss.
            ptx_eval_data: held-out texts, the same way; every evaluation reports their loss as
                eval/ptx_loss, in nats per token. None: not measured.
            ptx_batch_size: texts per optimiser step and learner.
            ptx_max_length: tokens kept of each text.
        """
        super().training(**kwargs)
        self._assign(locals(), PPOPtxConfig.training)
        return self

    def get_default_learner_class(self) -> type:
        from rllib_llm.learners.ppo_ptx_learner import PPOPtxLearner

        return PPOPtxLearner

    def validate(self) -> None:
        super().validate()
        require(
            self.critic in ("shared", "separate"), "critic", self.critic,
            "'shared' or 'separate'", "PPO's advantages come from a critic",
            "Use GRPO or RLOO to train without one",
        )  # fmt: skip
        check_range(
            self, "ptx_coeff", least=0, reason="it weighs a loss", remedy="Use 0 to switch it off"
        )
        check_range(self, "ptx_batch_size", least=1, reason="it counts texts", remedy="Raise it")
        check_range(
            self, "ptx_max_length", least=2, reason="every token but the first is predicted",
            remedy="Raise it",
        )  # fmt: skip
        require(
            self.ptx_coeff == 0 or self.ptx_data is not None, "ptx_data", self.ptx_data,
            f"given with ptx_coeff={self.ptx_coeff}", "the pretraining loss needs text",
            "Name a text file, or set ptx_coeff=0",
        )  # fmt: skip


class PPOPtx(RLHF):
    """RLlib Algorithm; see `PPOPtxConfig`. Results beside those of `RLHF`: loss/ptx_avg, and
    eval/ptx_loss with `ptx_eval_data`."""

    @classmethod
    def get_default_config(cls) -> PPOPtxConfig:
        return PPOPtxConfig(algo_class=cls)

    def held_out_losses(self) -> dict[str, float]:
        if self.config.ptx_eval_data is None:
            return {}
        sums = self.learner_group.foreach_learner(lambda learner: learner.held_out_ptx_loss())
        totals, counts = zip(*(result.get() for result in sums), strict=True)
        return {"ptx_loss": sum(totals) / sum(counts)}
