"""The few results that Tune's own tables show: at the top of a result, under short names.

Tune's reporter takes the first four numbers of a result for columns and asks nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Short name: where it stands in a result, "" for its top. The first four that there are become
# columns; every stage has four, so that none is filled with a counter of RLlib's.
HEADLINE: Mapping[str, tuple[str, str]] = {
    "reward": ("objective", "scores"),
    "held_out_reward": ("eval", "scores"),
    "kl": ("objective", "kl"),
    "length": ("train", "output_length"),
    "sft_loss": ("loss", "sft"),
    "rm_loss": ("loss", "reward_model"),
    "dpo_loss": ("loss", "dpo"),
    "held_out_loss": ("eval", "loss"),
    "accuracy": ("train", "accuracy"),
    "held_out_accuracy": ("eval", "accuracy"),
    "entropy": ("policy", "entropy_avg"),
    "tokens_per_s": ("throughput", "tokens_per_s"),
    "episode": ("", "episode"),
    "lr": ("", "lr"),
}


def with_headline(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result with what a person looks for first before everything else."""
    head = {}
    for name, (group, key) in HEADLINE.items():
        values = result.get(group) if group else result
        if isinstance(values, Mapping) and key in values:
            head[name] = values[key]
    return {**head, **result}
