"""How many completions a GPU's free memory holds at once."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

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
    free, _ = torch.cuda.mem_get_info(device)
    # What torch's allocator holds and does not use is free to us, too.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    itemsize = next(model.parameters()).element_size()
    return max(1, int(_PLANNED_SHARE * free / bytes_of_row(model.config, positions, itemsize)))


def bytes_of_row(config: PretrainedConfig, positions: int, itemsize: int) -> int:
    """Bytes that one row needs: keys and values of all its positions in all layers, and logits.

    Args:
        config: the model's config.
        positions: prompt and completion tokens of a row.
        itemsize: bytes of one number in the model's dtype.
    """
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    cache = 2 * config.num_hidden_layers * key_heads * head_dim * positions * itemsize
    return cache + _LOGIT_COPIES * config.vocab_size * torch.float32.itemsize
