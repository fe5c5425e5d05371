"""Supervised fine-tuning on prompt/completion rows, conversations or plain texts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Literal

from rllib_llm.algorithms.supervised import Supervised, SupervisedConfig
from rllib_llm.config.experts import BALANCE, expert_rules
from rllib_llm.config.sections import SectionMethod
from rllib_llm.data.mixture import MixedSource
from rllib_llm.data.texts import BatchSource, TextSource
from rllib_llm.shared.setting import Section, Settings, setting


class LossOn(Settings):
    """The loss."""

    loss_on: Literal["completion", "all"] = setting(
        "completion", "the tokens in the loss", note='"completion": without prompts and user '
        'turns; "all": every token.', trl="completion_only_loss assistant_only_loss",
    )  # fmt: skip


LOSS_ON = Section.of("training", LossOn)


class SFTConfig(SupervisedConfig):
    """The loss is the mean cross-entropy of the completion's (or the assistant's) tokens."""

    sections: tuple[Section, ...] = (*SupervisedConfig.sections, LOSS_ON, BALANCE)
    rules = (*SupervisedConfig.rules, expert_rules)
    source_class = TextSource
    module_path = "rllib_llm.modules.rl_modules:CausalLMModule"
    learner_path = "rllib_llm.learners.supervised_learners:SFTLearner"

    experts = SectionMethod()

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or SFT)

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        own = {"router_aux_coeff": self.router_aux_coeff}
        return super()._model_config_auto_includes | own

    def make_source(self, data: Any, **settings: Any) -> BatchSource | MixedSource:
        return super().make_source(data, loss_on=self.loss_on, **settings)


class SFT(Supervised):
    """RLlib Algorithm; see `SFTConfig`. Results: loss/sft, eval/loss, eval/perplexity."""

    config: SFTConfig
    config_class = SFTConfig

    def summarize(self, totals: Counter[str]) -> dict[str, float]:
        means = super().summarize(totals)
        return {**means, "perplexity": math.exp(min(means["loss"], 50.0))}
