"""Memory of rows: the blocks of a batch on a CPU, and the rows that fit into a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig

from rllib_llm.engines.batch_rows import Moves, fill_gaps
from rllib_llm.engines.kv_cache import Layers, PromptCache
from rllib_llm.modules.model_source import text_config

# Keys and values that attention reads on a CPU while one more call of it, and what goes with it, is
# made. That takes some 100 us, in which it reads 1.6 MB in float32 and 2 MB in bfloat16 (one core
# with AMX, 16 to 64 rows, 2 to 12 heads of 64); doubled, so that a block pays for sure.
_BYTES_OF_A_CALL = 4_000_000


def cost_of_block(config: PretrainedConfig, itemsize: int, device: torch.device) -> float:
    """Row positions that one more block has to save. Infinite except on a CPU: a GPU is bound by
    the launches of a step, and its graphs hold one cache.

    Args:
        itemsize: bytes of one number in the model's dtype.
    """
    if device.type != "cpu":
        return float("inf")
    layers = text_config(config).num_hidden_layers
    return _BYTES_OF_A_CALL * layers / (numbers_of_position(config) * itemsize)


def is_alike(lengths: np.ndarray, rows: np.ndarray, cost: float) -> bool:
    """Whether prompts belong into one block: no cut in two would save more than `cost`.

    Then no cut in more blocks would, either: k of them save sums of k - 1 terms of which each is
    at most what one of the cuts in two saves.

    Args:
        lengths: [n] positions.
        rows: [n] of each.
    """
    order = np.argsort(-lengths, kind="stable")
    lengths, rows = lengths[order], rows[order]
    shorter = rows[::-1].cumsum()[::-1]  # rows of this length and of the shorter ones after it
    return bool(((lengths[0] - lengths) * shorter <= cost).all())


def alike(lengths: np.ndarray, rows: np.ndarray, cost: float) -> list[list[int]]:
    """Parts of which each belongs into one block, as indices in order; the shortest part first.
    They make the sum over parts of `cost` + rows * longest least.

    Args:
        lengths: [n] positions.
        rows: [n] of each.
    """
    if is_alike(lengths, rows, cost):
        return [list(range(len(lengths)))]
    distinct = np.unique(lengths)[::-1]
    held = np.array([rows[lengths == length].sum() for length in distinct])
    before = np.concatenate([[0], held.cumsum()])  # rows of the longer ones
    # least[j]: the cost of the j longest, of which the last part begins at begins[j].
    least, begins = np.zeros(len(distinct) + 1), np.zeros(len(distinct) + 1, dtype=np.int64)
    for j in range(1, len(distinct) + 1):
        costs = least[:j] + cost + distinct[:j] * (before[j] - before[:j])
        begins[j] = costs.argmin()
        least[j] = costs[begins[j]]
    parts, end = [], len(distinct)
    while end:
        part = np.isin(lengths, distinct[begins[end] : end])
        parts.append(part.nonzero()[0].tolist())
        end = int(begins[end])
    return parts


# Fewer positions at the front than this, or than this share of a cache that may grow, are not worth
# moving the whole cache for.
_MIN_SHIFT, _SHIFTED_SHARE = 16, 0.25
_MASKED_AHEAD = 256  # positions


class RowBlock:
    """Rows in the order in which they stand in their cache.

    Args:
        cache: without rows.
    """

    def __init__(self, cache: PromptCache, device: torch.device) -> None:
        self.cache, self.device = cache, device
        # On the host, of each row: its column of the buffers, which names it, and where it starts.
        self.columns = self.starts = np.empty(0, dtype=np.int64)
        self.length = self.first = 0  # positions in use; those before `first` are padding only
        self._has_padding = False  # some row has it after `first`
        # [rows, positions] bool, True from a row's start on, for steps to come as well: made anew
        # at each it cost a tiny model 7 % of its time. None: it is made when it is asked for.
        self._mask: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def lengths(self) -> np.ndarray:
        """Positions of each row's own, [rows]."""
        return self.length - self.starts

    @property
    def span(self) -> int:
        """Positions that the attention of every row goes over."""
        return self.length - self.first if len(self) else 0

    def seen(self) -> torch.Tensor | None:
        """Mask of valid positions from `first` on, including the next one, [rows, span + 1] bool;
        None if all are valid."""
        if not self._has_padding:
            return None
        if self._mask is None or self._mask.shape[1] <= self.length:
            starts = torch.from_numpy(self.starts).to(self.device)
            to_come = torch.arange(self.length + _MASKED_AHEAD, device=self.device)
            self._mask = to_come >= starts.unsqueeze(1)
        return self._mask[:, self.first : self.length + 1]

    # --- rows ----------------------------------------------------------------------------------

    def admit(
        self, prompts: PromptCache, copies: list[int], longest: int, room: tuple[int, int]
    ) -> None:
        """Adds the rows of prefilled prompts to the cache, unless the cache is their own: they end
        where the others end. `add` then registers them.

        Args:
            prompts: end at one position; the longest has `longest`.
            copies: rows of each prompt.
            longest: positions.
            room: rows and positions to have room for.
        """
        if not len(self):
            self.length = longest
        elif self.length < longest:
            self._shift(self.length - longest)
        if prompts is not self.cache:
            self.cache.admit(prompts, copies, room)

    def add(self, columns: list[int], lengths: list[int]) -> None:
        """Names the rows that were admitted, of so many positions each."""
        self.columns = np.concatenate([self.columns, np.asarray(columns, dtype=np.int64)])
        starts = self.length - np.asarray(lengths, dtype=np.int64)
        self.starts = np.concatenate([self.starts, starts])
        self._skip_padding()

    def keep(self, moves: Moves) -> None:
        """Removes finished rows."""
        targets, sources = moves.on_host
        for values in (self.columns, self.starts):
            values[targets] = values[sources]
        self.columns, self.starts = (
            values[: moves.num_rows] for values in (self.columns, self.starts)
        )
        if moves.num_rows:
            self.cache.move_rows(moves.sources, moves.targets, moves.num_rows)
            if self._has_padding:
                self._skip_padding()
        else:
            self.cache.clear()

    def states_of(self, columns: set[int], first_layer: int = 0) -> dict[int, Layers]:
        """Copies of the keys and values of rows, as far as they are here."""
        return {
            column: self.cache.states_of(row, int(self.starts[row]), first_layer)
            for row, column in enumerate(self.columns.tolist())
            if column in columns
        }

    # --- positions -----------------------------------------------------------------------------

    def _skip_padding(self) -> None:
        """Skips positions that are padding in every row, and marks the rest of the padding."""
        self.first = self.cache.look_from(int(self.starts.min()))
        self._has_padding, self._mask = bool(self.first != self.starts.max()), None

    def make_room(self, is_bounded: bool) -> None:
        """Makes room for one more position, by overwriting common padding or by growing.

        Args:
            is_bounded: the cache has room for all that will come, so that it should not grow.
        """
        cache = self.cache
        if self.length < cache.capacity:
            return
        first = int(self.starts.min())
        # Both move the whole cache, and have to pay for it by the room that they make.
        if first >= _MIN_SHIFT and (is_bounded or first >= cache.capacity * _SHIFTED_SHARE):
            self._shift(first)
        else:
            cache.grow(cache.capacity + max(cache.capacity // 2, _MIN_SHIFT))
        self._skip_padding()

    def _shift(self, positions: int) -> None:
        """Moves all rows so many positions to the front, or back."""
        if self.length - positions > self.cache.capacity:
            self.cache.grow(self.length - positions)
        self.cache.shift(positions)
        self.length -= positions
        self.starts = self.starts - positions


class RowBlocks:
    """Blocks that each have rows; one block, perhaps without, where the batch is empty.

    Args:
        cost: row positions that one more block has to save; infinite for one block of all rows.
    """

    def __init__(
        self, new_block: Callable[[], RowBlock], device: torch.device, cost: float
    ) -> None:
        self._new_block, self._device, self.cost = new_block, device, cost
        self._blocks = [self._new_block()]
        # Where the rows of the blocks, one after the other, stand in the batch, and where the rows
        # of the batch stand there, [rows] int64 each; None where both are one and the same.
        self.order: tuple[torch.Tensor, torch.Tensor] | None = None

    def __iter__(self) -> Iterator[RowBlock]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def block_for(self, lengths: np.ndarray, copies: np.ndarray) -> RowBlock:
        """The block to which rows with similar prompts add the least attention cost, if its rows
        have that prompt, too; else a new block.

        Args:
            lengths: [n] positions of the prompts.
            copies: [n] rows of each.
        """
        longest = lengths.max()
        fitting: list[tuple[float, RowBlock]] = []
        for block in self._blocks:
            ones = np.ones(len(block), dtype=np.int64)
            both = np.concatenate([lengths, block.lengths]), np.concatenate([copies, ones])
            if not len(block) or is_alike(*both, self.cost):
                span = max(block.span, longest)
                more = copies.sum() * span + len(block) * (span - block.span)
                fitting.append((more, block))
        if not fitting:
            self._blocks.append(self._new_block())
            return self._blocks[-1]
        return min(fitting, key=lambda found: found[0])[1]

    def clear(self) -> None:
        """Forgets all rows and frees the memory of their caches."""
        self._blocks, self.order = [self._new_block()], None

    def keep(self, moves: Moves, columns: np.ndarray, left: np.ndarray) -> None:
        """Removes finished rows, then blocks that are empty or too small to pay for themselves."""
        if self.order is None:
            self._blocks[0].keep(moves)
            return
        for block in self._blocks:
            stays = torch.from_numpy(~np.isin(block.columns, left))
            own = fill_gaps(stays, self._device)
            if own is not None:
                block.keep(own)
        self._join()
        self.find_order(columns)

    def _join(self) -> None:
        """Moves the rows of blocks to longer ones where their own length saves too little: less
        than half of what a new block has to save, so that rows do not move to and fro. The longer
        block must not already have more short rows."""
        joined: list[RowBlock] = []
        for block in sorted(self._blocks, key=lambda block: -block.span):
            if not len(block):
                continue
            longer = joined[-1] if joined else block
            lengths = np.concatenate([longer.lengths, block.lengths])
            saves = 2 * len(block) * (longer.span - block.span) > self.cost
            if not joined or saves or not is_alike(lengths, np.ones_like(lengths), self.cost):
                joined.append(block)
                continue
            room = len(lengths), longer.cache.capacity
            longer.cache.admit(block.cache, [1] * len(block), room)
            longer.add(block.columns.tolist(), block.lengths.tolist())
        self._blocks = joined or [self._new_block()]

    def find_order(self, columns: np.ndarray) -> None:
        """Finds where the rows of the batch, which has these columns, stand in the blocks."""
        named = np.concatenate([block.columns for block in self._blocks])
        if len(self._blocks) == 1 and np.array_equal(named, columns):
            self.order = None
            return
        order = np.empty(len(named), dtype=np.int64)
        order[named.argsort()] = columns.argsort()
        there, back = torch.from_numpy(order), torch.from_numpy(order.argsort())
        self.order = there.to(self._device), back.to(self._device)


# --- Rows that fit into a GPU's free memory

# Share of the free memory that is planned with; the rest is for activations and fragmentation.
_PLANNED_SHARE = 0.8
FEWER_ROWS = (
    "The GPU's memory does not suffice: {} completions are decoded at once from now on, which "
    "changes speed only. sampling_batch_size sets it from the start."
)
# Copies of a row's logits alive at the same time, in float32: logits, weights, cumulative sum, one
# temporary; top-p sorts four more.
_LOGIT_COPIES = 8


def row_budget(model: nn.Module, positions: int) -> int | None:
    """Rows that fit into the free memory of the model's GPU; None on other devices: no bound.

    Args:
        positions: prompt and completion tokens of a row.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    available = bytes_to_plan(
        free=free,
        total=total,
        reserved=torch.cuda.memory_reserved(device),
        allocated=torch.cuda.memory_allocated(device),
        share=torch.cuda.get_per_process_memory_fraction(device),
    )
    itemsize = next(model.parameters()).element_size()
    return max(1, int(available / bytes_of_row(model.config, positions, itemsize)))


def bytes_to_plan(*, free: int, total: int, reserved: int, allocated: int, share: float) -> float:
    """Bytes of GPU memory that this process may use: its share of the GPU, since several processes
    see the same free memory.

    Args:
        free, total: of the GPU.
        reserved, allocated: by torch in this process, of which the latter is in use.
        share: of the GPU that this process may take.
    """
    # What torch's allocator holds and does not use is free to us, too.
    return _PLANNED_SHARE * max(0.0, min(free + reserved, share * total) - allocated)


def bytes_of_row(config: PretrainedConfig, positions: int, itemsize: int) -> int:
    """Bytes of one row: keys and values of all positions in all layers, and logits.

    Args:
        positions: prompt and completion tokens of a row.
        itemsize: bytes of one number in the model's dtype.
    """
    cache = numbers_of_position(config) * positions * itemsize
    vocab_size = text_config(config).vocab_size
    return cache + _LOGIT_COPIES * vocab_size * torch.float32.itemsize


def numbers_of_position(config: PretrainedConfig) -> int:
    """Numbers that the keys and values of one position are, in all layers."""
    config = text_config(config)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * key_heads * head_dim
