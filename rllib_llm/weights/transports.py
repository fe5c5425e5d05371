"""Weights through the object store: everywhere, one copy on each node, which receivers may alias.

sender    tensors on the CPU ── put, one copy ──▶ object store
          tensors on a GPU ── copy ──▶ page-locked memory ── put ──▶ object store
receiver  a view of the store's own pages
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import torch

from rllib_llm.shared.dotted import import_dotted
from rllib_llm.weights.direct import DirectTransport
from rllib_llm.weights.flat_buffer import FlatBuffer, ScatteredBuffer, StagingBuffer, scatter
from rllib_llm.weights.on_device import CudaIpcTransport
from rllib_llm.weights.transport import Ticket, Transport


class StoreTransport:
    """See `Transport`. A ticket is to be put into the store before the next export, and before the
    tensors change; there it is valid for as long as somebody refers to it, opened or not."""

    def __init__(self) -> None:
        self._staging = StagingBuffer()

    def export(
        self, tensors: dict[str, torch.Tensor], *, checksum: bool = False
    ) -> FlatBuffer | ScatteredBuffer:
        """See `Transport`."""
        if all(tensor.device.type == "cpu" for tensor in tensors.values()):
            return scatter(tensors, checksum=checksum)
        return self._staging.pack(tensors, checksum=checksum)

    @contextmanager
    def open(self, ticket: FlatBuffer) -> Iterator[FlatBuffer]:
        """The buffer itself, which stays valid after the block."""
        yield ticket


# --- The transports by the names of `weights_transport` and of tickets: ours, or dotted paths


class Transports:
    """One process's end of each transport that it has used.

    get: what stands for `ray.get`, with the timeout of a transfer.
    """

    def __init__(self, get: Callable[[ray.ObjectRef], Any] = ray.get):
        self._get = get
        self._made: dict[str, Transport] = {}

    def __getitem__(self, name: str) -> Transport:
        """Made when it is first asked for. A dotted path leads to somebody's own; any other name
        that is not ours is one of Ray's."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Transport:
        if name == "store":
            return StoreTransport()
        if name == "cuda_ipc":
            return CudaIpcTransport()
        if is_own(name):
            return _OwnTransport(name)
        return DirectTransport(name, get=self._get)


def is_own(name: str) -> bool:
    """Whether a transport's name is the dotted path of somebody's own."""
    return "." in name or ":" in name


@dataclass(frozen=True)
class _OwnTicket:
    """What somebody's own transport gave, and the path that leads to it in other processes."""

    transport: str
    ticket: Any
    num_bytes: int


class _OwnTransport:
    """The transport that a class or function of no arguments makes, by its dotted path."""

    def __init__(self, path: str):
        self._path = path
        self._made: Transport = import_dotted(path, name="weights_transport")()

    def export(self, tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> Ticket:
        """See `Transport`."""
        ticket = self._made.export(tensors, checksum=checksum)
        return _OwnTicket(self._path, ticket, sum(tensor.nbytes for tensor in tensors.values()))

    def open(self, ticket: _OwnTicket) -> AbstractContextManager[FlatBuffer]:
        """See `Transport`."""
        return self._made.open(ticket.ticket)
