"""Mean and standard deviation of a reward model's scores, kept in its folder's config.json.

With them scores have mean 0 and standard deviation 1 on reference samples, whatever the scale of
the reward model (Stiennon et al. 2020; vwxyzjn, "The N implementation details of RLHF with PPO").
The stage that trains a reward model writes them; whoever loads it reads them.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from rllib_llm.modules.model_source import (
    DOTTED,
    build_from_dotted,
    load_with_retries,
    source_kind,
)

MEAN_KEY, STD_KEY = "rllib_llm_score_mean", "rllib_llm_score_std"


def write_score_normalization(target: Any, mean: float, std: float) -> None:
    """Stores mean and std of the raw scores in `target`: a model folder, or a config to be saved.

    Raises:
        ValueError: numbers that cannot normalise.
    """
    check_normalization(mean, std)
    values = {MEAN_KEY: float(mean), STD_KEY: float(std)}
    if not isinstance(target, (str, os.PathLike)):
        for key, value in values.items():
            setattr(target, key, value)
        return
    path = Path(target) / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def read_score_normalization(source: Any) -> tuple[float, float] | None:
    """Returns (mean, std) of raw scores, or None where none were stored.

    source: a config, or a model setting (folder, hub id, dotted path).
    """
    config = source
    if isinstance(source, (str, os.PathLike)):
        kind, value = source_kind(source)
        if kind == DOTTED:
            config = build_from_dotted(value)[0].config
        else:
            config = load_with_retries(lambda: AutoConfig.from_pretrained(value), value, kind)
    mean, std = getattr(config, MEAN_KEY, None), getattr(config, STD_KEY, None)
    if mean is None or std is None:
        return None
    check_normalization(mean, std)
    return float(mean), float(std)


def check_normalization(mean: float, std: float) -> None:
    """Raises ValueError where (score - mean) / std would not be a number."""
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ValueError(
            f"normalize={(mean, std)!r} must be a finite mean and a standard deviation above 0: "
            "scores become (score - mean) / std. Measure both on reference samples; a deviation "
            "of 0 means that the model gives every text the same score."
        )
