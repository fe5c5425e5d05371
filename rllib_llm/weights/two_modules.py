"""The weights of a policy and of its opponent in one publication.

The policy's stand under their own names, so that who wants nothing else finds it.
"""

from __future__ import annotations

import dataclasses

import torch

from rllib_llm.weights.exporter import ExportableModule
from rllib_llm.weights.flat_buffer import FlatBuffer

OPPONENT = "opponent"  # id of the second module, beside RLlib's default
MARK = f"{OPPONENT}/"  # before each name of its weights


class TwoModules:
    """Both as one module whose weights are exported."""

    def __init__(self, policy: ExportableModule, opponent: ExportableModule) -> None:
        self._policy, self._opponent = policy, opponent

    def published_tensors(self) -> dict[str, torch.Tensor]:
        """As of each of them."""
        return _joined(self._policy.published_tensors(), self._opponent.published_tensors())

    def published_state(self) -> dict[str, torch.Tensor]:
        """As of each of them."""
        return _joined(self._policy.published_state(), self._opponent.published_state())


def _joined(
    policy: dict[str, torch.Tensor], opponent: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return {**policy, **{f"{MARK}{name}": tensor for name, tensor in opponent.items()}}


def split(flat: FlatBuffer) -> tuple[FlatBuffer, FlatBuffer]:
    """What was published of the policy and of its opponent, in the same bytes."""
    policy = {name: slot for name, slot in flat.slots.items() if not name.startswith(MARK)}
    opponent = {
        name.removeprefix(MARK): slot for name, slot in flat.slots.items() if name not in policy
    }
    return dataclasses.replace(flat, slots=policy), dataclasses.replace(flat, slots=opponent)
