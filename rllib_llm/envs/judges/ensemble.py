"""Several reward models as one, and how much they disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rllib_llm.envs.judges.frozen_reward_model import RewardModelScorer
from rllib_llm.envs.judges.reward_functions import Judge

COMBINATIONS = ("mean", "min", "mean_minus_std")
DISAGREEMENT = "reward_disagreement"


class RewardModelEnsemble(Judge):
    """One score from several reward models, lower where they disagree, as is chosen.

    What a policy gains from the faults of one model is not gained from all of them (Coste et al.
    2023, "Reward model ensembles help mitigate overoptimization", section 3.2: mean, worst case,
    uncertainty weighted; they subtract the variance, here it is the standard deviation). The
    metric `reward_disagreement` is the standard deviation over the models.

    Args:
        models: of each the arguments of `RewardModelScorer`, or just its model. Their scores must
            be on one scale, as those are that the RewardModel stage normalised.
        combine: "mean", "min" or "mean_minus_std".
        std_coeff: of "mean_minus_std".
        shared: arguments of all of them.

    Raises:
        ValueError: fewer than two models, another combination, a coefficient below 0.
    """

    name = "reward_model"

    def __init__(
        self,
        models: Sequence[Any],
        *,
        combine: str = "mean",
        std_coeff: float = 1.0,
        **shared: Any,
    ) -> None:
        if len(models) < 2 or combine not in COMBINATIONS or std_coeff < 0:
            raise ValueError(
                f"models={list(models)!r}, combine={combine!r}, std_coeff={std_coeff!r} must be "
                f"two or more, one of {COMBINATIONS}, and at least 0: they become one score. "
                "Correct them, or name one model as 'model'."
            )
        self._combine, self._std_coeff = combine, std_coeff
        named = [dict(m) if isinstance(m, Mapping) else {"model": m} for m in models]
        self.scorers = [RewardModelScorer(**{**shared, **chosen}) for chosen in named]
        self.wants_tokens = all(scorer.wants_tokens for scorer in self.scorers)

    def __call__(self, *tokens: Tensor, **texts: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores [B] float32 and their disagreement, of what `RewardModelScorer` takes."""
        scores = torch.stack([scorer(*tokens, **texts) for scorer in self.scorers])
        return (
            combined(scores, self._combine, self._std_coeff),
            {DISAGREEMENT: scores.std(dim=0, correction=0)},
        )

    def metrics(self) -> dict[str, float]:
        """Those of each model, under its number."""
        return {
            f"{number}/{name}": value
            for number, scorer in enumerate(self.scorers)
            for name, value in scorer.metrics().items()
        }


def combined(scores: Tensor, combine: str, std_coeff: float = 1.0) -> Tensor:
    """[B] float32 of scores [models, B]: their mean, least, or mean - std_coeff * std (ddof 0)."""
    if combine == "min":
        return scores.min(dim=0).values
    mean = scores.mean(dim=0)
    if combine == "mean":
        return mean
    return mean - std_coeff * scores.std(dim=0, correction=0)
