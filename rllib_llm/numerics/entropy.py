"""Entropy control: a coefficient steered to a target, and the tokens of highest entropy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class AdaptiveEntropyCoefficient:
    """An entropy coefficient that is raised below a target entropy and lowered above it.

    c <- clip(c + delta, 0, 1) where the entropy is at most the target, else clip(c - delta, 0, 1);
    the bonus counts only where the entropy is at most the target (Skywork-OR1, He et al. 2025,
    section 3.2; bounds and delta as TRL's). `target` in nats per token.
    """

    def __init__(self, init: float, target: float, delta: float = 0.005):
        assert 0 <= init <= 1 and target > 0 and delta > 0, (init, target, delta)
        self._coeff = float(init)
        self._is_low = False  # whether the entropy measured last was at most the target
        self.target = float(target)
        self.delta = float(delta)

    @property
    def value(self) -> float:
        """The coefficient to use: 0 where the entropy is above the target."""
        return self._coeff if self._is_low else 0.0

    def update(self, entropy: float) -> float:
        """The coefficient to use after a batch of this mean entropy [nats per token]; one that is
        not finite changes nothing."""
        if math.isfinite(entropy):
            self._is_low = entropy <= self.target
            step = self.delta if self._is_low else -self.delta
            self._coeff = min(1.0, max(0.0, self._coeff + step))
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"coeff": self._coeff, "is_low": self._is_low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint's coefficient; target and delta stay the config's."""
        self._coeff, self._is_low = float(state["coeff"]), bool(state["is_low"])


def high_entropy_tokens(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """The masked-in tokens whose entropy is at least the (1 - share) quantile, bool [batch, T].

    Quantile over all masked-in tokens, interpolated linearly (Wang et al. 2025, "Beyond the 80/20
    Rule", section 5.1; TRL's `get_high_entropy_mask`). entropies, mask: [batch, T].
    """
    assert 0 < share <= 1, share
    # Masked-out tokens sort last, so that no number is read from the device.
    ranked = entropies.double().masked_fill(~mask, torch.inf).flatten().sort().values
    place = (1.0 - share) * (mask.sum() - 1).clamp(min=0).double()
    edges = torch.stack([place.floor(), place.ceil()]).long()
    low, high = ranked.index_select(0, edges).unbind()
    # As torch.quantile; equal numbers, infinite ones too, are not subtracted.
    threshold = torch.where(low == high, low, low + (high - low) * (place - place.floor()))
    return mask & (entropies.double() >= threshold)
