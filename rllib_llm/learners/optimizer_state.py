"""Optimiser state as checkpoints hold it: whole tensors on the CPU, however weights are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rllib_llm.learners.sharding import shard_optimizer_state
from rllib_llm.modules.shards import gather


def whole_state(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> dict[str, Any]:
    """`state_dict()` with whole moments on the CPU, numbered as `params`, the model's order: it is
    the same however they are grouped. Where weights are shards, all learners must call it, and all
    but the first get no moments."""
    tensors = gather(
        {
            (i, key): value
            for i, param in enumerate(params)
            for key, value in optimizer.state.get(param, {}).items()
        }
    )
    whole: dict[int, dict[str, torch.Tensor]] = {}
    for (i, key), tensor in tensors.items():
        whole.setdefault(i, {})[key] = tensor.cpu()
    number = {id(param): i for i, param in enumerate(params)}
    groups = [
        {**group, "params": [number[id(param)] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": whole, "param_groups": groups}


def load_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], params: Sequence[nn.Parameter]
) -> None:
    """Takes moments from `state`, numbered as `params`, and keeps the optimiser's own settings.

    The config that the optimiser was made with may differ from the checkpoint's: population-based
    search restores one trial's state under another trial's settings.
    """
    grouped = [param for group in optimizer.param_groups for param in group["params"]]
    place = {id(param): i for i, param in enumerate(grouped)}
    moments = shard_optimizer_state(state["state"], list(params))
    optimizer.load_state_dict(
        {
            "state": {place[id(params[i])]: entry for i, entry in moments.items()},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
