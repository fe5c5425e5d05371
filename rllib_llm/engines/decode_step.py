"""The fastest way a model has to take one more token per row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache

from rllib_llm.engines.kv_cache import (
    RepeatedPromptCache,
    SharedPromptCache,
    num_shared_layers,
)
from rllib_llm.engines.llama_step import LlamaStep, decode_layout, is_llama_shaped
from rllib_llm.engines.row_blocks import cost_of_block
from rllib_llm.engines.static_step import CudaGraph, StaticLlamaStep, can_be_recorded
from rllib_llm.modules.packing.dense_packing import recurring_size
from rllib_llm.modules.packing.lm_head import take_apart
from rllib_llm.modules.packing.trunk import wants_recurring_sizes


@dataclass(frozen=True)
class DecodePlan:
    """How a model is decoded, decided once by whoever loads it: its layers are what they are then,
    and it stays on its device, in its dtype.

    num_layers: attention layers of a `SharedPromptCache`; None: it wants transformers' own cache.
    is_llama: whether `LlamaStep` computes what the model computes. is_recordable: whether its step
    can be recorded, too. block_cost: row positions that one more block has to save; infinite where
    the step knows none, or where the rotation of all rows is that of the longest beside them.
    has_recurring_sizes: whether prompts are read in sizes that come again.
    """

    model: nn.Module
    num_layers: int | None
    is_llama: bool
    is_recordable: bool
    block_cost: float
    has_recurring_sizes: bool

    @classmethod
    def of(cls, model: nn.Module) -> DecodePlan:
        """The plan of a causal LM of transformers."""
        weight = next(model.parameters())
        is_llama = is_llama_shaped(model)
        is_recordable = is_llama and can_be_recorded(model)
        cost = float("inf")
        if is_recordable:
            cost = cost_of_block(model.config, weight.element_size(), weight.device)
        return cls(
            model, num_shared_layers(model.config), is_llama, is_recordable, cost,
            wants_recurring_sizes(weight),
        )  # fmt: skip

    @property
    def shares_prompts(self) -> bool:
        """Whether completions share the keys and values of their prompt."""
        return self.num_layers is not None

    def make_cache(self, num_completions: int, capacity: int) -> Cache:
        """The fastest cache that is right for the model's layers.

        Args:
            num_completions: completions per prompt.
            capacity: prompt and completion positions to hold.
        """
        if self.num_layers is None:
            return RepeatedPromptCache(config=self.model.config)
        return SharedPromptCache(self.num_layers, num_completions, capacity)


# tokens [rows] int64, their positions [rows] int64, cache, padding mask [rows, seen + 1] bool or
# None -> logits [rows, vocab]; the cache holds the tokens afterwards. With a value head the values
# of the same states are one more column.
DecodeStep = Callable[[torch.Tensor, torch.Tensor, Cache, torch.Tensor | None], torch.Tensor]
# As `open_decode_step` with its default settings.
OpenStep = Callable[[DecodePlan, Cache, int, nn.Module | None], AbstractContextManager[DecodeStep]]


@contextmanager
def open_decode_step(
    plan: DecodePlan,
    cache: Cache,
    steps: int,
    value_head: nn.Module | None = None,
    cuda_graphs: bool = True,
) -> Iterator[DecodeStep]:
    """A step of the model as it is now, valid inside the context.

    Args:
        plan: of the model.
        cache: the cache the step will be used with.
        steps: how often the step will be taken at most.
        value_head: a linear layer of the trunk's last state, as `linear`, whose result is appended.
        cuda_graphs: whether the step may be recorded and replayed on a CUDA device.
    """
    model = plan.model
    if plan.is_llama and isinstance(cache, SharedPromptCache):
        llama_step = LlamaStep(model, steps, value_head)
        device = llama_step.embedding.device
        if cuda_graphs and device.type == "cuda" and plan.is_recordable:
            yield StaticLlamaStep(llama_step, functools.partial(CudaGraph, device=device))
        else:
            yield llama_step
        return

    def step(
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        padding_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        return last_logits(
            model,
            value_head,
            input_ids=tokens.unsqueeze(1),
            attention_mask=padding_mask,
            position_ids=positions.unsqueeze(1),
            past_key_values=cache,
        )

    with decode_layout(model, steps):
        yield step


def last_logits(model: nn.Module, value_head: nn.Module | None, **inputs: Any) -> torch.Tensor:
    """Logits [rows, vocab] behind each row's last token by the model's own forward, which fills the
    cache; with a value head one column more, the values [rows] of these states.

    With a value head the model must be one that `take_apart` takes apart.
    """
    if value_head is None:
        return model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]
    # Not by `output_hidden_states`: transformers leaves its hooks behind in the model.
    halves = take_apart(model)
    assert halves is not None
    state = halves.trunk(**inputs, use_cache=True).last_hidden_state[:, -1]
    logits, values = halves.logits(state), value_head(state)
    return torch.cat([logits, values.to(logits.dtype).unsqueeze(1)], dim=1)


# Tokens of all prompts in a piece: enough for a GPU to be busy with.
PIECE_TOKENS = 16_384


def recurring_length(num_prompts: int, length: int) -> int:
    """`length` positions or a few more, of which so many prompts have a `recurring_size` of tokens
    together; `length` where 15 or an eighth more do not suffice."""
    most = length + max(15, length // 8)
    for longer in range(length, most + 1):
        if recurring_size(num_prompts * longer) == num_prompts * longer:
            return longer
    return length


def prefill(
    model: nn.Module,
    value_head: nn.Module | None,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: SharedPromptCache | RepeatedPromptCache,
    start: int = 0,
    piece_tokens: int = PIECE_TOKENS,
) -> torch.Tensor:
    """Logits [prompts, vocab] behind the prompts' last tokens; the cache holds the prompts
    afterwards. With a value head as `last_logits`.

    Args:
        model: causal LM of transformers.
        value_head: see `last_logits`.
        ids: [prompts, P] int64, left-padded.
        mask: [prompts, P] bool, True where a prompt token stands.
        cache: with room for P positions, of which it holds the first `start`.
        start: positions that were computed before.
        piece_tokens: that go through the model at once, in all prompts together; a piece has one
            position of each prompt at least. Changes memory, and numbers by round-off.
    """
    end = ids.shape[1]
    # transformers' own layers may not go on with several positions.
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
