"""The fastest way a model has to take one more token per row, and what it can take."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from rllib_llm.engines.kv_cache import (
    PromptCache,
    RepeatedPromptCache,
    SharedPromptCache,
    StaticLayer,
    num_shared_layers,
)
from rllib_llm.engines.llama_step import Blocks, LlamaStep, Order, additive, is_llama_shaped
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.row_blocks import cost_of_block
from rllib_llm.modules.images import Shown, image_token_id
from rllib_llm.modules.model_source import is_multimodal, longrope_border, text_config
from rllib_llm.modules.precision import leave_out_cudnn_attention
from rllib_llm.modules.routers import routed
from rllib_llm.modules.towers import seeing
from rllib_llm.modules.trunk import take_apart, wants_recurring_sizes
from rllib_llm.shared.errors import Problems, require


@dataclass(frozen=True)
class DecodePlan:
    """Decisions about decoding a model, made once when it is loaded. Its layers, device and dtype
    must not change afterwards.

    num_layers: attention layers of a `SharedPromptCache`; None: it wants transformers' own cache.
    is_llama: whether `LlamaStep` computes what the model computes. is_recordable: whether its step
    can be recorded, too. block_cost: row positions that one more block has to save; infinite where
    the step knows none, or where the rotation of all rows is that of the longest beside them.
    has_recurring_sizes: whether prompts are read in sizes that come again. keeps_experts: whether
    the experts of each token are kept, of a mixture of experts.
    """

    model: nn.Module
    num_layers: int | None
    is_llama: bool
    is_recordable: bool
    block_cost: float
    has_recurring_sizes: bool
    keeps_experts: bool = False

    @classmethod
    def of(cls, model: nn.Module, keeps_experts: bool = False) -> DecodePlan:
        """The plan of a causal LM of transformers.

        Raises:
            Problems: experts cannot be kept beside the states of the model's layers.
        """
        leave_out_cudnn_attention()
        weight, num_layers = next(model.parameters()), num_shared_layers(model.config)
        is_llama = num_layers is not None and is_llama_shaped(model)
        is_recordable = is_llama and can_be_recorded(model)
        cost = float("inf")
        if is_recordable:
            cost = cost_of_block(model.config, weight.element_size(), weight.device)
        recurring = wants_recurring_sizes(model)
        require(num_layers is not None or not keeps_experts, "routing_replay", True,
                f"be False for {type(model).__name__}",
                "its layers have a cache of their own, which holds no experts")  # fmt: skip
        return cls(model, num_layers, is_llama, is_recordable, cost, recurring, keeps_experts)

    @property
    def steps_between_looks(self) -> int:
        """Steps between two looks at which rows have ended, each of which waits for a device."""
        return 1 if next(self.model.parameters()).device.type == "cpu" else 8

    @property
    def shares_prompts(self) -> bool:
        """Whether completions share the keys and values of their prompt."""
        return self.num_layers is not None

    def make_cache(self, capacity: int) -> PromptCache:
        """The fastest cache that is right for the model's layers, of so many positions."""
        if self.num_layers is None:
            return RepeatedPromptCache(config=self.model.config)
        return SharedPromptCache(self.num_layers, capacity, self.keeps_experts)


# As `LlamaStep.__call__`; with a value head the values of the same states are one more column.
DecodeStep = Callable[[torch.Tensor, torch.Tensor, Blocks, Order | None], torch.Tensor]
# As `open_decode_step` with its default settings.
OpenStep = Callable[[DecodePlan, int, nn.Module | None], DecodeStep]


def check_positions(config: PretrainedConfig, longest_prompt: int, params: SamplingParams) -> None:
    """Raises ValueError for more positions than the model has, or than its rows are independent
    of each other up to."""
    text, num = text_config(config), params.max_new_tokens
    for limit, why in (
        (getattr(text, "max_position_embeddings", None), "the model has no more positions"),
        (longrope_border(text), "there longrope's factors begin to depend on the rows beside it"),
    ):
        if limit and longest_prompt + num > limit:
            name = f"a prompt of {longest_prompt} tokens with max_new_tokens={num}"
            raise Problems(name, f"have at most {limit}", why, "Shorten prompts or completions")


