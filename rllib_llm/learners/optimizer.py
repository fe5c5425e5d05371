"""The optimiser's parameter groups, and its state as checkpoints hold it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rllib_llm.learners.sharding import shard_optimizer_state
from rllib_llm.modules.shards import gather

# --- which weights decay ------------------------------------------------------------------------

# transformers' `Trainer.get_decay_parameter_names`: these names, and torch's LayerNorm.
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decay_groups(module: nn.Module, params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups of `params`, which are some of `module`'s: what decays, then what does not,
    each where there is any."""
    kept = {
        id(parameter)
        for name, part in module.named_modules()
        for own, parameter in part.named_parameters(recurse=False)
        if isinstance(part, nn.LayerNorm) or _NOT_DECAYED.search(f"{name}.{own}".lower())
    }
    decayed = [parameter for parameter in params if id(parameter) not in kept]
    rest = [parameter for parameter in params if id(parameter) in kept]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


# --- its state: whole tensors on the CPU, however weights are cut -------------------------------


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
