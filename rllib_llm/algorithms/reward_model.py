"""Reward-model training on preference pairs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rllib_llm.algorithms.supervised import Supervised, SupervisedConfig
from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT
from rllib_llm.data.preferences import PairSource
from rllib_llm.data.texts import TextSource
from rllib_llm.shared.setting import Section, Settings, setting


class ScoreSettings(Settings):
    """The scores."""

    center_rewards_coeff: float = setting(
        0.0, "the weight of the squared scores, which keeps their mean near 0",
        note='Eisenstein et al. 2023, "Helping or Herding?"; 0: off, 0.01 is usual.', least=0,
        trl="center_rewards_coefficient",
    )  # fmt: skip
    normalization_data: Any = setting(
        None, "reference texts on which scores are normalised to mean 0 and standard deviation 1",
        note="In the same form as SFT data, usually the policy's samples before training; each is "
        "truncated to `max_length` tokens, EOS included. None: the held-out pairs.",
    )  # fmt: skip


REWARD_MODEL = Section.of("training", ScoreSettings)


class RewardModelConfig(SupervisedConfig):
    """A classifier with one output, or a causal LM whose trunk gets one, on (chosen, rejected)."""

    sections: tuple[Section, ...] = (*SupervisedConfig.sections, REWARD_MODEL)
    trains_adapters = False
    source_class = PairSource
    module_path = "rllib_llm.modules.reward_model_module:RewardModelModule"
    learner_path = "rllib_llm.learners.supervised_learners:RewardModelLearner"

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or RewardModel)


class RewardModel(Supervised):
    """RLlib Algorithm; see `RewardModelConfig`. Results: loss/reward_model, train/accuracy,
    eval/{accuracy, loss, score_mean, score_std}.

    The mean and standard deviation of the scores of reference samples (`normalization_data`, else
    the held-out pairs) go into the saved model's config, so that an environment that loads it
    gives scores of mean 0 and standard deviation 1 (Ziegler 2019).
    """

    config: RewardModelConfig
    config_class = RewardModelConfig

    def read_data(self) -> None:
        super().read_data()
        self._reference_source: TextSource | None = None
        if self.config.normalization_data is not None:
            self._reference_source = TextSource(
                self.config.normalization_data, tokenizer=self.tokenizer,
                max_length=self.max_length, loss_on="all", shuffle=False, keep_end=True,
                model=self.config.given_model(), chat_template=self.config.chat_template,
            )  # fmt: skip

    def summarize(self, totals: Counter[str]) -> dict[str, float]:
        means = super().summarize(totals)
        for name in ("score", "score_square"):
            means.pop(name, None)
        return {**means, **_mean_and_std(totals)}

    def complete_checkpoint(self, folder: Path) -> None:
        self._write_normalization(folder / MODEL_IN_CHECKPOINT)

    def export_model(self, folder: str | Path) -> Path:
        folder = super().export_model(folder)
        self._write_normalization(folder)
        return folder

    def _write_normalization(self, folder: Path) -> None:
        """Notes mean and std of the scores that the model, as it is, gives reference samples."""
        from rllib_llm.modules.sequence_scores import write_score_normalization

        if self._reference_source is not None:
            source = self._reference_source
            totals = self.totals(source, len(source), lambda each, batch: each.score_texts(batch))
            results = _mean_and_std(totals)
        elif self._eval_source is not None:
            results = self.held_out_means()
        else:
            return
        if results["score_std"] > 0:
            write_score_normalization(folder, results["score_mean"], results["score_std"])


def _mean_and_std(totals: Counter[str]) -> dict[str, float]:
    """Mean and standard deviation of scores, from their sum, sum of squares and count."""
    mean = totals["score_sum"] / totals["score_count"]
    square = totals["score_square_sum"] / totals["score_count"]
    return {"score_mean": mean, "score_std": max(0.0, square - mean**2) ** 0.5}
