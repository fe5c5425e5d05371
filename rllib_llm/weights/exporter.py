"""The learner's end of the way: its policy as tickets, by whichever transport."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from rllib_llm.weights.flat_buffer import FlatBuffer, lay_side_by_side
from rllib_llm.weights.transport import Ticket
from rllib_llm.weights.transports import Transports


class ExportableModule(Protocol):
    """What a module must offer for its weights to be exported."""

    def published_tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers themselves that receivers need, by name."""

    def published_state(self) -> dict[str, torch.Tensor]:
        """The same, detached, sharing memory with the module."""


class WeightsExporter:
    """Exports the policy of one learner: made when that is built, its `weights_exporter`, and gone
    with it. What a transport keeps between exports, such as buffers on a GPU, is kept here."""

    def __init__(self, module: ExportableModule):
        self._module = module
        self._transports = Transports()
        self._is_laid_out = False

    def state(self) -> dict[str, torch.Tensor]:
        """The policy without critic and value head; of one under adapters these alone. Where
        learners hold shards, all must ask, and all but the first get {}."""
        return self._module.published_state()

    def export(self, transport: str, *, checksum: bool = False) -> Ticket | None:
        """A ticket for `state()` as it is now, see `Transport`; None where that is {}."""
        if not self._is_laid_out:
            lay_side_by_side(self._module.published_tensors())
            self._is_laid_out = True
        state = self.state()
        if not state:
            return None
        return self._transports[transport].export(state, checksum=checksum)


# --- The weights of a policy and of its opponent in one publication

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
