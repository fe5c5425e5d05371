"""Which weights decay: all but norms and biases, as transformers' and TRL's Trainer has it."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

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
