"""The decode loop: rows that enter and leave the batch at any step, a token each per step.

All rows end at the same position of the cache. One that comes later is a row with more padding
before it, so nothing about the rows beside it changes, and its tokens are the same as in a batch of
its own (up to round-off).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import nn

from rllib_llm.engines.batch_rows import BatchRows, fill_gaps
from rllib_llm.engines.completions import CompletionBuffers
from rllib_llm.engines.decode_step import DecodeStep, OpenStep, open_decode_step
from rllib_llm.engines.guide import Guide
from rllib_llm.engines.kept_prefixes import Layers, fill, row_of
from rllib_llm.engines.kv_cache import (
    RepeatedPromptCache,
    SharedPromptCache,
    make_cache,
    shares_prompts,
)
from rllib_llm.engines.prefill import prefill
from rllib_llm.engines.prompt_queue import Group, PromptQueue, padded
from rllib_llm.engines.row_choice import choose_for_rows, note_likeliest

# Fewer positions at the front than this, or than this share of a cache that may grow, are not worth
# moving the whole cache for.
_MIN_SHIFT, _SHIFTED_SHARE = 16, 0.25
# Further turns of conversations wait for each other until they have waited for so many steps
# together, as a share of the rows that are sampled meanwhile: a prefill costs about as much as a
# step, whether of one row or of many, and each row that waits goes without its token of the step.
_GATHERED_SHARE = 0.25


class Decoder:
    """State of a generation that never needs to end.

    Args:
        model: causal LM of transformers in eval mode.
        buffers: what is sampled is written to.
        steps: how many tokens will be decoded at most: whether weights are laid out for it.
        steps_between_looks: steps between two looks at which rows were ended by a stop token.
        max_rows: rows in the batch at once, at least those of one prompt; None for no bound.
        free_share: share of `max_rows` that has to be free before waiting prompts are let in, if
            there are so many: a prefill of a few is poorly used.
        room: rows and positions that the cache has from the start.
        open_step: makes the decode step.
        value_head: see `engine.generate`.

    Called within `torch.inference_mode`, which spares each operation its autograd bookkeeping: up
    to a tenth of the time.
    """

    def __init__(
        self,
        model: nn.Module,
        buffers: CompletionBuffers,
        *,
        steps: int,
        steps_between_looks: int = 1,
        max_rows: int | None = None,
        free_share: float = 0.0,
        room: tuple[int, int] = (0, 0),
        open_step: OpenStep = open_decode_step,
        value_head: nn.Module | None = None,
    ) -> None:
        self.model, self.buffers, self.steps = model, buffers, steps
        self.steps_between_looks, self.free_share = steps_between_looks, free_share
        self.max_rows, self.room = max_rows, room
        self.open_step, self.value_head = open_step, value_head
        self.device = next(model.parameters()).device
        self.queue = PromptQueue()
        self.rows = BatchRows(self.device)
        # By column of the buffers, of rows that have one; whoever adds and takes rows keeps it.
        self.guides: dict[int, Guide] = {}
        # Columns whose keys and values are wanted when they leave, and those that have left.
        self.wanted: set[int] = set()
        self.taken_along: dict[int, Layers] = {}
        self.num_prefilled = 0  # tokens of prompts that were computed so far
        self._num_waited = 0  # steps that turns have waited for each other, each row's counted
        self.clock = 0
        self.cache = make_cache(model.config, 1, 0)
        self.length = self.first = 0  # positions in use; those before `first` are padding only
        self.mask: torch.Tensor | None = None  # [rows, capacity], None while none has padding
        self._held = ExitStack()
        self._decode_step: DecodeStep | None = None

    @property
    def num_rows(self) -> int:
        """Rows in the batch, and those that wait."""
        return len(self.rows) + self.queue.num_rows

    def step(self, admits: bool = True) -> list[int]:
        """Samples a token for each row in the batch, then, if it `admits`, lets waiting prompts in
        where there is room and samples their first; the columns of rows that have left."""
        self.clock += 1
        left: list[int] = []
        if len(self.rows):
            self._take(self._forward(), 0)
            left += self._drop_ended()
        groups = self._next_groups() if admits else []
        if groups:
            kept = [group for group in groups if group.prefix is not None]
            fresh = [group for group in groups if group.prefix is None]
            if fresh:
                self._let_in(fresh)
            if kept:
                self._let_in_again(kept)
            left += self._drop_ended()
        return left

    def open(self) -> None:
        """Makes the decode step, which may copy the weights, before it is needed."""
        with torch.inference_mode():
            self._opened_step()

    def close(self) -> None:
        """Lets go of the decode step and its copies of the weights. It is made anew if needed."""
        self._decode_step = None
        self._held.close()

    def _opened_step(self) -> DecodeStep:
        if self._decode_step is None:
            opened = self.open_step(self.model, self.cache, self.steps, self.value_head)
            self._decode_step = self._held.enter_context(opened)
        return self._decode_step

    # --- one step ----------------------------------------------------------------------------

    def _forward(self) -> torch.Tensor:
        """Logits [rows, vocab] behind the rows' newest tokens."""
        self._make_room()
        rows, step = self.rows, self._opened_step()
        seen = None if self.mask is None else self.mask[:, self.first : self.length + 1]
        logits = step(rows.tokens, rows.positions, self.cache, seen)
        rows.positions = rows.positions + rows.alive
        self.length += 1
        return logits

    def _take(self, outputs: torch.Tensor, start: int) -> None:
        """Chooses and records a token for the rows from `start` on."""
        rows, buffers = self.rows, self.buffers
        logits, values = buffers.split(outputs)
        lines, alive = rows.lines[start:], rows.alive[start:]
        born, last = rows.born[start:], rows.last[start:]
        places: int | torch.Tensor = self.clock - rows.births[start:]
        if (born == born[0]).all():
            places = self.clock - int(born[0])
        noise = buffers.noise(places, lines)
        tokens, logprobs, ended = choose_for_rows(
            rows, logits, noise, start, self.clock, self.guides
        )
        if any(params.top_logprobs for params in rows.settings):
            note_likeliest(rows, buffers, logits, start, self.clock)
        pad = rows.settings[rows.setting[start]].pad_token_id
        tokens = tokens.where(alive, pad)
        buffers.write(places, lines, tokens, logprobs, alive, values)
        rows.tokens[start:] = tokens
        if ended is not None:
            alive &= ~ended
        if self.clock >= last.max():
            alive.zero_()
        elif self.clock >= last.min():
            alive &= torch.from_numpy(self.clock < last).to(self.device)

    # --- who is in the batch -----------------------------------------------------------------

    def _drop_ended(self) -> list[int]:
        """Lets rows go that have ended, if it is time to look; their columns of the buffers."""
        last = self.rows.last
        if self.clock < last.max():
            if self.clock % self.steps_between_looks:
                return []
            if self.clock < last.min() and not self.rows.has_stops():
                return []
        return self.drop_ended()

    def drop_ended(self) -> list[int]:
        """Lets rows go that have ended; their columns of the buffers. Waits for the device."""
        return self._keep(self.rows.alive.cpu())

    def remove(self, columns: set[int]) -> None:
        """Takes rows out, in the batch or waiting."""
        self.queue.remove(columns)
        self._keep(torch.from_numpy(~np.isin(self.rows.columns, list(columns))))

    def forget_all(self) -> None:
        """Takes all rows out, in the batch or waiting, and frees the cache's memory."""
        self.close()
        self.queue = PromptQueue()
        self.rows = BatchRows(self.device)
        self.cache = make_cache(self.model.config, 1, 0)
        self.length = self.first = 0
        self.mask = None

    def _keep(self, stays: torch.Tensor) -> list[int]:
        """Fills the places of rows that do not stay [rows] with rows from the back."""
        moves = fill_gaps(stays, self.device)
        if moves is None:
            return []
        left = self.rows.columns[~stays.numpy()].tolist()
        self._take_along(stays)
        if moves.num_rows:
            self.cache.move_rows(moves.sources, moves.targets, moves.num_rows)
            if self.mask is not None:
                self.mask = moves.apply(self.mask)
        elif isinstance(self.cache, SharedPromptCache):
            self.cache.clear()
        self.rows.keep(moves)
        return left

    def _take_along(self, stays: torch.Tensor) -> None:
        """Copies what is wanted of the cache of rows that leave."""
        if not self.wanted or not isinstance(self.cache, SharedPromptCache):
            return
        for row in (~stays).nonzero().flatten().tolist():
            column = int(self.rows.columns[row])
            if column in self.wanted:
                start = int(self.rows.starts[row])
                self.taken_along[column] = row_of(self.cache, row, start)

    def _next_groups(self) -> list[Group]:
        """The prompts that are let in now."""
        running = len(self.rows)
        if not len(self.queue) or (running and not shares_prompts(self.model.config)):
            return []
        free = float("inf") if self.max_rows is None else self.max_rows - running
        count = self.queue.fitting(free, whatever=not running)
        is_rest = count == len(self.queue)
        wanted = self.free_share * (self.max_rows or 0)
        if running and not is_rest and self.queue.rows_of(count) < wanted:
            return []
        if running and self.queue.are_turns():
            self._num_waited += self.queue.num_rows
            if self._num_waited < _GATHERED_SHARE * running:
                return []
        self._num_waited = 0
        return self.queue.take(count)

    def _let_in(self, groups: Sequence[Group]) -> None:
        """Prefills prompts and samples the first tokens of their rows."""
        copies = [len(group.columns) for group in groups]
        ids, mask = padded(groups)
        longest = ids.shape[1]
        prompts = make_cache(self.model.config, 1, longest)
        shares = isinstance(prompts, SharedPromptCache)
        repeats = torch.tensor(copies, device=self.device)
        if not shares:
            self.cache = prompts
            ids, mask = (each.repeat_interleave(repeats, dim=0) for each in (ids, mask))
        self._opened_step()
        self.num_prefilled += sum(group.length for group in groups)
        logits = prefill(self.model, self.value_head, ids, mask, prompts)
        before = len(self.rows)
        room = self._room_for(groups, longest) if shares else (0, 0)
        self._admit(prompts, groups, longest, room)
        if shares:
            logits = logits.repeat_interleave(repeats, dim=0)
        self._take(logits, before)

    def _let_in_again(self, groups: Sequence[Group]) -> None:
        """Prefills what is new of prompts that begin with a kept prefix; see `kept_prefixes`."""
        prefixes = [group.prefix for group in groups if group.prefix is not None]
        lengths = [group.length for group in groups]
        held = [len(prefix.token_ids) for prefix in prefixes]
        new = max(length - kept for length, kept in zip(lengths, held, strict=True))
        ids, mask = padded(groups)
        longest, before = ids.shape[1], len(self.rows)
        if new >= longest or not isinstance(self.cache, SharedPromptCache):
            self._let_in(groups)
            return
        room = self._room_for(groups, longest)
        # Where nobody is in the batch its own cache is filled, and nothing has to be copied to it.
        prompts = make_cache(self.model.config, 1, longest) if before else self.cache
        fill(prompts, prefixes, lengths, new, (len(groups), longest) if before else room)
        self._opened_step()
        self.num_prefilled += sum(min(length, new) for length in lengths)
        logits = prefill(self.model, self.value_head, ids, mask, prompts, longest - new)
        self._admit(prompts, groups, longest, room)
        self._take(logits, before)

    def _admit(
        self, prompts: SharedPromptCache | RepeatedPromptCache, groups: Sequence[Group],
        longest: int, room: tuple[int, int],
    ) -> None:  # fmt: skip
        """Puts prefilled prompts into the cache, unless it is their own, and their rows into the
        batch."""
        rows = self.rows
        if not len(rows):
            self.length = longest
        elif self.length < longest:
            self._shift(self.length - longest)
        if isinstance(self.cache, SharedPromptCache) and prompts is not self.cache:
            assert isinstance(prompts, SharedPromptCache)
            self.cache.admit(prompts, [len(group.columns) for group in groups], room)
        rows.add(
            [column for group in groups for column in group.columns],
            [params for group in groups for params in group.params],
            [group.length for group in groups for _ in group.columns],
            [num for group in groups for num in group.num_sampled],
            self.clock,
            self.length,
        )
        self._look_from()

    # --- the cache's positions ---------------------------------------------------------------

    def _room_for(self, groups: Sequence[Group], longest: int) -> tuple[int, int]:
        """Rows and positions to have room for when prompts of `longest` positions come. Beside rows
        that are in the batch the positions stay as they are: `_make_room` gets more."""
        rows = len(self.rows) + sum(len(group.columns) for group in groups)
        if self.room[1]:
            length = max(self.length, longest) if len(self.rows) else longest
            return max(self.room[0], rows), max(self.room[1], length)
        if len(self.rows):
            return rows, self.cache.capacity
        to_come = max(
            params.max_new_tokens - num
            for group in groups
            for params, num in zip(group.params, group.num_sampled, strict=True)
        )
        positions = longest + to_come
        if positions > self.cache.capacity:  # a conversation goes on, and grows
            goes_on = any(group.prefix is not None for group in groups)
            positions += max(to_come, positions // 2) if goes_on else to_come
        return rows, positions

    def _look_from(self) -> None:
        """Leaves out the positions that are padding in every row, and says where padding is."""
        starts = self.rows.starts
        self.first = int(starts.min())
        self.mask = None
        if self.first != starts.max():
            capacity = self.length + int(self.rows.last.max()) - self.clock + 1
            if isinstance(self.cache, SharedPromptCache):
                capacity = self.cache.capacity
            columns = torch.arange(capacity, device=self.device)
            self.mask = columns >= torch.from_numpy(starts).to(self.device).unsqueeze(1)
        if isinstance(self.cache, SharedPromptCache):
            self.cache.look_from(self.first)

    def _make_room(self) -> None:
        """Has room for one more position: over those that are padding in every row, or more."""
        cache = self.cache
        if not isinstance(cache, SharedPromptCache) or self.length < cache.capacity:
            return
        first = int(self.rows.starts.min())
        # Both move the whole cache, and have to pay for it by the room that they make.
        if first >= _MIN_SHIFT and (self.room[1] or first >= cache.capacity * _SHIFTED_SHARE):
            self._shift(first)
        else:
            cache.grow(cache.capacity + max(cache.capacity // 2, _MIN_SHIFT))
        self._look_from()

    def _shift(self, positions: int) -> None:
        """Moves all rows so many positions to the front, or back."""
        if self.length - positions > self.cache.capacity:
            self.cache.grow(self.length - positions)
        self.cache.shift(positions)
        self.length -= positions
        self.rows.starts = self.rows.starts - positions
