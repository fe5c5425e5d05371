"""Received weights put into a module: parameters that are the shared memory, or copies of it.

Aliased, a module costs a node nothing beside the one copy in its object store, and a load moves no
bytes. That is for modules that only read: on the CPU, without critic, in the learner's own dtype.
All others (GPU, another dtype, a module that trains) are copied into, in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from rllib_llm.weights.flat_buffer import FlatBuffer, unpack
from rllib_llm.weights.read_only import can_protect, protect


class LoadableModule(Protocol):
    """What a module must offer to be loaded."""

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Its parameters and buffers themselves, by name."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Copies `state` into them."""


class ModuleLoader:
    """Loads flat buffers into one module.

    alias: parameters may become views of shared memory. Writing to such a parameter ends the
    process (`read_only.py`); `own_memory` gives it memory of its own again.
    """

    def __init__(self, *, alias: bool):
        self._alias = alias and can_protect()
        self.is_aliased = False

    def load(self, module: LoadableModule, flat: FlatBuffer) -> None:
        """Makes the module compute with the weights in `flat`.

        Raises:
            ValueError: they are those of another architecture.
        """
        own = module.own_tensors()
        if self._alias and _same_layout(own, flat):
            protect(flat.data)
            for name, view in unpack(flat).items():
                own[name].data = view
            self.is_aliased = True
        else:
            self.own_memory(module)
            module.set_state(unpack(flat))

    def own_memory(self, module: LoadableModule) -> None:
        """Gives every aliased parameter a copy that can be written to."""
        if not self.is_aliased:
            return
        for tensor in {id(t): t for t in module.own_tensors().values()}.values():
            tensor.data = tensor.data.clone()
        self.is_aliased = False


def _same_layout(own: Mapping[str, torch.Tensor], flat: FlatBuffer) -> bool:
    return own.keys() == flat.slots.keys() and all(
        tensor.device.type == "cpu"
        and tensor.dtype == flat.slots[name].dtype
        and tuple(tensor.shape) == flat.slots[name].shape
        for name, tensor in own.items()
    )
