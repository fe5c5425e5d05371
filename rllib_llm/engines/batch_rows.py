"""The rows of a decoder's batch: state on the host and on the device, the buffers that their tokens
are written to, and the prompts that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rllib_llm.engines.kv_cache import Prefix
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import NOT_FINITE, Completions, Tokens


@dataclass(frozen=True)
class RowSettings:
    """Settings of rows, and what of them is needed on the device."""

    params: SamplingParams
    stops: torch.Tensor | None
    """[k] int64, the stop tokens; None without."""
    bias: tuple[torch.Tensor, torch.Tensor] | None
    """Ids [b] int64, and what is added to their logits, [b] float32."""
    adjusts: bool
    """Whether they change logits before the temperature."""


# Unused settings are kept up to so many.
_MOST_SETTINGS = 8


class BatchRows:
    """Rows in the order in which they stand in the batch.

    A row's tokens are counted by the decoder's clock, which advances by one with every step: its
    token at place p is sampled at the clock's `born + p`. So the host knows the places of all rows
    and when each is full without asking the device; it has to ask only which rows were ended by a
    stop token.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self.device, self._vocab_size = device, vocab_size
        self.settings: list[RowSettings] = []  # distinct ones; that of a row is an index
        # On the host, of each row: the column of the buffers that it is written to, the clock of
        # its place 0 and of its last place, and its settings.
        self.columns, self.born, self.last, self.setting = (
            np.empty(0, dtype=np.int64) for _ in range(4)
        )
        # On the device: the same columns and births, the newest token, its position (that of rows
        # that have ended stays), and whether the row has not ended.
        none = torch.empty(0, dtype=torch.int64, device=device)
        self.lines, self.births, self.tokens, self.positions = none, none, none, none
        self.alive = none.bool()

    def __len__(self) -> int:
        return len(self.columns)

    def add(
        self, columns: list[int], params: list[SamplingParams], lengths: list[int],
        num_sampled: list[int], clock: int,
    ) -> None:  # fmt: skip
        """Appends rows that get their first token now.

        Args:
            lengths: tokens of each row so far.
            num_sampled: how many of them were sampled.
        """
        if len(self.settings) > _MOST_SETTINGS + len(self):  # most are of rows that have ended
            used, self.setting = np.unique(self.setting, return_inverse=True)
            self.settings = [self.settings[i] for i in used]
        born = [clock - num for num in num_sampled]
        last = [b + p.max_new_tokens - 1 for b, p in zip(born, params, strict=True)]
        added = (columns, born, last, [self._index(p) for p in params])
        self.columns, self.born, self.last, self.setting = (
            np.concatenate([held, np.asarray(new, dtype=np.int64)])
            for held, new in zip(
                (self.columns, self.born, self.last, self.setting), added, strict=True
            )
        )
        self.lines, self.births, self.positions, self.tokens = (
            torch.cat([held, torch.tensor(new, dtype=torch.int64, device=self.device)])
            for held, new in zip(
                (self.lines, self.births, self.positions, self.tokens),
                (columns, born, lengths, [0] * len(columns)), strict=True,
            )
        )  # fmt: skip
        self.alive = torch.cat([self.alive, self.alive.new_ones(len(columns))])

    def _index(self, params: SamplingParams) -> int:
        # Rows that differ in nothing but their longest length are sampled together: `last` has it.
        if params.max_new_tokens != max(1, params.min_new_tokens):
            params = replace(params, max_new_tokens=max(1, params.min_new_tokens))
        for i, known in enumerate(self.settings):
            if known.params == params:
                return i
        # Ids beyond the vocabulary are never sampled: some models name stop tokens of others.
        ids = [token for token in params.stop_token_ids if token < self._vocab_size]
        stops = torch.tensor(ids, device=self.device) if ids else None
        bias = None
        if params.logit_bias:
            tokens, values = zip(*params.logit_bias, strict=True)
            bias = (
                torch.tensor(tokens, device=self.device),
                torch.tensor(values, dtype=torch.float32, device=self.device),
            )
        adjusts = params.has_penalties or bias is not None
        self.settings.append(RowSettings(params, stops, bias, adjusts))
        return len(self.settings) - 1

    def keep(self, moves: Moves) -> None:
        """Removes finished rows."""
        targets, sources = moves.on_host
        for values in (self.columns, self.born, self.last, self.setting):
            values[targets] = values[sources]
        self.columns, self.born, self.last, self.setting = (
            values[: moves.num_rows]
            for values in (self.columns, self.born, self.last, self.setting)
        )
        self.lines, self.births, self.tokens, self.positions = (
            moves.apply(values) for values in (self.lines, self.births, self.tokens, self.positions)
        )
        self.alive = self.alive.new_ones(moves.num_rows)

    def by_settings(self, start: int) -> Iterator[tuple[RowSettings, np.ndarray | None]]:
        """Yields the settings that rows from `start` on have, each with the rows that have them,
        counted from `start`; None where all have."""
        setting = self.setting[start:]
        if (setting == setting[0]).all():
            yield self.settings[setting[0]], None
            return
        for i in np.unique(setting):
            yield self.settings[i], (setting == i).nonzero()[0]

    def has_stops(self) -> bool:
        """Whether a row may end before its last place."""
        used = np.unique(self.setting) if len(self.settings) > 1 else range(len(self.settings))
        return any(self.settings[i].stops is not None for i in used)


