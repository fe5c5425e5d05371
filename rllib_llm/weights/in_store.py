"""Weights through the object store: everywhere, one copy on each node, which receivers may alias.

sender    tensors on the CPU ── put, one copy ──▶ object store
          tensors on a GPU ── copy ──▶ page-locked memory ── put ──▶ object store
receiver  a view of the store's own pages
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rllib_llm.weights.flat_buffer import FlatBuffer, ScatteredBuffer, StagingBuffer, scatter


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