def check_tokens(
    config: PretrainedConfig, token_ids: Sequence[int], params: SamplingParams
) -> None:
    """Raises ValueError for tokens of a prompt, or of a bias, that the model does not have."""
    vocab_size = text_config(config).vocab_size
    biased = [token for token, _ in params.logit_bias]
    for name, ids in (("token_ids", token_ids), ("logit_bias", biased)):
        if wrong := [token for token in ids if not 0 <= token < vocab_size]:
            rule = f"be ids of the policy's own tokens, 0 to {vocab_size - 1}"
            raise Problems(name, rule, value=wrong[0])


def open_decode_step(
    plan: DecodePlan, steps: int, value_head: nn.Module | None = None, cuda_graphs: bool = True
) -> DecodeStep:
    """A step of the model as it is now, for caches of the plan; it may hold copies of the weights.

    Args:
        steps: how often the step will be taken at most.
        value_head: a linear layer of the trunk's last state, as `linear`, whose result is appended.
        cuda_graphs: whether the step may be recorded and replayed on a CUDA device.
    """
    if plan.is_llama:
        llama_step = LlamaStep(plan.model, steps, value_head)
        device = llama_step.embedding.device
        if cuda_graphs and device.type == "cuda" and plan.is_recordable:
            return StaticLlamaStep(llama_step, functools.partial(CudaGraph, device=device))
        return llama_step

    def step(
        tokens: torch.Tensor, positions: torch.Tensor, blocks: Blocks, order: Order | None = None
    ) -> torch.Tensor:
        ((cache, padding_mask),) = blocks
        return last_logits(
            plan.model, value_head, input_ids=tokens.unsqueeze(1), attention_mask=padding_mask,
            position_ids=positions.unsqueeze(1), past_key_values=cache,
        )  # fmt: skip

    return step


def last_logits(model: nn.Module, value_head: nn.Module | None, **inputs: Any) -> torch.Tensor:
    """Logits [rows, vocab] after each row's last token by the model's own forward, which fills the
    cache; with a value head one column more, the values [rows] of these states.

    With a value head the model must be one that `take_apart` takes apart. Of a multimodal model the
    text decoder alone is called: the model around it keeps positions of images between its calls.
    """
    # Not by `output_hidden_states`: transformers leaves its hooks behind in the model.
    halves = take_apart(model) if value_head is not None or is_multimodal(model) else None
    with _experts_kept(model, inputs["past_key_values"]):
        if halves is None:
            return model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]
        state = halves.trunk(**inputs, use_cache=True).last_hidden_state[:, -1]
    return _with_value(halves.logits(state), state, value_head)


@contextmanager
def _experts_kept(model: nn.Module, cache: PromptCache) -> Iterator[None]:
    """Keeps the experts that a pass of the model chooses, where the cache has room for them."""
    if not getattr(cache, "keeps_experts", False):
        yield
        return
    with routed(model) as chosen:
        yield
    new = chosen.by_token().unflatten(0, (cache.layers[0].num_rows, -1)).unsqueeze(1)
    cache.layers[-1].update(new, new[..., :0])


def _with_value(
    logits: torch.Tensor, state: torch.Tensor, value_head: nn.Module | None
) -> torch.Tensor:
    if value_head is None:
        return logits
    return torch.cat([logits, value_head(state).to(logits.dtype).unsqueeze(1)], dim=1)


