"""The fastest way a model has to take one more token per row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from transformers import Cache

from rllib_llm.sampling.cuda_graph import CudaGraph
from rllib_llm.sampling.decode_weights import decode_layout
from rllib_llm.sampling.kv_cache import SharedPromptCache
from rllib_llm.sampling.llama_step import LlamaStep, is_llama_shaped
from rllib_llm.sampling.static_step import StaticLlamaStep, can_be_recorded

# tokens [rows] int64, their positions [rows] int64, cache, padding mask [rows, seen + 1] bool or
# None -> logits [rows, vocab]; the cache holds the tokens afterwards.
DecodeStep = Callable[[torch.Tensor, torch.Tensor, Cache, torch.Tensor | None], torch.Tensor]
# As `open_decode_step` with its default settings.
OpenStep = Callable[[nn.Module, Cache, int], AbstractContextManager[DecodeStep]]


@contextmanager
def open_decode_step(
    model: nn.Module, cache: Cache, steps: int, cuda_graphs: bool = True
) -> Iterator[DecodeStep]:
    """A step of the model as it is now, valid inside the context.

    Args:
        model: causal LM of transformers.
        cache: the cache the step will be used with.
        steps: how often the step will be taken at most.
        cuda_graphs: whether the step may be recorded and replayed on a CUDA device.
    """
    if isinstance(cache, SharedPromptCache) and is_llama_shaped(model):
        llama_step = LlamaStep(model, steps)
        device = llama_step.embedding.device
        if cuda_graphs and device.type == "cuda" and can_be_recorded(model):
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
        return model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=padding_mask,
            position_ids=positions.unsqueeze(1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    with decode_layout(model, steps):
        yield step
