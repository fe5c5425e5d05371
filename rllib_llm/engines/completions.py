"""Completions as they are handed back, and the buffers they are written to step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

from rllib_llm.engines.params import SamplingParams
from rllib_llm.shared import columns
from rllib_llm.shared.padding import pad_right


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
    versions: torch.Tensor | None = None
    """[batch, T] int32, of the weights that sampled each token, -1 where that is unknown or there
    is none; where the caller says so."""

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
        if self.versions is not None:
            held[columns.WEIGHTS_VERSION] = self.versions
        return {name: column.to(device) for name, column in held.items()}


Finish = Literal["stop", "length", "aborted", "error"]
"""A stop token was sampled; max_new_tokens were; the row was taken out; its logits were not finite.
"""
Likeliest = list[tuple[int, float]]
"""Tokens and their log-probs, the likeliest first."""


class Tokens(NamedTuple):
    """Tokens of one completion, with their log-probs and the weights' versions, if kept."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    likeliest: list[Likeliest] = []  # noqa: RUF012  (never written to)
    """The likeliest tokens at the place of each, where the row's settings ask for them."""
    finish: Finish | None = None
    """Why there will be no more of them; None where there may be."""

    def behind(self, start: int) -> Tokens:
        """Those from the token `start` on."""
        return Tokens(
            self.token_ids[start:], self.logprobs[start:], self.versions[start:],
            self.likeliest[start:], self.finish,
        )  # fmt: skip


