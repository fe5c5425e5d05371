"""Optimiser state as checkpoints hold it: whole tensors on the CPU, however weights are cut."""

from __future__ import annotations

from typing import Any

import torch

from rllib_llm.learners.sharding import shard_optimizer_state
from rllib_llm.modules.shards import gather


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`state_dict()` with whole moments on the CPU; where weights are shards, all learners must
    call it, and all but the first get no moments."""
    state = optimizer.state_dict()
    tensors = gather(
        {(i, key): value for i, entry in state["state"].items() for key, value in entry.items()}
    )
    whole: dict[int, dict[str, torch.Tensor]] = {}
    for (i, key), tensor in tensors.items():
        whole.setdefault(i, {})[key] = tensor.cpu()
    return {**state, "state": whole}


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Takes moments from `state` and keeps the optimiser's own settings.

    The config that the optimiser was made with may differ from the checkpoint's: population-based
    search restores one trial's state under another trial's settings.
    """
    groups = optimizer.param_groups
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    moments = shard_optimizer_state(state["state"], groups[0]["params"])
    optimizer.load_state_dict({**state, "state": moments})
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
