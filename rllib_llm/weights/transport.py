"""How weights travel from process to process.

    sender                                                         receiver
    export(tensors) ──▶ ticket ── through the object store ──▶ open(ticket) ──▶ flat buffer

    StoreTransport     the bytes go through the store as well: the buffer is its own ticket
    CudaIpcTransport   they stay on a GPU that both work on, where the receiver reads them
    DirectTransport    they go from the sender's memory into the receiver's (NIXL)

Both ends are the same class, one object in each process; a ticket says which class opens it. One's
own is named by a dotted path, and its tickets may be anything that can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import ray
import torch

from rllib_llm.shared.dotted import import_dotted
from rllib_llm.weights.flat_buffer import (
    FlatBuffer,
    ScatteredBuffer,
    StagingBuffer,
    lay_side_by_side,
    scatter,
)

Ticket: TypeAlias = Any
"""An export's record in the object store. Ours have the name of the `transport` that opens them and
`num_bytes`, the size of the weights."""


class Transport(Protocol):
    """One way for weights from process to process."""

    def export(self, tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> Ticket:
        """A ticket for the current `tensors`. Each transport documents how long it is valid.

        checksum: the receiver compares a CRC-32 of the bytes, where they pass through host memory.
        """

    def open(self, ticket: Ticket) -> AbstractContextManager[FlatBuffer]:
        """The weights as a flat buffer, to be copied from within the block.

        Raises:
            TicketError: they cannot be read here, or, at the end of the block, were written over
                meanwhile: what was copied may be of two versions.
        """


class StoreTransport:
    """Weights through the object store: everywhere, one copy on each node, which receivers may
    alias. From a GPU they come by page-locked memory.

    A ticket is to be put into the store before the next export, and before the
    tensors change; there it is valid for as long as it is referred to, opened or not."""

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

TRANSPORTS = {
    "store": "rllib_llm.weights.transport.StoreTransport",
    "cuda_ipc": "rllib_llm.weights.direct.CudaIpcTransport",
}
_RAYS = "rllib_llm.weights.direct.DirectTransport"  # whose names are all others


class Transports:
    """One process's end of each transport that it has used, made when it is first asked for.

    get: what stands for `ray.get`, with the timeout of a transfer.
    """

    def __init__(self, get: Callable[[ray.ObjectRef], Any] = ray.get):
        self._get = get
        self._made: dict[str, Transport] = {}

    def _of(self, name: str) -> Transport:
        """A dotted path leads to a user's class; any other name that is not ours is Ray's."""
        if name not in self._made:
            path = TRANSPORTS.get(name, name if is_own(name) else _RAYS)
            made_by = import_dotted(path, name="weights_transport")
            self._made[name] = made_by(name, get=self._get) if path == _RAYS else made_by()
        return self._made[name]

    def export(
        self, name: str, tensors: dict[str, torch.Tensor], *, checksum: bool = False
    ) -> Ticket:
        """See `Transport`; the ticket says which transport opens it."""
        ticket = self._of(name).export(tensors, checksum=checksum)
        if not is_own(name):
            return ticket
        return _OwnTicket(name, ticket, sum(tensor.nbytes for tensor in tensors.values()))

    def open(self, ticket: Any) -> AbstractContextManager[FlatBuffer]:
        """See `Transport`."""
        found = ticket.ticket if isinstance(ticket, _OwnTicket) else ticket
        return self._of(ticket.transport).open(found)


def is_own(name: str) -> bool:
    """Whether a transport's name is the dotted path of a user's class."""
    return "." in name or ":" in name


@dataclass(frozen=True)
class _OwnTicket:
    """A user transport's ticket, with the dotted path by which other processes find the
    transport."""

    transport: str
    ticket: Any
    num_bytes: int


# --- The learner's end: its policy as tickets, by whichever transport


class WeightsExporter:
    """Exports the policy of one learner: created as its `weights_exporter`, and destroyed with it.
    Keeps a transport's state between exports, such as GPU buffers."""

    def __init__(self, module: Any):
        self._module = module
        self._transports = Transports()
        self._is_laid_out = False

    def state(self) -> dict[str, torch.Tensor]:
        """The policy without critic and value head; of one under adapters these alone. Where
        learners hold shards, all must ask, and all but the first get {}."""
        return self._module.published_state()

    def export(
        self, transport: str, *, checksum: bool = False, shards: bool = False
    ) -> Ticket | None:
        """A ticket for `state()` as it is now, see `Transport`; None where that is {}. `shards`: of
        this learner's part of it, see `flat_buffer.join`."""
        if not self._is_laid_out:
            lay_side_by_side(self._module.published_tensors())
            self._is_laid_out = True
        state = self._module.published_state(gathers=not shards)
        if not state:
            return None
        return self._transports.export(transport, state, checksum=checksum)
