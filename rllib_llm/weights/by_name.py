"""The transports by the name that `weights_transport` and tickets give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from rllib_llm.weights.direct import DirectTransport
from rllib_llm.weights.in_store import StoreTransport
from rllib_llm.weights.on_device import CudaIpcTransport
from rllib_llm.weights.transport import Transport


class Transports:
    """One process's end of each transport that it has used.

    get: what stands for `ray.get`, with the timeout of a transfer.
    """

    def __init__(self, get: Callable[[ray.ObjectRef], Any] = ray.get):
        self._get = get
        self._made: dict[str, Transport] = {}

    def __getitem__(self, name: str) -> Transport:
        """Made when it is first asked for. A name that is not ours is one of Ray's transports."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Transport:
        if name == "store":
            return StoreTransport()
        if name == "cuda_ipc":
            return CudaIpcTransport()
        return DirectTransport(name, get=self._get)
