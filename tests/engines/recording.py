"""What a CUDA graph does, on any device: a function's operations repeated on the same tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero"}  # no graph can hold these


class Recording(TorchDispatchMode):
    """Repeats the operations of one call of `function`; Python that chose them is not run again.

    `inputs`: storages, by address, that it reads and did not make. They may be changed between two
    replays but must not be freed.
    """

    def __init__(self, function: Callable[[], torch.Tensor], previous: Recording | None) -> None:
        super().__init__()
        function()
        self.calls: list[tuple] = []
        self.made: set[int] = set()
        self.inputs: set[int] = set()
        with self:
            self.result = function()
        self.result.fill_(torch.nan)  # a graph computes nothing while it is recorded

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in _WAITS, f"{func} waits for the device"
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.inputs |= _addresses((args, kwargs)) - self.made
        self.made |= _addresses(result) - self.inputs
        self.calls.append((func, args, kwargs, result))
        return result

    def replay(self) -> torch.Tensor:
        for func, args, kwargs, recorded in self.calls:
            results = zip(tree_leaves(recorded), tree_leaves(func(*args, **kwargs)), strict=True)
            for old, new in results:
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return self.result


def _addresses(tree) -> set[int]:
    return {
        leaf.untyped_storage().data_ptr()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor)
    }
