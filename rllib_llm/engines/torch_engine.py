"""Our own decode loop as an engine: rows of any settings, and new weights between two steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from rllib_llm.engines.batch_rows import PromptGroup
from rllib_llm.engines.decode_step import DecodePlan, open_decode_step
from rllib_llm.engines.decoder import Decoder
from rllib_llm.engines.engine import check_decoding, check_positions, check_tokens
from rllib_llm.engines.kv_cache import KeptPrefixes, Prefix
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import (
    Ended,
    Engine,
    Finish,
    InFlight,
    Likeliest,
    Row,
    Tokens,
    check_rows,
    uniform_noise,
)
from rllib_llm.engines.row_blocks import row_budget
from rllib_llm.modules.model_source import text_config
from rllib_llm.modules.multimodal import other_tensors
from rllib_llm.modules.packing import recurring_size
from rllib_llm.modules.trunk import padded_hidden, take_apart, wants_recurring_sizes
from rllib_llm.shared.errors import Problems

# --- Log-probs of given texts: what `echo` of a server returns of a prompt

# Logits of so many positions at once: of a long text they need more memory than the model.
_BLOCK = 512


@dataclass(frozen=True)
class TextScores:
    """Log-probs of a text's tokens from the second on."""

    logprobs: list[float]
    """log_softmax(logits) of each token."""
    ranks: list[int]
    """Of each token among all at its place, 1 the likeliest."""
    top_ids: np.ndarray
    """[tokens, top] int64, the likeliest tokens at the place of each."""
    top_logprobs: np.ndarray
    """[tokens, top] float32, of the likeliest."""

    @property
    def likeliest(self) -> list[Likeliest]:
        """The likeliest tokens at the place of each: lists, which would be slow to pickle."""
        pairs = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        return [list(zip(*pair, strict=True)) for pair in pairs]


@torch.inference_mode()
def score_text(model: nn.Module, token_ids: Sequence[int], top: int) -> TextScores:
    """One forward pass over a text.

    Args:
        token_ids: at least one.
    """
    device = next(model.parameters()).device
    num = len(token_ids)
    ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=device)
    if wants_recurring_sizes(model):  # attention is causal: what follows changes nothing
        config = text_config(model)
        most = getattr(config, "max_position_embeddings", None) or num
        ids = F.pad(ids, (0, max(0, min(recurring_size(num), most) - num)))
    halves = take_apart(model)  # None: the model computes all logits at once
    if halves is None:
        outputs = model(input_ids=ids, use_cache=False).logits[0, : num - 1]
    else:
        outputs = padded_hidden(halves.trunk, ids)[0, : num - 1]
    logprobs: list[float] = []
    ranks: list[int] = []
    top_ids, top_logprobs = [], []
    for start in range(0, len(outputs), _BLOCK):
        part = outputs[start : start + _BLOCK]
        logits = part if halves is None else halves.logits(part)
        scores = torch.log_softmax(logits.float(), dim=-1)
        targets = ids[0, start + 1 : start + 1 + len(scores), None]
        own = scores.gather(1, targets)
        logprobs += own.squeeze(1).tolist()
        ranks += (1 + (scores > own).sum(dim=1)).tolist()
        values, tokens = scores.topk(min(top, scores.shape[1]), dim=-1)
        top_ids.append(tokens.cpu())
        top_logprobs.append(values.cpu())
    none = torch.empty(0, 0)
    ids_found, values_found = torch.cat(top_ids or [none]), torch.cat(top_logprobs or [none])
    return TextScores(logprobs, ranks, ids_found.numpy(), values_found.numpy())


# --- Published weights put into a model that an engine owns

# Prefix of the Hugging Face model's parameters in the state of the RLModule around it.
TRUNK = "model."


def copy_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copies weights, named as in the policy's state, into the model's parameters.

    Raises:
        ValueError: names that the model does not have, or of which it misses some, or other shapes;
            nothing is copied then. Tied parameters may come under one name; towers of a
            multimodal model need not come.
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
    for name, tensor in named.items():
        own[name].copy_(tensor)


# An engine decodes for as long as it lives: copies of the weights that make it faster pay.
_MANY_STEPS = 1_000_000
# Of conversations between two turns.
_KEPT_BYTES = 2 * 2**30
_ONE_TOKEN = SamplingParams(pad_token_id=0, max_new_tokens=1)


