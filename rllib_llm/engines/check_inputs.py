"""What a generation is given, checked before compute is spent."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

from rllib_llm.engines.params import SamplingParams
from rllib_llm.modules.model_limits import longrope_border


def check_inputs(
    model: nn.Module,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    params: SamplingParams,
    num_completions: int,
    noise: torch.Tensor | None,
) -> None:
    """Raises ValueError naming what does not fit; arguments are those of `engine.generate`."""
    if prompt_ids.ndim != 2 or prompt_ids.shape != prompt_mask.shape or not prompt_ids.numel():
        raise ValueError(
            f"prompt_ids={tuple(prompt_ids.shape)!r} must be [groups, prompt_len] like prompt_mask="
            f"{tuple(prompt_mask.shape)!r}: each token needs its mask. Pass both as the "
            "environment gave them."
        )
    if prompt_mask.dtype != torch.bool:
        raise ValueError(
            f"prompt_mask={prompt_mask.dtype!r} must be torch.bool: True where a token counts. "
            "Convert it with .bool()."
        )
    if num_completions < 1:
        raise ValueError(
            f"num_completions={num_completions!r} must be at least 1: it counts the completions of "
            "each prompt. Use 1 for a single one."
        )
    if model.training:
        raise ValueError(
            "model.training=True must be False: dropout would make the log-probs another model's. "
            "Call model.eval() before generating."
        )
    lengths = prompt_mask.sum(dim=1)
    if not bool(prompt_mask[:, -1].all()) or bool((prompt_mask.long().diff(dim=1) < 0).any()):
        raise ValueError(
            "prompt_mask must be left-padded, with a token in its last column: completions are "
            "appended there. Move the padding of every prompt to its front; drop empty prompts."
        )
    check_positions(model.config, int(lengths.max()), params)
    _check_noise(noise, prompt_ids.shape[0] * num_completions, params)


def check_at_least_one(**settings: int | None) -> None:
    """Raises ValueError for a setting that is given and below 1."""
    for name, value in settings.items():
        if value is not None and value < 1:
            raise ValueError(
                f"{name}={value!r} must be at least 1: it is a count. Leave it out for the "
                "device's own."
            )


def check_positions(config: PretrainedConfig, longest_prompt: int, params: SamplingParams) -> None:
    """Raises ValueError for more positions than the model has, or than its rows are independent
    of each other up to."""
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and longest_prompt + params.max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens={params.max_new_tokens!r} must be at most "
            f"{limit - longest_prompt}: the longest prompt has {longest_prompt} tokens and the "
            f"model {limit} positions. Shorten prompts or completions."
        )
    short = longrope_border(text)
    if short is not None and longest_prompt + params.max_new_tokens > short:
        raise ValueError(
            f"max_new_tokens={params.max_new_tokens!r} must be at most {short - longest_prompt}: "
            f"the longest prompt has {longest_prompt} tokens, and beyond {short} positions this "
            "model's longrope rotates every row of a batch by other factors as soon as one row is "
            "longer, so that log-probs depend on the rows beside it. Shorten prompts or "
            "completions."
        )


def _check_noise(noise: torch.Tensor | None, batch: int, params: SamplingParams) -> None:
    if params.greedy:
        return
    if noise is None:
        raise ValueError(
            "noise=None must be a tensor of uniforms: only greedy decoding needs none. "
            "Draw it with rllib_llm.engines.noise.uniform_noise."
        )
    if noise.ndim != 2 or noise.shape[0] != batch or noise.shape[1] < params.max_new_tokens:
        raise ValueError(
            f"noise={tuple(noise.shape)!r} must be [{batch}, >= {params.max_new_tokens}]: one "
            "uniform per completion and token. Draw it for groups * num_completions rows."
        )
