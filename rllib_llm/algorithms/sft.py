"""Supervised fine-tuning on prompt/completion rows, conversations or plain texts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rllib_llm.algorithms.supervised import Supervised, SupervisedConfig
from rllib_llm.config.setting import Section
from rllib_llm.config.supervised import LOSS_ON
from rllib_llm.data.texts import TextSource


class SFTConfig(SupervisedConfig):
    """The loss is the mean cross-entropy of the completion's (or the assistant's) tokens."""

    sections: tuple[Section, ...] = (*SupervisedConfig.sections, LOSS_ON)

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or SFT)

    def module_class(self) -> type:
        from rllib_llm.modules.rl_modules import CausalLMModule

        return CausalLMModule

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return super()._model_config_auto_includes | {"temperature": 1.0, "critic": "none"}

    def get_default_learner_class(self) -> type:
        from rllib_llm.learners.supervised_learners import SFTLearner

        return SFTLearner

    def make_source(
        self, data: Any, *, tokenizer: Any, max_length: int, shuffle: bool
    ) -> TextSource:
        return TextSource(
            data,
            tokenizer=tokenizer,
            max_length=max_length,
            seed=self.seed or 0,
            loss_on=self.loss_on,
            shuffle=shuffle,
        )


class SFT(Supervised):
    """RLlib Algorithm; see `SFTConfig`. Results: loss/sft, eval/loss, eval/perplexity."""

    config: SFTConfig

    @classmethod
    def get_default_config(cls) -> SFTConfig:
        return SFTConfig(algo_class=cls)

    def summarize(self, totals: Counter[str]) -> dict[str, float]:
        means = super().summarize(totals)
        return {**means, "perplexity": math.exp(min(means["loss"], 50.0))}
