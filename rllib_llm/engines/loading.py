"""Published weights put into a model that an engine owns."""

from __future__ import annotations

import torch
from torch import nn

# Prefix of the Hugging Face model's parameters in the state of the RLModule around it.
TRUNK = "model."


def copy_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copies weights, named as in the policy's state, into the model's parameters.

    Raises:
        ValueError: names that the model does not have, or of which it misses some, or other shapes;
            nothing is copied then. Tied parameters may come under one name.
    """
    own = model.state_dict()
    named = {}
    for name, tensor in weights.items():
        short = name.removeprefix(TRUNK)
        named[short if short in own else name] = tensor
    loaded = {own[name].data_ptr() for name in named if name in own}
    missing = [name for name in own if name not in named and own[name].data_ptr() not in loaded]
    unknown = sorted(set(named) - set(own))
    if missing or unknown:
        raise ValueError(
            f"weights={sorted(named)[:3]!r}... must name the model's parameters: "
            f"{missing[:3]} are missing and {unknown[:3]} are unknown. Load the weights of the "
            "same model."
        )
    for name, tensor in named.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"weights[{name!r}].shape={tuple(tensor.shape)!r} must be "
                f"{tuple(own[name].shape)!r}: the parameter has it. Load the weights of the same "
                "model."
            )
    for name, tensor in named.items():
        own[name].copy_(tensor)
