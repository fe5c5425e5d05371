"""A reference that a learner owns."""

from __future__ import annotations

import functools
from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.learners.sharding import shard_reference
from rllib_llm.modules.lora import adapters_off, has_adapters
from rllib_llm.modules.packing.logprobs import ReferencePolicy
from rllib_llm.modules.pretrained import load_causal_lm


def own_reference(learner: Any, *, copy: bool) -> ReferencePolicy:
    """The policy's trunk with its adapters off, or a `copy` of what training started from.

    The copy is neither trained, nor published, nor kept in checkpoints: the learner holds it as a
    plain attribute. With the strategy "fsdp" its layers are spread over the learners, too.
    """
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    model = module.computing_model
    policy_device = next(model.parameters()).device
    if not copy:
        assert has_adapters(model), "only a policy under adapters contains its reference"
        return ReferencePolicy(model, functools.partial(adapters_off, model))
    config = learner.config
    dtype = module.computing_dtype or config.dtype
    first = torch.device("cpu") if learner.is_sharded else policy_device
    frozen = load_causal_lm(config.pretrained_model, dtype=dtype, device=first)
    frozen.requires_grad_(False)
    if learner.is_sharded:
        shard_reference(frozen, policy_device)
    return ReferencePolicy(frozen)
