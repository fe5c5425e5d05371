"""The decode loop: rows that enter and leave the batch at any step, a token each per step.

    engine.generate    a batch: put all, step until empty ─┐
    TorchEngine.step   rows as they come                  ─┴─ Decoder.step ─▶ columns of ended rows
                                                                │
                              CompletionBuffers ◀── a token for each row; waiting prompts come in

    rows of like length   block [ . k k k k k ] ─┐
    longer ones           block [ k k k ... k ] ─┴─ attention by block, all else of all rows at once

All rows of a block end at the same position of its cache. One that comes later is a row with more
padding before it, so nothing about the rows beside it changes, and its tokens are the same as in a
batch of its own (up to round-off). There is one block, unless rows are so unlike in length that a
further one saves more than it costs (`like_lengths`), and the step can take several.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from rllib_llm.engines.batch_rows import (
    BatchRows,
    CompletionBuffers,
    PromptGroup,
    PromptQueue,
    fill_gaps,
    padded,
)
from rllib_llm.engines.decode_step import (
    DecodePlan,
    DecodeStep,
    OpenStep,
    open_decode_step,
    prefill,
    prefill_seen,
    recurring_length,
)
from rllib_llm.engines.kv_cache import Layers, PromptCache, fill
from rllib_llm.engines.protocol import Guide
from rllib_llm.engines.row_blocks import FEWER_ROWS, RowBlock, RowBlocks, alike
from rllib_llm.engines.sampling import TokenCounts, choose_for_rows
from rllib_llm.modules.model_source import text_config

# Further turns of conversations wait for each other until they have waited for so many steps
# together, as a share of the rows that are sampled meanwhile: a prefill costs about as much as a
# step, whether of one row or of many, and each row that waits goes without its token of the step.
_GATHERED_SHARE = 0.25


class Decoder:
    """State of a generation that never needs to end.

    Where a GPU's memory does not suffice, half of the rows are decoded at once from then on; all
    are prefilled again with what they have sampled.

    Args:
        plan: of a causal LM of transformers in eval mode.
        steps: how many tokens will be decoded at most: whether weights are laid out for it.
        steps_between_looks: steps between two looks at which rows were ended by a stop token.
        max_rows: rows in the batch at once, at least those of one prompt; None for no bound.
        free_share: share of `max_rows` that has to be free before waiting prompts are let in, if
            there are so many: a prefill of a few is poorly used.
        max_prefill: tokens of prompts that a step reads at most, if there is more than one prompt;
            None for no bound. Rows in the batch wait while prompts are read.
        room: rows and positions that the cache has from the start; of several blocks each has as
            many rows as it needs and no more positions.
        open_step: makes the decode step.
        value_head: of the trunk's last state, its layer as `linear`; then values are recorded.
        with_versions: whether the weights' version is recorded of each token.
        block_cost: row positions that one more block has to save; None is what it costs.
        on_fewer_rows: is given the smaller `max_rows`, where memory does not suffice.

    Called within `torch.inference_mode`, which spares each operation its autograd bookkeeping: up
    to a tenth of the time; but for `reserve`.
    """

    def __init__(
        self, plan: DecodePlan, *, steps: int, steps_between_looks: int = 1,
        max_rows: int | None = None, free_share: float = 0.0, max_prefill: int | None = None,
        room: tuple[int, int] = (0, 0), open_step: OpenStep = open_decode_step,
        value_head: nn.Module | None = None, with_versions: bool = False,
        block_cost: float | None = None, on_fewer_rows: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.steps = plan, steps
        self.model = model = plan.model
        self.steps_between_looks, self.free_share = steps_between_looks, free_share
        self.max_rows, self.max_prefill, self.room = max_rows, max_prefill, room
        self.open_step, self.value_head = open_step, value_head
        self.device = next(model.parameters()).device
        self.buffers = CompletionBuffers(
            self.device, with_values=value_head is not None, with_versions=with_versions
        )
        self.queue = PromptQueue()
        # By column of the buffers: the prompts of rows in the batch or the queue. And free ones.
        self._prompts: dict[int, PromptGroup] = {}
        self._free: list[int] = []
        self._left: list[int] = []  # columns of rows that have left in this step
        self._on_fewer_rows = on_fewer_rows
        self._vocab_size = text_config(model).vocab_size
        self.rows = BatchRows(self.device, self._vocab_size)
        self.counts = TokenCounts(self._vocab_size, self.device)
        # By column of the buffers, for rows with settings; kept by the methods that add and remove.
        self.guides: dict[int, Guide] = {}
        # Columns whose keys and values are wanted when they leave, and those that have left.
        self.wanted: set[int] = set()
        self.taken_along: dict[int, Layers] = {}
        # By column, of rows that have left: the experts of their positions, where they are kept.
        self.experts: dict[int, torch.Tensor] = {}
        self.num_prefilled = 0  # tokens of prompts that were computed so far
        self._num_waited = 0  # steps that turns have waited for each other, each row's counted
        self.clock = 0
        block_cost = plan.block_cost if block_cost is None else block_cost
        device = self.device  # not through the decoder, which its caches would outlive
        self.blocks = RowBlocks(lambda: RowBlock(plan.make_cache(0), device), device, block_cost)

    @property
    def num_rows(self) -> int:
        """Rows in the batch, and those that wait."""
        return len(self.rows) + self.queue.num_rows

    # --- rows come ---------------------------------------------------------------------------

    def reserve(self, num_rows: int, max_new_tokens: int) -> list[int]:
        """Columns of the buffers for so many rows, each of which may become so long."""
        batch, missing = self.buffers.batch, num_rows - len(self._free)
        # At least twice as many: what is written moves seldom.
        wanted = batch + max(missing, batch) if missing > 0 else batch
        self._free += range(batch, wanted)
        self.buffers.reserve(max_new_tokens, wanted)
        columns, self._free = self._free[:num_rows], self._free[num_rows:]
        return columns

    def put(self, groups: Sequence[PromptGroup]) -> None:
        """Queues rows, whose columns are reserved and begun."""
        self._prompts |= {column: group for group in groups for column in group.columns}
        self.queue.extend(groups)

    def put_again(self, columns: list[int]) -> None:
        """Queues rows that have left the batch before all that wait, to be prefilled again with
        what they have sampled; those of a group together where that is the same."""
        before = [self._prompts[column] for column in columns]
        places = [g.columns.index(column) for g, column in zip(before, columns, strict=True)]
        starts = [group.num_sampled[i] for group, i in zip(before, places, strict=True)]
        found = self.buffers.read(columns, starts)
        parts: dict[tuple[int, tuple[int, ...]], tuple[PromptGroup, list[int]]] = {}
        for group, place, read in zip(before, places, found, strict=True):
            key = id(group), tuple(read.token_ids)
            parts.setdefault(key, (group, []))[1].append(place)
        groups = [group.of(some, sampled) for (_, sampled), (group, some) in parts.items()]
        self._prompts |= {column: group for group in groups for column in group.columns}
        self.queue.extendleft(reversed(groups))

    # --- one step ----------------------------------------------------------------------------

    def step(self, admits: bool = True) -> list[int]:
        """Samples a token for each row in the batch. If `admits`, then prefills waiting prompts
        where there is room and samples their first tokens. Returns the columns of rows that have
        left, which may be reserved again.

        Raises:
            torch.OutOfMemoryError: the rows of one prompt are too many.
        """
        try:
            self._sample(admits)
        except torch.OutOfMemoryError:
            # Half of the rows that had, or were to get, a place in the batch.
            fewer = (len(self._prompts) - self.queue.num_rows) // 2
            if not fewer or fewer == self.max_rows:
                raise
        else:
            fewer = 0
        if fewer:  # out of the handler, since what was raised holds on to the tensors
            self._begin_again(fewer)
        left, self._left = self._left, []
        return left

    def _sample(self, admits: bool) -> None:
        self.clock += 1
        if len(self.rows):
            self._take(self._forward(), 0)
            self._drop_ended()
        groups = self._next_groups() if admits else []
        if groups:
            for is_turn in (False, True):  # those that begin with a kept prefix come second
                alike_ones = [group for group in groups if (group.prefix is not None) == is_turn]
                if alike_ones:
                    self._let_in(alike_ones)
            self._drop_ended()

    def _begin_again(self, max_rows: int) -> None:
        """Bounds the batch and prefills all rows again."""
        warnings.warn(FEWER_ROWS.format(max_rows), stacklevel=3)
        if self._on_fewer_rows is not None:
            self._on_fewer_rows(max_rows)
        self._left += self.drop_ended()
        self.close()
        self.queue.clear()
        self.rows = BatchRows(self.device, self._vocab_size)
        self.counts.clear()
        self.blocks.clear()
        self.max_rows, self.room = max_rows, (min(self.room[0], max_rows), self.room[1])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.put_again(list(self._prompts))

    def open(self) -> None:
        """Makes the decode step, which may copy the weights, before it is needed."""
        with torch.inference_mode():
            _ = self._step

    def close(self) -> None:
        """Frees the decode step and its copies of the weights, which are rebuilt on demand."""
        self.__dict__.pop("_step", None)

    @functools.cached_property
    def _step(self) -> DecodeStep:
        return self.open_step(self.plan, self.steps, self.value_head)

    def _forward(self) -> torch.Tensor:
        """Logits [rows, vocab] after the rows' newest tokens."""
        rows = self.rows
        for block in self.blocks:
            block.make_room(is_bounded=bool(self.room[1]))
        caches = [(block.cache, block.seen()) for block in self.blocks]
        logits = self._step(rows.tokens, rows.positions, caches, self.blocks.order)
        rows.positions = rows.positions + rows.alive
        for block in self.blocks:
            block.length += 1
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
        tokens, logprobs, ended, likeliest = choose_for_rows(
            rows, logits, noise, start, self.clock, self.guides, self.counts
        )
        for some, (ids, values_of_ids) in likeliest:
            of = slice(None) if some is None else some
            at = (self.clock - rows.births[start:][of]).where(alive[of], buffers.steps)
            buffers.write_likeliest(at, lines[of], ids, values_of_ids)
        pad = rows.settings[rows.setting[start]].params.pad_token_id
        tokens = tokens.where(alive, pad)
        buffers.write(places, lines, tokens, logprobs, alive, values)
        rows.tokens[start:] = tokens
        if ended is not None:
            alive &= ~ended
        if self.clock >= last.max():
            alive.zero_()
        elif self.clock >= last.min():
            alive &= torch.from_numpy(self.clock < last).to(self.device)

    # --- rows of the batch -------------------------------------------------------------------

    def _drop_ended(self) -> None:
        """Removes finished rows, if it is time to look."""
        last = self.rows.last
        if self.clock < last.max():
            if self.clock % self.steps_between_looks:
                return
            if self.clock < last.min() and not self.rows.has_stops():
                return
        self._left += self.drop_ended()

    def drop_ended(self) -> list[int]:
        """Removes finished rows and returns their columns of the buffers, which may be reserved
        again. Waits for the device."""
        return self._free_columns(self._keep(self.rows.alive.cpu()))

    def remove(self, columns: list[int]) -> None:
        """Removes rows from the batch and the queue; their columns may be reserved again."""
        self.queue.drop(columns)
        self._keep(torch.from_numpy(~np.isin(self.rows.columns, columns)))
        self._free_columns(columns)

    def recompute(self) -> None:
        """Queues the rows of the batch again, before all that wait: other weights have come."""
        columns = self.rows.columns.tolist()
        self._keep(torch.zeros(len(columns), dtype=torch.bool))
        self.put_again(columns)

    def _free_columns(self, columns: list[int]) -> list[int]:
        for column in columns:
            del self._prompts[column]
            self.guides.pop(column, None)
        self._free += columns
        return columns

    def _keep(self, stays: torch.Tensor) -> list[int]:
        """Fills the places of rows that do not stay [rows] with rows from the back."""
        moves = fill_gaps(stays, self.device)
        if moves is None:
            return []
        left = self.rows.columns[~stays.numpy()]
        wanted = self.wanted.intersection(left.tolist())
        if wanted:
            for block in self.blocks:
                self.taken_along |= block.states_of(wanted)
        for block in self.blocks if self.plan.keeps_experts else ():
            found = block.states_of(set(left.tolist()), first_layer=-1)
            self.experts |= {column: keys[0] for column, ((keys, _),) in found.items()}
        self.rows.keep(moves)
        self.blocks.keep(moves, self.rows.columns, left)
        self.counts.end(left.tolist())
        return left.tolist()

    def _next_groups(self) -> list[PromptGroup]:
        """The prompts that are let in now."""
        running = len(self.rows)
        if not len(self.queue) or (running and not self.plan.shares_prompts):
            return []
        free = float("inf") if self.max_rows is None else self.max_rows - running
        count = self.queue.fitting(free, self.max_prefill, whatever=not running)
        is_rest = count == len(self.queue)
        wanted = self.free_share * (self.max_rows or 0)
        groups = list(itertools.islice(self.queue, count))
        if running and not is_rest and sum(len(each.columns) for each in groups) < wanted:
            return []
        if running and all(each.prefix is not None for each in self.queue):  # turns
            self._num_waited += self.queue.num_rows
            if self._num_waited < _GATHERED_SHARE * running:
                return []
        self._num_waited = 0
        for _ in groups:
            self.queue.popleft()
        return groups

    def _let_in(self, groups: Sequence[PromptGroup]) -> None:
        """Prefills prompts and samples the first tokens of their rows, those of like length
        together."""
        parts = alike(*_sizes(groups), self.blocks.cost)
        if len(parts) > 1 and not len(self.rows):
            self.blocks.clear()  # a part would hold on to what was made for rows that have left
        for part in parts:
            if alike_groups := [groups[i] for i in part if not groups[i].images]:
                self._prefill(alike_groups)
            for group in (groups[i] for i in part if groups[i].images):
                self._prefill([group])

    def _prefill(self, groups: Sequence[PromptGroup]) -> None:
        """Prefills prompts of similar length, or one with images; where all have a kept prefix,
        from its end on, see `fill`."""
        lengths = [group.length for group in groups]
        longest, before = max(lengths), len(self.rows)
        images, shares = groups[0].images, self.plan.shares_prompts
        ids, mask = padded(groups)
        block = self.blocks.block_for(*_sizes(groups))
        room = self._room_for(block, groups, longest) if shares else (0, 0)
        recurs = self.plan.has_recurring_sizes and shares and not images
        prefixes = [group.prefix for group in groups if group.prefix is not None]
        new = longest
        if prefixes and shares and not images:
            new = max(n - len(p.token_ids) for n, p in zip(lengths, prefixes, strict=True))
            longer = recurring_length(len(groups), new) if recurs else new
            new = longer if longer < longest else new
        ahead = 0
        if new < longest:
            # Where the block is empty its own cache is filled, and nothing has to be copied to it.
            is_beside = len(block) > 0
            prompts = self.plan.make_cache(longest) if is_beside else block.cache
            fill(prompts, prefixes, lengths, new, (len(groups), longest) if is_beside else room)
            logits = prefill(self.model, self.value_head, ids, mask, prompts, longest - new)
        else:
            more = recurring_length(len(groups), longest) - longest if recurs else 0
            if more:
                ids, mask = (F.pad(each, (more, 0)) for each in (ids, mask))
            prompts = self.plan.make_cache(longest + more)
            repeats = torch.tensor([len(group.columns) for group in groups], device=self.device)
            if not shares:
                block.cache = prompts
                ids, mask = (each.repeat_interleave(repeats, dim=0) for each in (ids, mask))
            if images:
                logits, ahead = prefill_seen(
                    self.model, self.value_head, ids, images, groups[0].num_shown, prompts
                )
            else:
                logits = prefill(self.model, self.value_head, ids, mask, prompts)
            if more:
                prompts.look_from(more)
            if shares:
                logits = logits.repeat_interleave(repeats, dim=0)
        self.num_prefilled += sum(min(length, new) for length in lengths)
        self._admit(block, prompts, groups, longest, room)
        self.rows.positions[before:] += ahead
        self._take(logits, before)

    def _admit(
        self, block: RowBlock, prompts: PromptCache, groups: Sequence[PromptGroup], longest: int,
        room: tuple[int, int],
    ) -> None:  # fmt: skip
        """Puts prefilled prompts into a block, and their rows into the batch."""
        columns = [column for group in groups for column in group.columns]
        lengths = [group.length for group in groups for _ in group.columns]
        params = [params for group in groups for params in group.params]
        num_sampled = [num for group in groups for num in group.num_sampled]
        block.admit(prompts, [len(group.columns) for group in groups], longest, room)
        self.rows.add(columns, params, lengths, num_sampled, self.clock)
        for group in groups:  # counts the tokens of rows with penalties
            text = group.token_ids
            rows_of = zip(group.columns, group.params, group.num_sampled, strict=True)
            for column, own, num in rows_of:
                if own.has_penalties:
                    self.counts.begin(column, text[: len(text) - num], text[len(text) - num :])
        block.add(columns, lengths)
        self.blocks.find_order(self.rows.columns)

    def _room_for(
        self, block: RowBlock, groups: Sequence[PromptGroup], longest: int
    ) -> tuple[int, int]:
        """Rows and positions to reserve in a block for prompts of `longest` positions. With rows in
        the block the positions stay unchanged: `make_room` adds more."""
        rows = len(block) + sum(len(group.columns) for group in groups)
        if len(block) and not self.room[1]:
            return rows, block.cache.capacity
        to_come = max(
            params.max_new_tokens - num
            for group in groups
            for params, num in zip(group.params, group.num_sampled, strict=True)
        )
        positions = longest + to_come
        if not self.room[1]:
            if positions > block.cache.capacity:  # a conversation continues, and grows
                continues = any(group.prefix is not None for group in groups)
                positions += max(to_come, positions // 2) if continues else to_come
            return rows, positions
        waiting = self.queue.num_rows
        if len(self.blocks) == 1:
            rows = max(rows, min(self.room[0], rows + waiting))
        if waiting:  # as `engine.capacity`
            positions += to_come + self.steps_between_looks
        bound = self.room[1]
        if self.blocks.cost < float("inf"):
            bound = min(bound, positions)
        return rows, max(bound, block.length if len(block) else longest)


def _sizes(groups: Sequence[PromptGroup]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of prompts, and the rows of each."""
    lengths = np.array([group.length for group in groups])
    return lengths, np.array([len(group.columns) for group in groups])
