"""Our own decode loop as an engine: rows of any settings, and new weights between two steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from rllib_llm.engines.batch_rows import PromptGroup
from rllib_llm.engines.decode_step import (
    DecodePlan,
    check_positions,
    check_tokens,
    open_decode_step,
)
from rllib_llm.engines.decoder import Decoder
from rllib_llm.engines.engine import check_decoding
from rllib_llm.engines.kv_cache import KeptPrefixes, Prefix
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import (
    Ended,
    Engine,
    Finish,
    InFlight,
    Row,
    Tokens,
    check_rows,
    uniform_noise,
)
from rllib_llm.engines.row_blocks import row_budget
from rllib_llm.modules.multimodal import other_tensors
from rllib_llm.shared.errors import Problems, require

if TYPE_CHECKING:
    from rllib_llm.modules.text_scores import TextScores

# --- Published weights put into a model that an engine owns

# Prefix of the Hugging Face model's parameters in the state of the RLModule around it.
TRUNK = "model."


def named_as(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights, named as in the policy's state or the model's, by the names of the model's.

    Raises:
        ValueError: names that the model does not have, or of which it misses some, or other shapes.
            Tied parameters may come under one name; towers of a multimodal model need not come.
    """
    own = model.state_dict()
    named = {}
    for name, tensor in weights.items():
        short = name.removeprefix(TRUNK)
        named[short if short in own else name] = tensor
    loaded = {own[name].data_ptr() for name in named if name in own}
    loaded |= {tensor.data_ptr() for tensor in other_tensors(model).values()}
    missing = [name for name in own if name not in named and own[name].data_ptr() not in loaded]
    unknown = sorted(set(named) - set(own))
    if missing or unknown:
        reason = f"{missing[:3]} are missing and {unknown[:3]} are unknown"
        raise Problems("weights", "name the model's parameters", reason)
    for name, tensor in named.items():
        if tensor.shape != (needed := own[name].shape):
            given = tuple(tensor.shape)
            raise Problems(f"weights[{name!r}].shape", f"be {tuple(needed)}", value=given)
    return named


