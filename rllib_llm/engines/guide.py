"""What a completion's next token may be, where a grammar or a schema decides it."""

from __future__ import annotations

from typing import Protocol

import torch


class Guide(Protocol):
    """Goes along with one row, token by token; used by the engine's thread alone."""

    def allowed(self) -> torch.Tensor:
        """[n <= vocab] bool on the CPU: what may come next. Tokens behind the last may not."""

    def take(self, token_id: int) -> None:
        """The token that was sampled."""
