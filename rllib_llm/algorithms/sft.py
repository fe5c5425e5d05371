"""Supervised fine-tuning on prompt/completion rows, conversations or plain texts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from ray.rllib.algorithms.algorithm_config import NotProvided

from rllib_llm.algorithms.settings.checks import require
from rllib_llm.algorithms.supervised import Supervised, SupervisedConfig
from rllib_llm.data.texts import LOSS_ON, TextSource


class SFTConfig(SupervisedConfig):
    """The loss is the mean cross-entropy of the completion's (or the assistant's) tokens."""

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or SFT)
        self.loss_on = "completion"

    def training(self, *, loss_on: str = NotProvided, **kwargs):
        """Others are passed on to `SupervisedConfig`.

        Args:
            loss_on: "completion" leaves prompts and user turns out of the loss; "all" does not.
        """
        super().training(**kwargs)
        self._assign(locals(), SFTConfig.training)
        return self

    def module_class(self) -> type:
        from rllib_llm.modules.causal_lm import CausalLMModule

        return CausalLMModule

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return super()._model_config_auto_includes | {"temperature": 1.0, "critic": "none"}

    def get_default_learner_class(self) -> type:
        from rllib_llm.learners.sft_learner import SFTLearner

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

    def validate(self) -> None:
        super().validate()
        require(
            self.loss_on in LOSS_ON, "loss_on", self.loss_on, f"one of {LOSS_ON}",
            "it says which tokens are targets", "Use 'completion' to leave prompts out",
        )  # fmt: skip


class SFT(Supervised):
    """RLlib Algorithm; see `SFTConfig`. Results: loss/sft, eval/loss, eval/perplexity."""

    config: SFTConfig

    @classmethod
    def get_default_config(cls) -> SFTConfig:
        return SFTConfig(algo_class=cls)

    def summarize(self, totals: Counter[str]) -> dict[str, float]:
        means = super().summarize(totals)
        return {**means, "perplexity": math.exp(min(means["loss"], 50.0))}
