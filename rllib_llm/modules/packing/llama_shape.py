"""Requirements that a model must meet to be computed by our own Llama-shaped code."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rllib_llm.modules.products import OneDNNLinear

# Classes of tensors that are neither quantised nor sharded, which have their own. Tests add one.
PLAIN_TENSORS: set[type] = {nn.Parameter, torch.Tensor}
_NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether it is these models' own RMS norm."""
    return type(module) in _NORMS


def is_read_whole(trunk: nn.Module) -> bool:
    """Whether the model reads all of its layers, and rotates all of each head."""
    rotary_dim = 2 * trunk.rotary_emb.inv_freq.shape[-1]
    all_layers = len(trunk.layers) == trunk.config.num_hidden_layers
    return all_layers and rotary_dim == trunk.layers[0].self_attn.head_dim


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether it is neither quantised nor sharded."""
    return type(tensor) in PLAIN_TENSORS


def is_plain(module: nn.Module) -> bool:
    """Whether a part computes what its class and weights say: no hooks, no replaced forward, no
    adapter, no quantised weights."""
    hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    if hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    if hasattr(module, "base_layer"):  # peft's layers, which are no subclasses of nn.Linear
        return False
    if isinstance(module, nn.Linear | nn.Embedding):
        plain = type(module) in (nn.Linear, OneDNNLinear, nn.Embedding)
        return plain and is_plain_tensor(module.weight)
    return True
