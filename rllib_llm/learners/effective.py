"""The settings that an update really used, noted where they are used.

A setting travels far: YAML, Tune, a config, perhaps a checkpoint of another trial, a learner in
another process. What is reported under `effective/` is read at the end of that way: from the
optimiser's parameter groups, and where a coefficient meets the loss.
"""

from __future__ import annotations

from typing import TypeVar

import torch

Setting = TypeVar("Setting", bound=float | None)

FROM_OPTIMIZER = ("lr", "eps", "weight_decay")


class EffectiveSettings:
    """The latest value of every setting that was used since the last `pop`."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def use(self, name: str, value: Setting) -> Setting:
        """Returns `value`, and notes it; None, a setting that is off, is not noted."""
        if value is not None:
            self._values[name] = float(value)
        return value

    def read_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes learning rate and the other settings of the step that `optimizer` took."""
        group = optimizer.param_groups[0]
        for name in FROM_OPTIMIZER:
            self.use("adam_epsilon" if name == "eps" else name, group[name])
        for i, beta in enumerate(group["betas"], start=1):
            self.use(f"adam_beta{i}", beta)

    def pop(self) -> dict[str, float]:
        """All values by name, then forgets them."""
        values, self._values = self._values, {}
        return values
