"""Completions as they are handed back, and the buffers they are written to step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from rllib_llm import columns


@dataclass
class Completions:
    """Completions of a batch, rows of a group adjacent. T = the longest completion of the batch."""

    completion_ids: torch.Tensor
    """[batch, T] int64, right-padded with the pad token."""
    completion_mask: torch.Tensor
    """[batch, T] bool, True for sampled tokens, the stop token among them."""
    logprobs: torch.Tensor
    """[batch, T] float32, log_softmax(logits / temperature) of each token, 0 behind the end."""
    finished: torch.Tensor
    """[batch] bool, True where a stop token ended the completion."""
    values: torch.Tensor | None = None
    """[batch, T] float32, of the state before each token, 0 behind the end; where a critic was."""

    def columns(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """The columns of a training batch, on `device`, or where they are."""
        held = {
            columns.COMPLETION_IDS: self.completion_ids,
            columns.COMPLETION_MASK: self.completion_mask,
            columns.SAMPLER_LOGPROBS: self.logprobs,
            columns.FINISHED: self.finished,
        }
        if self.values is not None:
            held[columns.SAMPLER_VALUES] = self.values
        return {name: column.to(device) for name, column in held.items()}


def concatenate(parts: Sequence[Completions], pad_token_id: int) -> Completions:
    """The rows of all parts, one after the other, as wide as the widest.

    Args:
        parts: at least one.
        pad_token_id: fills the narrower parts.
    """
    if len(parts) == 1:
        return parts[0]
    longest = max(part.completion_ids.shape[1] for part in parts)

    def stack(name: str, filler: int) -> torch.Tensor:
        tensors = [getattr(part, name) for part in parts]
        return torch.cat([F.pad(t, (0, longest - t.shape[1]), value=filler) for t in tensors])

    return Completions(
        stack("completion_ids", pad_token_id),
        stack("completion_mask", False),
        stack("logprobs", 0),
        torch.cat([part.finished for part in parts]),
        None if parts[0].values is None else stack("values", 0),
    )


class CompletionBuffers:
    """Tokens of all rows, step-major, so that one step writes one contiguous line.

    Args:
        steps: longest completion.
        batch: rows.
        pad_token_id: what stands behind the end of a completion.
        device: where the tokens are sampled.
        with_values: whether the logits' last column is a value.
    """

    def __init__(
        self,
        steps: int,
        batch: int,
        pad_token_id: int,
        device: torch.device,
        with_values: bool = False,
    ) -> None:
        # One line more than is read: rows that have ended, on a device that is not asked which,
        # write there.
        lines = (steps + 1, batch)
        self._tokens = torch.full(lines, pad_token_id, device=device)
        self._mask = torch.zeros(lines, dtype=torch.bool, device=device)
        self._logprobs = torch.zeros(lines, dtype=torch.float32, device=device)
        self._values = torch.zeros_like(self._logprobs) if with_values else None

    def split(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [rows, vocab], and the values [rows] that are a column behind them, if any."""
        return (outputs, None) if self._values is None else (outputs[:, :-1], outputs[:, -1])

    def write(
        self,
        step: int,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
        alive: torch.Tensor,
        values: torch.Tensor | None = None,
    ) -> None:
        """Records one token of some rows, at the same place in all of them.

        Args:
            step: place in the completion.
            rows: [n] int64, which rows of the batch.
            tokens: [n] int64.
            logprobs: [n] float32.
            alive: [n] bool, False for a row that has ended before.
            values: [n], of the state before the token.
        """
        self._tokens[step].index_copy_(0, rows, tokens)
        self._mask[step].index_copy_(0, rows, alive)
        self._logprobs[step].index_copy_(0, rows, logprobs.where(alive, 0.0))
        if self._values is not None and values is not None:
            self._values[step].index_copy_(0, rows, values.float().where(alive, 0.0))

    def write_at(
        self,
        places: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
        alive: torch.Tensor,
        values: torch.Tensor | None = None,
    ) -> None:
        """As `write`, but each at a place [n] int64 of its own; that of ended rows is `steps`."""
        self._tokens[places, rows] = tokens
        self._mask[places, rows] = alive
        self._logprobs[places, rows] = logprobs.where(alive, 0.0)
        if self._values is not None and values is not None:
            self._values[places, rows] = values.float().where(alive, 0.0)

    def completions(self, stop_token_ids: torch.Tensor) -> Completions:
        """What was written, cut to the longest row, as tensors of their own.

        Args:
            stop_token_ids: [k] int64.

        Raises:
            FloatingPointError: a log-prob is not finite.
        """
        longest = int(self._mask.any(dim=1).sum())

        def by_row(lines: torch.Tensor) -> torch.Tensor:
            return lines[:longest].t().clone(memory_format=torch.contiguous_format)

        tokens, mask, logprobs = map(by_row, (self._tokens, self._mask, self._logprobs))
        values = None if self._values is None else by_row(self._values)
        if not bool(logprobs.isfinite().all()):
            raise FloatingPointError(
                "logits must be finite: the model gave NaN or infinity while sampling. "
                "Check the weights it was given, its dtype and the learning rate."
            )
        last = tokens.gather(1, mask.sum(dim=1, keepdim=True) - 1)
        finished = (last == stop_token_ids).any(dim=1)
        return Completions(tokens, mask, logprobs, finished, values)
