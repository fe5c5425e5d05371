"""The number of completions that fit into a GPU's free memory at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig

from rllib_llm.shared.process import until_it_fits

Result = TypeVar("Result")

# Share of the free memory that is planned with; the rest is for activations and fragmentation.
_PLANNED_SHARE = 0.8
# Copies of a row's logits alive at the same time, in float32: logits, weights, cumulative sum, one
# temporary; top-p sorts four more.
_LOGIT_COPIES = 8


def row_budget(model: nn.Module, positions: int) -> int | None:
    """Rows that fit into the free memory of the model's GPU; None on other devices: no bound.

    Args:
        model: causal LM of transformers.
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


def with_fewer_rows(
    run: Callable[[int], Result],
    rows: int,
    num_completions: int,
    told: Callable[[int], None] | None = None,
) -> Result:
    """Returns `run(rows)`, called again with half as many rows whenever a GPU runs out of memory.

    Args:
        run: does its work from the beginning, with so many rows at once.
        rows: whole groups of `num_completions`, which stay together.
        told: is given the smaller number, for the next time.

    Raises:
        torch.OutOfMemoryError: one group is too much.
    """

    def make_smaller() -> str | None:
        nonlocal rows
        before, rows = rows, rows // num_completions // 2 * num_completions
        if not rows:
            return None
        if told is not None:
            told(rows)
        return (
            f"{before} completions at once do not fit into the GPU's memory: they are decoded "
            f"{rows} at a time from now on, which changes speed only. sampling_batch_size says so "
            "from the start."
        )

    return until_it_fits(lambda: run(rows), make_smaller)


def bytes_of_row(config: PretrainedConfig, positions: int, itemsize: int) -> int:
    """Bytes of one row: keys and values of all positions in all layers, and logits.

    Args:
        config: the model's config.
        positions: prompt and completion tokens of a row.
        itemsize: bytes of one number in the model's dtype.
    """
    cache = numbers_of_position(config) * positions * itemsize
    vocab_size = config.get_text_config(decoder=True).vocab_size
    return cache + _LOGIT_COPIES * vocab_size * torch.float32.itemsize


def numbers_of_position(config: PretrainedConfig) -> int:
    """Numbers that the keys and values of one position are, in all layers."""
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * key_heads * head_dim