def prefill_seen(
    model: Any, value_head: nn.Module | None, ids: torch.Tensor,
    images: Mapping[str, torch.Tensor], num_shown: int, cache: PromptCache,
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """As `prefill`, of one prompt with images [1, P] by the model around the decoder; and by how
    much the position of the next token is ahead of P: the patches of an image may share theirs.
    Tokens of images behind the first `num_shown` were said."""
    halves, around = take_apart(model), model.base_model
    assert halves is not None, "a model that sees is taken apart, or refused"
    if hasattr(around, "rope_deltas"):
        around.rope_deltas = None  # of the call before
    is_text = ids == image_token_id(model.config)
    is_text[:, :num_shown] = False
    with (
        seeing(model, ids, is_text, Shown.of(images)) as inputs, _experts_kept(model, cache)
    ):  # fmt: skip
        output = around(past_key_values=cache, use_cache=True, **inputs)
    state = output.last_hidden_state[:, -1]
    ahead = getattr(around, "rope_deltas", None)
    logits = _with_value(halves.logits(state), state, value_head)
    return logits, 0 if ahead is None else int(ahead)


# Tokens of all prompts in a piece: enough for a GPU to be busy with.
PIECE_TOKENS = 16_384


def recurring_length(num_prompts: int, length: int) -> int:
    """`length` positions or up to an eighth more (or 15), so that the tokens of all prompts are one
    of few numbers: up to 4,096 tokens of 8 between two powers of two, from 8,192 on of 32, since an
    eighth of few tokens is soon computed. Where so much padding does not suffice, numbers twice as
    close are tried, down to multiples of 16."""
    most = length + max(15, length // 8)
    bits = (num_prompts * length).bit_length()
    step = 2 ** max(4, min(8, bits - 4), bits - 6)
    while step >= 16:
        unit = step // math.gcd(num_prompts, step)
        longer = -(-length // unit) * unit
        if longer <= most:
            return longer
        step //= 2
    return length


def prefill(
    model: nn.Module, value_head: nn.Module | None, ids: torch.Tensor, mask: torch.Tensor,
    cache: PromptCache, start: int = 0, piece_tokens: int = PIECE_TOKENS,
) -> torch.Tensor:  # fmt: skip
    """Logits [prompts, vocab] after the prompts' last tokens; fills the cache with the prompts.
    With a value head as `last_logits`.

    Args:
        ids: [prompts, P] int64, left-padded.
        mask: [prompts, P] bool, True where a prompt token stands.
        cache: with room for P positions, of which it holds the first `start`.
        start: positions that were computed before.
        piece_tokens: that go through the model at once, in all prompts together; a piece has one
            position of each prompt at least. Changes memory, and numbers by round-off.
    """
    end = ids.shape[1]
    # transformers' own layers may not take several positions once they hold some.
    step = end if isinstance(cache, RepeatedPromptCache) else max(1, piece_tokens // len(ids))
    positions = (mask.long().cumsum(dim=1) - 1).clamp_(min=0)
    has_padding = not bool(mask.all())
    for first in range(start, end, step):
        last = min(first + step, end)
        logits = last_logits(
            model,
            value_head,
            input_ids=ids[:, first:last],
            attention_mask=mask[:, :last] if has_padding else None,
            position_ids=positions[:, first:last],
            past_key_values=cache,
        )
    return logits


# --- A step of fixed shapes and addresses, recorded on the device and replayed for each token
#
# A step of a 0.5 B model is some four hundred operations, and to launch them takes a CPU longer
# than to do them takes a GPU. Sampling the token and writing it down stay outside: some thirty
# operations, launched while the GPU is still at the replay before them.
#
# Recording takes as long as several steps launched one by one. A record therefore serves all
# tokens until the cache has grown beyond its positions or most of its rows have ended: rows in
# excess compute what is never read, positions in excess are masked out. The bounds below are
# estimates; with them a step takes 0.33 (5 M parameters) to 0.55 (0.5 B) of the time on an H100.


class CudaGraph:
    """A recorded CUDA graph. Each replay reads and writes the same addresses and shapes, so inputs
    are changed in place, and the function must not synchronise with the device.

    Args:
        function: called twice, once to warm up (libraries make their workspaces, kernels are
            loaded) and once to be recorded; the second call computes nothing.
        previous: a graph whose memory this one may use, since it will not be replayed again.
    """

    def __init__(
        self, function: Callable[[], torch.Tensor], previous: CudaGraph | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        with torch.cuda.device(device):
            stream = _recording_stream(torch.cuda.current_device())
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # `thread_local`: what other threads of the process (weights that arrive) do meanwhile
            # on the device is no part of the recording and must not break it.
            with torch.cuda.graph(
                self._graph,
                pool=None if previous is None else previous._graph.pool(),
                stream=stream,
                capture_error_mode="thread_local",
            ):
                self._result = function()

    def replay(self) -> torch.Tensor:
        """The function's result, overwritten by the next replay."""
        self._graph.replay()
        return self._result


@functools.cache
def _recording_stream(device_index: int) -> torch.cuda.Stream:
    """One per device, since cuBLAS keeps a workspace for every stream that it has worked on."""
    return torch.cuda.Stream(device_index)


# Positions of a record end at a multiple of this: the more, the fewer records and the more keys are
# read in vain.
_POSITIONS = 128
# Fewer tokens than this save less than a record costs.
_MIN_TOKENS = 16
# Fewer rows do not make a step cheaper: it is bound by reading the weights.
_FEW_ROWS = 32
# A new record for fewer rows is made when so small a share of the old one's is in use.
_ROW_SHARE = 0.25


# Function and the record before it, which is not used again -> record.
Record = Callable[[Callable[[], torch.Tensor], CudaGraph | None], CudaGraph]


def can_be_recorded(model: nn.Module) -> bool:
    """Whether a Llama-shaped model's step is free of decisions on the host: dynamic rotary
    embeddings, and those of longrope, change with the longest row."""
    rope_type = model.get_decoder().rotary_emb.rope_type
    return "dynamic" not in rope_type and rope_type != "longrope"


class StaticLlamaStep:
    """Logits after one new token per row, as `LlamaStep` gives them, for one cache.

    Args:
        step: the step that is recorded, and taken as it is where too few tokens are left.
        record: makes a record of a function.
    """

    def __init__(self, step: LlamaStep, record: Record) -> None:
        self.step = step
        self.record = record
        self.recorded: CudaGraph | None = None
        self.keys: torch.Tensor | None = None  # of the first layer: other ones need a new record
        self.num_rows = self.num_positions = 0  # of the record

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, blocks: Blocks,
        order: Order | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `LlamaStep.__call__`, of one cache. Rows are left-padded, so positions tell which
        tokens count and the mask is not read. The logits are overwritten by the next step."""
        ((cache, _),) = blocks
        rows, length = len(tokens), cache.length
        known = self.keys is cache.layers[0].keys
        fits = known and rows <= self.num_rows and length < self.num_positions
        wasteful = self.num_rows > _FEW_ROWS and rows <= _ROW_SHARE * self.num_rows
        pays = cache.capacity - length >= _MIN_TOKENS
        if not fits and not pays:
            return self.step(tokens, positions, blocks)
        if not known:
            self._allocate(cache)
        self.tokens[:rows].copy_(tokens)
        self.positions[:rows].copy_(positions)
        self.column.fill_(length)
        recorded = self.recorded
        if recorded is None or not fits or (wasteful and pays):
            recorded = self._record(rows, cache)
        logits = recorded.replay()
        for layer in cache.layers:  # `StaticLayer`s have written the position
            layer.length += 1
        return logits[:rows]

    def _allocate(self, cache: SharedPromptCache) -> None:
        """Makes the tensors that each replay reads, for as many rows as the cache has."""
        self.keys = keys = cache.layers[0].keys
        self.tokens = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
        self.positions = torch.zeros_like(self.tokens)
        self.column = self.tokens.new_zeros(1)
        for layer in cache.layers:
            # What is masked out is multiplied by 0, which is not 0 for any leftover bits.
            for buffer in (layer.keys, layer.values):
                buffer[:, :, layer.length :] = 0
                buffer[layer.num_rows :] = 0

    def _record(self, rows: int, cache: SharedPromptCache) -> CudaGraph:
        """Records the step for so many rows and the positions to come. The record reads the inputs'
        tensors, the cache's buffers and the weights; each of them lives as long as this step."""
        self.num_rows = min(-(-rows // 8) * 8, len(self.tokens))
        self.num_positions = positions_of_record(cache.length, cache.capacity)
        tokens, positions = self.tokens[: self.num_rows], self.positions[: self.num_rows]
        layers = [
            StaticLayer(layer, self.column, self.num_rows, self.num_positions)
            for layer in cache.layers
        ]
        windows = [layer.window for layer in self.step.layers]

        def run() -> torch.Tensor:
            masks = {
                window: additive(
                    visible(self.column, positions, self.num_positions, window),
                    self.step.embedding.dtype,
                )
                for window in set(windows)
            }
            seen = [[(layer, masks[w])] for layer, w in zip(layers, windows, strict=True)]
            return self.step.logits(tokens, positions, seen)

        self.recorded = recorded = self.record(run, self.recorded)
        return recorded


def positions_of_record(length: int, capacity: int) -> int:
    """Positions that a record made at `length` looks at, more than `length`: up to the next border,
    or all `capacity` where too few for another record would be left."""
    end = (length // _POSITIONS + 1) * _POSITIONS
    return end if capacity - end >= _MIN_TOKENS else capacity


def visible(
    column: torch.Tensor, positions: torch.Tensor, num_positions: int, window: int | None
) -> torch.Tensor:
    """Mask of the cache's columns that a left-padded row looks at, [rows, num_positions] bool.

    Args:
        column: [1] int64, the column of the rows' newest tokens.
        positions: [rows] int64, the positions of these tokens: how many of theirs are before them.
        num_positions: columns.
        window: columns that it looks back, the newest among them; None without a limit.
    """
    age = column - torch.arange(num_positions, device=column.device)
    seen = (age >= 0) & (age <= positions.unsqueeze(1))
    return seen if window is None else seen & (age < window)