@dataclass
class _RunningRow:
    """A row in the engine."""

    row: Row
    column: int  # of the buffers


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
        self._rows: dict[Hashable, _RunningRow] = {}
        self._ids: dict[int, Hashable] = {}  # by column
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
        check_rows(rows, [*self._rows, *(each.id for each in self._left)], self.version)
        alike: dict[SamplingParams, list[Row]] = {}  # the config is read once for each
        for row in rows:
            alike.setdefault(row.params, []).append(row)
        for params, group in alike.items():
            longest = max(len(row.token_ids) - row.num_sampled for row in group)
            check_positions(self.model.config, longest, params)
            ends = [end for row in group for end in (min(row.token_ids), max(row.token_ids))]
            check_tokens(self.model.config, ends, params)
        drawn = _drawn(rows)  # raises for a seed out of range: nothing has been reserved yet
        longest = max((row.params.max_new_tokens for row in rows), default=0)
        columns = self._decoder.reserve(len(rows), longest)
        groups: dict[object, list[_RunningRow]] = {}
        for row, column in zip(rows, columns, strict=True):
            self._rows[row.id], self._ids[column] = _RunningRow(row, column), row.id
            if row.guide is not None:
                self._decoder.guides[column] = row.guide
            key = column if row.group is None else (row.group, tuple(row.token_ids))
            groups.setdefault(key, []).append(self._rows[row.id])
        with torch.inference_mode():
            for some, noise in drawn:
                self._buffers.begin([columns[i] for i in some], noise)
            self._decoder.put([self._group(part) for part in groups.values()])

    def _group(self, part: Sequence[_RunningRow]) -> PromptGroup:
        """Rows of the same tokens, as they wait for a place."""
        row, columns = part[0].row, [each.column for each in part]
        ids = torch.tensor(list(row.token_ids), dtype=torch.int64, device=self.device)
        prefix = None
        if len(part) == 1 and row.conversation is not None and self._decoder.plan.shares_prompts:
            self._decoder.wanted.add(columns[0])
            prefix = self._kept.take(row.conversation, row.token_ids)
        return PromptGroup(
            ids, columns, [each.row.params for each in part],
            [each.row.num_sampled for each in part], prefix,
        )  # fmt: skip

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
        held = [self._rows[i] for i in ids if i not in found]
        # The clock says how far the rows of the batch are; the others have no new token yet.
        rows, clock = self._decoder.rows, self._decoder.clock
        ends = (np.minimum(clock, rows.last) - rows.born + 1).tolist()
        reached = dict(zip(rows.columns.tolist(), ends, strict=True))
        ends = [reached.get(each.column, each.row.num_sampled) for each in held]
        wanted = [each.row.num_sampled + first[each.row.id] for each in held]
        # One more is read, which says whether the row has ended.
        begins = [
            max(each.row.num_sampled, min(start, end) - 1)
            for each, start, end in zip(held, wanted, ends, strict=True)
        ]
        for each, tokens, start, begin, end in zip(
            held, self._read(held, begins, ends), wanted, begins, ends, strict=True
        ):
            finish: Finish | None = "stop"  # only a stop token ends a row before the clock says so
            if begin + len(tokens.token_ids) == end:
                finish = finish_of(each.row, tokens, end) if tokens.token_ids else None
            found[each.row.id] = tokens._replace(finish=finish).since(start - begin)
        return [found[i] for i in ids]

    def _read(
        self, held: Sequence[_RunningRow], starts: list[int] | None = None,
        ends: list[int] | None = None,
    ) -> list[Tokens]:  # fmt: skip
        """The tokens of rows since they were added, or between two indices of each."""
        return self._buffers.read(
            [each.column for each in held],
            starts or [each.row.num_sampled for each in held],
            ends,
            [each.row.params.top_logprobs for each in held],
        )

    def abort(self, ids: Sequence[Hashable]) -> list[Ended]:
        with torch.inference_mode():
            # Some may have ended already, unseen.
            ended = self._let_go(self._decoder.drop_ended())
            wanted = set(ids)
            columns = [self._rows[i].column for i in wanted if i in self._rows]
            self._decoder.remove(columns)
            aborted = self._let_go(columns, "aborted")
        ended = self._left + ended
        self._left = [each for each in ended if each.id not in wanted]
        return [each for each in ended if each.id in wanted] + aborted

    def _let_go(self, columns: list[int], finish: Finish | None = None) -> list[Ended]:
        """The tokens of rows that have left the decoder."""
        held = [self._rows.pop(self._ids.pop(column)) for column in columns]
        ended = []
        for each, tokens in zip(held, self._read(held), strict=True):
            why = finish or finish_of(each.row, tokens) or "length"
            self._keep(each, tokens.token_ids)
            ended.append(
                Ended(
                    each.row.id, tokens.token_ids, tokens.logprobs, tokens.versions, why,
                    tokens.likeliest,
                )
            )  # fmt: skip
        return ended

    def _keep(self, held: _RunningRow, sampled: list[int]) -> None:
        """Keeps the cache of a turn that is over. The last token was never fed to the model."""
        self._decoder.wanted.discard(held.column)
        layers = self._decoder.taken_along.pop(held.column, None)
        if layers is None or held.row.conversation is None:
            return
        token_ids = [*held.row.token_ids, *sampled][:-1]
        positions = layers[0][0].shape[1]
        self._kept.put(held.row.conversation, Prefix(token_ids[:positions], layers))

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
        self._decoder.queue.forget_prefixes()
        # What is in the batch was begun with other weights.
        self._decoder.wanted.clear()
        self._decoder.taken_along.clear()
        with torch.inference_mode(False), torch.no_grad():
            self._load_weights(weights)
        self._pending, self._version = None, version
        self._buffers.version = version

    def holds(self, row_id: Hashable) -> bool:
        """Whether a row of this id is in it."""
        return row_id in self._rows or any(each.id == row_id for each in self._left)

    def score(self, token_ids: Sequence[int], top: int) -> TextScores:
        """Log-probs of a text's tokens, and the `top` likeliest at the place of each.

        Raises:
            ValueError: the text is longer than the model's positions.
        """
        check_positions(self.model.config, len(token_ids) - 1, _ONE_TOKEN)
        return score_text(self.model, token_ids, top)

    def open(self) -> None:
        """Lays the weights out for decoding now, which the next step would do."""
        self._decoder.open()

    def close(self) -> None:
        self._decoder.close()
        self._kept.clear()
        self._rows.clear()


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