class CompletionBuffers:
    """Tokens of all completions, step-major, so that one step writes one contiguous line.

    A completion is written to a column of its own, wherever its row stands in the batch.

    Args:
        steps: longest completion.
        batch: completions.
        pad_token_id: what stands behind the end of a completion.
        device: where the tokens are sampled.
        with_values: whether the logits' last column is a value.
        noise: [batch, >= steps] in [0, 1), which decides the tokens; None when all are greedy.
        with_versions: whether the weights' version is kept of each token.
    """

    def __init__(
        self,
        steps: int,
        batch: int,
        pad_token_id: int,
        device: torch.device,
        with_values: bool = False,
        noise: torch.Tensor | None = None,
        with_versions: bool = False,
    ) -> None:
        # One line more than is read: rows that have ended, on a device that is not asked which,
        # write there.
        lines = (steps + 1, batch)
        self.steps, self.batch = steps, batch
        self.version = 0  # is written to every token
        self._tokens = torch.full(lines, pad_token_id, device=device)
        self._mask = torch.zeros(lines, dtype=torch.bool, device=device)
        self._logprobs = torch.zeros(lines, dtype=torch.float32, device=device)
        self._values = torch.zeros_like(self._logprobs) if with_values else None
        self._noise = None if noise is None else noise[:, :steps].float().t().contiguous()
        self._versions = (
            torch.zeros_like(self._tokens, dtype=torch.int32) if with_versions else None
        )
        # [steps + 1, batch, k], from when they are first asked for.
        self._top_ids: torch.Tensor | None = None
        self._top_logprobs: torch.Tensor | None = None

    def split(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [rows, vocab], and the values [rows] that are a column behind them, if any."""
        return (outputs, None) if self._values is None else (outputs[:, :-1], outputs[:, -1])

    def noise(self, places: int | torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """Uniforms [n] that decide the tokens at `places`, one for all or [n], of completions."""
        if self._noise is None:
            return None
        if isinstance(places, int):
            return self._noise[places].index_select(0, rows)
        return self._noise[places.clamp(max=self.steps - 1), rows]

    def write(
        self,
        places: int | torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
        alive: torch.Tensor,
        values: torch.Tensor | None = None,
    ) -> None:
        """Records one token of some completions.

        Args:
            places: in the completion, one for all, or [n] int64.
            rows: [n] int64, which completions.
            tokens: [n] int64.
            logprobs: [n] float32.
            alive: [n] bool, False for a row that has ended before.
            values: [n], of the state before the token.
        """
        written = [(self._tokens, tokens), (self._mask, alive)]
        written.append((self._logprobs, logprobs.where(alive, 0.0)))
        if self._values is not None and values is not None:
            written.append((self._values, values.float().where(alive, 0.0)))
        if self._versions is not None:
            versions = torch.full_like(rows, self.version, dtype=torch.int32)
            written.append((self._versions, versions))
        if isinstance(places, int):
            for lines, entries in written:
                lines[places].index_copy_(0, rows, entries)
            return
        places = places.where(alive, self.steps)
        for lines, entries in written:
            lines[places, rows] = entries

    def write_likeliest(
        self, places: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor
    ) -> None:
        """Records the likeliest tokens [n, k] at some places [n] of completions `rows` [n]."""
        k = ids.shape[1]
        held = 0 if self._top_ids is None else self._top_ids.shape[2]
        if k > held:
            grown = torch.zeros(*self._tokens.shape, k, dtype=torch.int64, device=ids.device)
            values = torch.zeros(grown.shape, dtype=torch.float32, device=ids.device)
            if self._top_ids is not None and self._top_logprobs is not None:
                grown[..., :held], values[..., :held] = self._top_ids, self._top_logprobs
            self._top_ids, self._top_logprobs = grown, values
        assert self._top_ids is not None and self._top_logprobs is not None
        places = places.clamp(max=self.steps)
        self._top_ids[places, rows, :k] = ids
        self._top_logprobs[places, rows, :k] = logprobs

    # --- completions that come and go --------------------------------------------------------

    def reserve(self, steps: int, batch: int) -> None:
        """Makes room for so many completions of such a length; keeps what is written."""
        if steps <= self.steps and batch <= self.batch:
            return
        steps, batch = max(steps, self.steps), max(batch, self.batch)
        grown = (0, batch - self.batch, 0, steps - self.steps)
        for name in ("_tokens", "_mask", "_logprobs", "_values", "_noise", "_versions"):
            lines = getattr(self, name)
            setattr(self, name, None if lines is None else F.pad(lines, grown))
        for name in ("_top_ids", "_top_logprobs"):
            lines = getattr(self, name)
            setattr(self, name, None if lines is None else F.pad(lines, (0, 0, *grown)))
        self.steps, self.batch = steps, batch

    def begin(self, row: int, noise: torch.Tensor | None) -> None:
        """Makes a column ready for another completion, with noise [steps of it] unless greedy."""
        self._mask[:, row] = False
        if noise is None:
            return
        if self._noise is None:
            self._noise = torch.zeros_like(self._logprobs[: self.steps])
        self._noise[: len(noise), row] = noise.to(self._noise.device)

    def read(
        self,
        rows: list[int],
        starts: list[int],
        ends: list[int] | None = None,
        num_likeliest: list[int] | None = None,
    ) -> list[Tokens]:
        """The tokens and log-probs of some completions.

        Args:
            rows: their columns.
            starts: the first place of each that is read.
            ends: behind the last place of each; None: behind the last that was written.
            num_likeliest: how many of the likeliest tokens of each are read; None: none.
        """
        columns = torch.tensor(rows, dtype=torch.int64, device=self._tokens.device)
        if ends is None:
            counts = self._mask.index_select(1, columns).sum(dim=0).tolist()
            ends = [start + count for start, count in zip(starts, counts, strict=True)]
        spans = [range(start, max(start, end)) for start, end in zip(starts, ends, strict=True)]
        lengths = [len(span) for span in spans]
        places = torch.tensor([p for span in spans for p in span], dtype=torch.int64)
        lines = (
            places.to(columns.device),
            columns.repeat_interleave(
                torch.tensor(lengths, dtype=torch.int64, device=columns.device)
            ),
        )
        fields = [self._tokens, self._logprobs, self._mask]
        fields += [] if self._versions is None else [self._versions]
        tokens, logprobs, written, *versions = (field[lines].tolist() for field in fields)
        read, at = [], 0
        for i, length in enumerate(lengths):
            part = slice(at, at + sum(written[at : at + length]))
            k = num_likeliest[i] if num_likeliest else 0
            read.append(
                Tokens(
                    tokens[part], logprobs[part], versions[0][part] if versions else [],
                    self._likeliest(rows[i], starts[i], part.stop - part.start, k),
                )
            )  # fmt: skip
            at += length
        return read

    def _likeliest(self, row: int, start: int, count: int, k: int) -> list[Likeliest]:
        if not k or not count or self._top_ids is None or self._top_logprobs is None:
            return []
        ids = self._top_ids[start : start + count, row, :k].tolist()
        values = self._top_logprobs[start : start + count, row, :k].tolist()
        return [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]

    def completions(self, stop_token_ids: torch.Tensor) -> Completions:
        """All completions, cut to the longest row, as new tensors.

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


def prompts_of(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> list[list[int]]:
    """The prompts' ids without their padding."""
    return [ids[mask].tolist() for ids, mask in zip(prompt_ids, prompt_mask, strict=True)]


def pad_completions(
    token_ids: list[list[int]], logprobs: list[list[float]], params: SamplingParams
) -> Completions:
    """Ragged rows as `Completions`; a row is finished where it ends with a stop token.

    Args:
        token_ids: of each row, stop token included, at least one.
        logprobs: of each row, as many as it has tokens.
        params: its pad and stop tokens are read.
    """
    ids, mask = pad_right(token_ids, params.pad_token_id)
    values, _ = pad_right(logprobs, 0.0, torch.float32)
    stops = set(params.stop_token_ids)
    finished = torch.tensor([row[-1] in stops for row in token_ids])
    return Completions(ids, mask, values, finished)
