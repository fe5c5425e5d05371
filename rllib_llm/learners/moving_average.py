"""A frozen copy of the policy whose weights follow the policy's, every so many optimiser steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rllib_llm.modules.shards import gather, local_data, write_


class MovingAverage:
    """Weights w of `model`: w <- mix * policy + (1 - mix) * w every `every` optimiser steps.

    With mix = 1 they are reset to the policy's (TR-DPO, Gorbatovski et al. 2024, eq. 3 and 4).
    Averages of weights in 16 bits are kept in float32, since a small change would be rounded away.
    Shards of equal layout are averaged where they lie; all learners call `follow` at the same time.
    """

    def __init__(self, model: nn.Module, policy: nn.Module, every: int, mix: float) -> None:
        assert every >= 1 and 0 < mix <= 1, (every, mix)
        self._every, self._mix = every, mix
        own = dict(policy.named_parameters())
        self._weights = dict(model.named_parameters())
        self._sources = {name: own[name] for name in self._weights}
        self._averages = {
            name: weight if weight.dtype == torch.float32 or mix == 1 else weight.detach().float()
            for name, weight in self._weights.items()
        }

    @torch.no_grad()
    def follow(self, num_updates: int) -> None:
        """Takes the policy's weights in, if it is due after so many optimiser steps."""
        if num_updates % self._every:
            return
        for name, average in self._averages.items():
            source, target = self._sources[name].detach(), local_data(average)
            if type(source) is type(average.detach()) or not hasattr(source, "full_tensor"):
                source = local_data(source)
            else:  # the policy's root is sharded, a frozen model's is not
                source = source.full_tensor()
            target.lerp_(source.to(target.dtype), self._mix)
            self._use(name)

    def _use(self, name: str) -> None:
        if self._averages[name] is not self._weights[name]:
            local_data(self._weights[name]).copy_(local_data(self._averages[name]))

    def state_dict(self) -> dict[str, Any]:
        """The averages for a checkpoint, whole; with shards all learners must call it."""
        return {name: tensor.cpu() for name, tensor in gather(self._averages).items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores a checkpoint's averages."""
        for name, average in self._averages.items():
            write_(average, torch.as_tensor(state[name]))
            self._use(name)