@dataclass(frozen=True)
class Moves:
    """Rows `sources` [moved] int64 go to the places `targets`; the first `num_rows` stay.

    on_host: (targets, sources) for arrays of the host, so that nothing is fetched from a device.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    num_rows: int
    on_host: tuple[np.ndarray, np.ndarray]

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """The rows that stay, [num_rows, ...]; `values` is written to."""
        values[self.targets] = values[self.sources]
        return values[: self.num_rows]


def fill_gaps(stays: torch.Tensor, device: torch.device) -> Moves | None:
    """Moves, as few as can be, that put the rows that stay first; None where all do."""
    num_rows = int(stays.sum())
    if num_rows == len(stays):
        return None
    targets = (~stays[:num_rows]).nonzero().squeeze(1)
    sources = stays[num_rows:].nonzero().squeeze(1) + num_rows
    on_host = targets.numpy(), sources.numpy()
    return Moves(sources.to(device), targets.to(device), num_rows, on_host)


# --- What the rows of the batch have sampled


class CompletionBuffers:
    """Tokens of all completions, step-major, so that one step writes one contiguous line.

    Each completion is written to its own column, wherever its row stands in the batch.

    Args:
        with_values: whether the logits' last column is a value.
        with_versions: whether the weights' version is kept of each token.
    """

    def __init__(
        self, device: torch.device, *, with_values: bool = False, with_versions: bool = False
    ) -> None:
        self.steps, self.batch = 0, 0
        self.version = 0  # is written to every token
        # One line more than is read: rows that have ended, on a device that is not asked which,
        # write there.
        self._tokens = torch.zeros(1, 0, dtype=torch.int64, device=device)
        self._mask = torch.zeros_like(self._tokens, dtype=torch.bool)
        self._logprobs = torch.zeros_like(self._tokens, dtype=torch.float32)
        self._values = torch.zeros_like(self._logprobs) if with_values else None
        self._noise: torch.Tensor | None = None  # [steps, batch], of all that are not greedy
        self._versions = (
            torch.zeros_like(self._tokens, dtype=torch.int32) if with_versions else None
        )
        # [steps + 1, batch, k], from when they are first asked for.
        self._top_ids: torch.Tensor | None = None
        self._top_logprobs: torch.Tensor | None = None

    def split(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [rows, vocab], and the values [rows], the column after them, if any."""
        return (outputs, None) if self._values is None else (outputs[:, :-1], outputs[:, -1])

    def noise(self, places: int | torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """Uniforms [n] that decide the tokens at `places`, one for all or [n], of completions."""
        if self._noise is None:
            return None
        if isinstance(places, int):
            return self._noise[places].index_select(0, rows)
        return self._noise[places.clamp(max=self.steps - 1), rows]

    def write(
        self, places: int | torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor,
        logprobs: torch.Tensor, alive: torch.Tensor, values: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
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

    def begin(self, columns: Sequence[int], noise: torch.Tensor | None) -> None:
        """Makes columns ready for other completions.

        Args:
            noise: [columns, longest of them] in [0, 1), which decides the tokens; None where all
                are greedy.
        """
        at: slice | torch.Tensor = slice(columns[0], columns[-1] + 1)
        if list(columns) != list(range(columns[0], columns[-1] + 1)):
            at = torch.tensor(columns, dtype=torch.int64, device=self._mask.device)
        self._mask[:, at] = False
        if noise is None:
            return
        if self._noise is None:
            self._noise = torch.zeros_like(self._logprobs[: self.steps])
        noise = noise[:, : self.steps].to(self._noise).t()
        self._noise[: len(noise), at] = noise

    def read(
        self, rows: list[int], starts: list[int], ends: list[int] | None = None,
        num_likeliest: list[int] | None = None,
    ) -> list[Tokens]:  # fmt: skip
        """The tokens and log-probs of some completions.

        Args:
            starts: the first place of each that is read.
            ends: after the last place of each; None: after the last that was written.
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
            own = versions[0][part] if versions else []
            read.append(Tokens(tokens[part], logprobs[part], own))
            k = num_likeliest[i] if num_likeliest else 0
            if k and self._top_ids is not None and self._top_logprobs is not None:
                there = slice(starts[i], starts[i] + part.stop - at), rows[i], slice(k)
                pairs = zip(
                    self._top_ids[there].tolist(), self._top_logprobs[there].tolist(), strict=True
                )
                found = [list(zip(*pair, strict=True)) for pair in pairs]
                read[-1] = read[-1]._replace(likeliest=found)
            at += length
        return read

    def completions(self, params: SamplingParams) -> Completions:
        """All completions, which have these settings, cut to the longest row, as new tensors.

        Raises:
            FloatingPointError: a log-prob is not finite.
        """
        longest = int(self._mask.any(dim=1).sum())

        def by_row(lines: torch.Tensor) -> torch.Tensor:
            return lines[:longest].t().clone(memory_format=torch.contiguous_format)

        tokens, mask, logprobs = map(by_row, (self._tokens, self._mask, self._logprobs))
        values = None if self._values is None else by_row(self._values)
        if not bool(logprobs.isfinite().all()):
            raise FloatingPointError(NOT_FINITE)
        last = tokens.gather(1, mask.sum(dim=1, keepdim=True) - 1)
        stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=last.device)
        finished = (last == stops).any(dim=1)
        tokens = tokens.where(mask, params.pad_token_id)
        return Completions(tokens, mask, logprobs, finished, values)


# --- Prompts that wait for a place in the batch, first come, first served


@dataclass(frozen=True)
class PromptGroup:
    """Rows that share a prompt."""

    token_ids: torch.Tensor
    """[length] int64 on the model's device, those that were sampled before among them."""
    columns: list[int]
    """Of the buffers, one per row."""
    params: list[SamplingParams]
    num_sampled: list[int]
    prefix: Prefix | None = None
    """What is computed already of the prompt of a single row."""
    images: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the prompt shows, as the model takes it."""
    num_first: int = 0
    """Tokens at the beginning in which it shows it; 0: all that were not sampled."""

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    @property
    def num_shown(self) -> int:
        """Tokens at the beginning among which those of images stand for images."""
        return self.num_first or self.length - self.num_sampled[0]

    def of(self, places: list[int], sampled: Sequence[int]) -> PromptGroup:
        """Some of the rows, which have all sampled these tokens since."""
        more = torch.tensor(sampled, dtype=torch.int64, device=self.token_ids.device)
        return replace(
            self, token_ids=torch.cat([self.token_ids, more]), prefix=None,
            columns=[self.columns[i] for i in places], params=[self.params[i] for i in places],
            num_sampled=[self.num_sampled[i] + len(sampled) for i in places],
        )  # fmt: skip


class PromptQueue(deque[PromptGroup]):
    """Groups in the order in which they will be let in."""

    @property
    def num_rows(self) -> int:
        """Rows that wait."""
        return sum(len(group.columns) for group in self)

    def drop(self, columns: list[int]) -> None:
        """Removes rows, given by their columns of the buffers."""
        groups, gone = list(self), set(columns)
        self.clear()
        for group in groups:
            stays = [i for i, column in enumerate(group.columns) if column not in gone]
            if len(stays) == len(group.columns):
                self.append(group)
            elif stays:
                self.append(group.of(stays, []))

    def fitting(self, free: float, max_tokens: int | None, whatever: bool) -> int:
        """The number of first groups that have together at most `free` rows, and at most
        `max_tokens` of prompts to read if there are several; one at least if `whatever`."""
        count, longest = 0, 0
        for group in self:
            free -= len(group.columns)
            if free < 0 and not (whatever and not count):
                break
            num_cached = len(group.prefix.token_ids) if group.prefix is not None else 0
            longest = max(longest, group.length - num_cached)  # shorter ones are padded to it
            if count and max_tokens is not None and (count + 1) * longest > max_tokens:
                break
            count += 1
        return count


def padded(groups: Sequence[PromptGroup]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [groups, longest] of prompts, left-padded."""
    prompts = [group.token_ids for group in groups]
    ids = pad_sequence(prompts, batch_first=True, padding_side="left")
    starts = ids.shape[1] - torch.tensor([len(prompt) for prompt in prompts], device=ids.device)
    return ids, torch.arange(ids.shape[1], device=ids.device) >= starts.unsqueeze(1)
