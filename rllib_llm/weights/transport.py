"""The interface of the ways that weights travel. Each has a file of its own.

    sender                                                         receiver
    export(tensors) ──▶ ticket ── through the object store ──▶ open(ticket) ──▶ flat buffer

    in_store.py   the bytes go through the store as well: the buffer is its own ticket
    on_device.py  they stay on a GPU that both work on, where the receiver reads them (CUDA IPC)
    direct.py     they go from the sender's memory into the receiver's (NIXL)

Both ends are the same class, one object in each process; a ticket says which class opens it. One's
own is named by a dotted path (`by_name.py`), and its tickets may be anything that can be pickled.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from rllib_llm.weights.flat_buffer import FlatBuffer


class TicketError(RuntimeError):
    """What a ticket stands for cannot be read by this process, or not any more."""


class Ticket(Protocol):
    """What the object store holds of an export."""

    @property
    def transport(self) -> str:
        """The name of the transport that opens it."""

    @property
    def num_bytes(self) -> int:
        """Of the weights."""


class Transport(Protocol):
    """One way for weights from process to process."""

    def export(self, tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> Ticket:
        """A ticket for `tensors` as they are now. How long it is valid is said by each transport.

        checksum: the receiver compares a CRC-32 of the bytes, where they pass through host memory.
        """

    def open(self, ticket: Any) -> AbstractContextManager[FlatBuffer]:
        """The weights as a flat buffer, to be copied from within the block.

        Raises:
            TicketError: they cannot be read here, or, at the end of the block, were written over
                meanwhile: what was copied may be of two versions.
        """