def copy_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copies weights into the model's parameters; those of another model, see `named_as`, are a
    ValueError before any is copied."""
    own = model.state_dict()
    for name, tensor in named_as(model, weights).items():
        own[name].copy_(tensor)


# An engine decodes for as long as it lives: copies of the weights that make it faster pay.
_MANY_STEPS = 1_000_000
# Of conversations between two turns.
_KEPT_BYTES = 2 * 2**30
_ONE_TOKEN = SamplingParams(pad_token_id=0, max_new_tokens=1)


class TorchEngine(Engine):
    """Samples by our own decode loop, with a module's model.

    Args:
        model: causal LM of transformers in eval mode, which this engine owns: it is written to by
            `load`.
        version: of the model's weights; None where they have to be loaded first.
        max_rows: rows in the batch at once; None is no bound on a CPU, and on a GPU what its free
            memory holds at `max_positions`.
        max_positions: prompt and completion of a long row, for `max_rows` on a GPU.
        load_weights: puts published weights into the model; by default they are copied into its
            parameters by name.

    Raises:
        ValueError: the model cannot be decoded here.
    """

    def __init__(
        self, model: nn.Module, *, version: int | None, max_rows: int | None = None,
        max_positions: int = 2048, steps_between_looks: int | None = None,
        load_weights: Callable[[dict[str, torch.Tensor]], None] | None = None,
        cuda_graphs: bool = True, plan: DecodePlan | None = None, max_prefill: int | None = None,
    ) -> None:  # fmt: skip
        self.model, self._version = model, version
        self.device = next(model.parameters()).device
        plan = plan or DecodePlan.of(model)
        check_decoding(model)
        self._load_weights = load_weights or (lambda weights: copy_weights(model, weights))
        self._decoder = Decoder(
            plan, steps=_MANY_STEPS, with_versions=True,
            steps_between_looks=steps_between_looks or plan.steps_between_looks,
            max_rows=max_rows or row_budget(model, max_positions), max_prefill=max_prefill,
            open_step=functools.partial(open_decode_step, cuda_graphs=cuda_graphs),
        )  # fmt: skip
        self._buffers = self._decoder.buffers
        self._buffers.version = version or 0
        self._rows: dict[int, Row] = {}  # by column of the buffers
        self._columns: dict[Hashable, int] = {}
        self._left: list[Ended] = []  # rows that ended while others were taken out
        self._kept = KeptPrefixes(_KEPT_BYTES)
        self._pending: tuple[dict[str, torch.Tensor], int] | None = None

    @property
    def num_running(self) -> int:
        return len(self._rows) + len(self._left)

    @property
    def num_sampling(self) -> int:
        """Rows that have a place in the batch."""
        return len(self._decoder.rows)

    @property
    def version(self) -> int | None:
        return self._version if self._pending is None else self._pending[1]

    # --- rows --------------------------------------------------------------------------------

    def add(self, rows: Sequence[Row]) -> None:
        check_rows(rows, [*self._columns, *(each.id for each in self._left)], self.version)
        shares = self._decoder.plan.shares_prompts
        alike: dict[SamplingParams, list[Row]] = {}  # the config is read once for each
        for row in rows:
            alike.setdefault(row.params, []).append(row)
        for params, group in alike.items():
            longest = max(len(row.token_ids) - row.num_sampled for row in group)
            check_positions(self.model.config, longest, params)
            ends = [end for row in group for end in (min(row.token_ids), max(row.token_ids))]
            check_tokens(self.model.config, ends, params)
            require(shares or not any(row.images for row in group), "images", ...,
                    "be left out for this model",
                    "the cache of its layers holds no prompt for several rows")  # fmt: skip
        drawn = _drawn(rows)  # raises for a seed out of range: nothing has been reserved yet
        longest = max((row.params.max_new_tokens for row in rows), default=0)
        columns = self._decoder.reserve(len(rows), longest)
        groups: dict[object, list[int]] = {}
        for row, column in zip(rows, columns, strict=True):
            self._rows[column], self._columns[row.id] = row, column
            if row.guide is not None:
                self._decoder.guides[column] = row.guide
            key = column if row.group is None else (row.group, tuple(row.token_ids))
            groups.setdefault(key, []).append(column)
        with torch.inference_mode():
            for some, noise in drawn:
                self._buffers.begin([columns[i] for i in some], noise)
            self._decoder.put([self._group(part) for part in groups.values()])

    def _group(self, columns: list[int]) -> PromptGroup:
        """Rows of the same tokens, as they wait for a place."""
        rows = [self._rows[column] for column in columns]
        (row, *others), prefix = rows, None
        ids = torch.tensor(list(row.token_ids), dtype=torch.int64, device=self.device)
        shares = self._decoder.plan.shares_prompts
        if not others and row.conversation is not None and shares and not row.images:
            self._decoder.wanted.add(columns[0])
            prefix = self._kept.take(row.conversation, row.token_ids)
        params, num_sampled = [each.params for each in rows], [each.num_sampled for each in rows]
        return PromptGroup(ids, columns, params, num_sampled, prefix, row.images, row.num_shown)

    def step(self) -> list[Ended]:
        ended, self._left = self._left, []
        with torch.inference_mode():
            if self._pending is not None and not len(self._decoder.rows):
                self._put(*self._pending)
            return ended + self._let_go(self._decoder.step(admits=self._pending is None))

    def sampled(self, ids: Sequence[Hashable], starts: Sequence[int]) -> list[Tokens]:
        first = dict(zip(ids, starts, strict=True))
        found = {
            each.id: each.tokens.since(first[each.id]) for each in self._left if each.id in first
        }
        columns = [self._columns[i] for i in ids if i not in found]
        held = [self._rows[column] for column in columns]
        # The clock says how far the rows of the batch are; the others have no new token yet.
        rows, clock = self._decoder.rows, self._decoder.clock
        ends = (np.minimum(clock, rows.last) - rows.born + 1).tolist()
        reached = dict(zip(rows.columns.tolist(), ends, strict=True))
        ends = [
            reached.get(column, row.num_sampled) for column, row in zip(columns, held, strict=True)
        ]
        wanted = [row.num_sampled + first[row.id] for row in held]
        # One more is read, which says whether the row has ended.
        begins = [
            max(row.num_sampled, min(start, end) - 1)
            for row, start, end in zip(held, wanted, ends, strict=True)
        ]
        for row, tokens, start, begin, end in zip(
            held, self._read(columns, begins, ends), wanted, begins, ends, strict=True
        ):
            finish: Finish | None = "stop"  # only a stop token ends a row before the clock says so
            if begin + len(tokens.token_ids) == end:
                finish = finish_of(row, tokens, end) if tokens.token_ids else None
            found[row.id] = tokens._replace(finish=finish).since(start - begin)
        return [found[i] for i in ids]

    def _read(
        self, columns: list[int], starts: list[int] | None = None, ends: list[int] | None = None
    ) -> list[Tokens]:
        """The tokens of rows since they were added, or between two indices of each."""
        rows = [self._rows[column] for column in columns]
        starts = starts or [row.num_sampled for row in rows]
        return self._buffers.read(columns, starts, ends, [row.params.top_logprobs for row in rows])

    def abort(self, ids: Sequence[Hashable]) -> list[Ended]:
        with torch.inference_mode():
            # Some may have ended already, unseen.
            ended = self._let_go(self._decoder.drop_ended())
            wanted = set(ids)
            columns = [self._columns[i] for i in wanted if i in self._columns]
            self._decoder.remove(columns)
            aborted = self._let_go(columns, "aborted")
        ended = self._left + ended
        self._left = [each for each in ended if each.id not in wanted]
        return [each for each in ended if each.id in wanted] + aborted

    def _let_go(self, columns: list[int], finish: Finish | None = None) -> list[Ended]:
        """The tokens of rows that have left the decoder; of turns the cache is kept."""
        ended = []
        for column, tokens in zip(columns, self._read(columns), strict=True):
            row = self._rows.pop(column)
            del self._columns[row.id]
            self._decoder.wanted.discard(column)
            layers = self._decoder.taken_along.pop(column, None)
            if layers is not None and row.conversation is not None:
                token_ids = [*row.token_ids, *tokens.token_ids][:-1]  # the last was never fed to it
                prefix = Prefix(token_ids[: layers[0][0].shape[1]], layers)
                self._kept.put(row.conversation, prefix)
            why = finish or finish_of(row, tokens) or "length"
            experts = self._decoder.experts.pop(column, None)
            if experts is not None:
                # In memory of its own; a row may have been decoded beyond its end.
                experts = experts[: len(row.token_ids) + len(tokens.token_ids) - 1].cpu().clone()
            ended.append(Ended(row.id, *tokens[:3], why, tokens.likeliest, experts))
        return ended

    # --- weights -----------------------------------------------------------------------------

    def load(
        self, weights: dict[str, torch.Tensor], version: int, in_flight: InFlight = "finish"
    ) -> None:
        if in_flight == "finish" and len(self._decoder.rows):
            self._pending = (weights, version)
            return
        with torch.inference_mode():
            self._left += self._let_go(self._decoder.drop_ended())
            if in_flight == "recompute":
                self._decoder.recompute()
        self._put(weights, version)

    def _put(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self._decoder.close()  # it holds copies of the weights
        self._kept.clear()
        queue = self._decoder.queue
        for i, group in enumerate(queue):
            queue[i] = replace(group, prefix=None)
        # What is in the batch was begun with other weights.
        self._decoder.wanted.clear()
        self._decoder.taken_along.clear()
        with torch.inference_mode(False), torch.no_grad():
            self._load_weights(weights)
        self._pending, self._version = None, version
        self._buffers.version = version

    def holds(self, row_id: Hashable) -> bool:
        """Whether a row of this id is in it."""
        return row_id in self._columns or any(each.id == row_id for each in self._left)

    def score(self, token_ids: Sequence[int], top: int) -> TextScores:
        """Log-probs of a text's tokens, and the `top` likeliest at the place of each.

        Raises:
            ValueError: the text is longer than the model's positions.
        """
        from rllib_llm.modules.text_scores import score_text  # servers alone are asked for it

        check_positions(self.model.config, len(token_ids) - 1, _ONE_TOKEN)
        return score_text(self.model, token_ids, top)

    def open(self) -> None:
        """Lays the weights out for decoding now, which the next step would do."""
        self._decoder.open()

    def close(self) -> None:
        self._decoder.close()
        self._kept.clear()
        self._rows.clear()
        self._columns.clear()


def _drawn(rows: Sequence[Row]) -> list[tuple[list[int], torch.Tensor | None]]:
    """The noise that decides the tokens of rows, [some rows, their longest], None of greedy ones;
    with the rows' places."""
    parts: dict[tuple[int, int, int] | None, list[int]] = {}
    for i, row in enumerate(rows):
        noise = row.noise
        key = None if row.params.greedy else (noise.seed, noise.turn, row.params.max_new_tokens)
        parts.setdefault(key, []).append(i)
    return [
        (some, key and uniform_noise(key[0], [rows[i].noise.row for i in some], key[2], key[1]))
        for key, some in parts.items()
    ]


def finish_of(row: Row, tokens: Tokens, num_sampled: int = 0) -> Finish | None:
    """Why a row with these newest tokens has finished; None if it has not.

    Args:
        tokens: of it, at least one.
        num_sampled: its tokens so far, these among them.
    """
    if not all(map(math.isfinite, tokens.logprobs)):
        return "error"
    if tokens.token_ids[-1] in row.params.stop_token_ids:
        return "stop"
    return "length" if num_sampled >= row.params.max_new_tokens else None
