"""The learner's end of the way: its policy as tickets, by whichever transport."""

from __future__ import annotations

from typing import Protocol

import torch

from rllib_llm.weights.flat_buffer import lay_side_by_side
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
