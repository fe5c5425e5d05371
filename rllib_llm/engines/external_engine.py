"""Engines other than our own decode loop: what a sampler asks of them, and how it gets one."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from rllib_llm.engines.completions import Completions
from rllib_llm.engines.params import SamplingParams

ENGINES = ("torch", "vllm", "openai")


class ExternalEngine(Protocol):
    """Generates completions with a copy of the policy that is not a torch module of ours."""

    tokenizer: Any
    """The policy's."""
    stop_token_ids: tuple[int, ...]
    """All EOS ids of the policy."""
    takes_weights: bool
    """Whether `load_weights` gives it the policy; if not, it generates with a model of its own."""

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Puts published weights in place of those in use; only read during the call."""

    def generate(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        params: SamplingParams,
        *,
        num_completions: int,
        seeds: list[int],
    ) -> Completions:
        """Completions as `engine.generate` gives them, one seed per completion."""

    def close(self) -> None:
        """Frees what it holds."""


def open_engine(config: Any, *, worker_index: int) -> ExternalEngine | None:
    """The engine that `config` names for this sampler; None: the module's own decode loop.

    A sampler in the driver's process (`worker_index` 0) may share the learner's module: it has no
    need of a second copy of the policy.

    Raises:
        ImportError: the engine's package is not installed.
    """
    settings = dict(config.engine_settings or {})
    if config.engine == "vllm" and worker_index:
        from rllib_llm.engines.vllm_engine import VLLMEngine

        settings.setdefault("dtype", config.autocast_dtype or config.dtype)
        if config.sampling_batch_size is not None:
            settings.setdefault("max_num_seqs", config.sampling_batch_size)
        return VLLMEngine(config.pretrained_model, temperature=config.temperature, **settings)
    if config.engine == "openai":
        from rllib_llm.engines.openai_engine import OpenAIEngine

        return OpenAIEngine(config.pretrained_model, **settings)
    return None


def prompts_of(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> list[list[int]]:
    """The prompts' ids without their padding."""
    return [ids[mask].tolist() for ids, mask in zip(prompt_ids, prompt_mask, strict=True)]


def pad_completions(
    token_ids: list[list[int]], logprobs: list[list[float]], params: SamplingParams
) -> Completions:
    """Ragged rows as `Completions`; a row is finished where it ends with a stop token.

    Args:
        token_ids: of each row, stop token included, at least one.
        logprobs: of each row, as many as it has tokens.
        params: its pad and stop tokens are read.
    """
    longest = max(map(len, token_ids))
    lengths = torch.tensor([len(row) for row in token_ids])
    mask = torch.arange(longest) < lengths.unsqueeze(1)
    ids = torch.full(mask.shape, params.pad_token_id, dtype=torch.int64)
    values = torch.zeros(mask.shape, dtype=torch.float32)
    ids[mask] = torch.tensor([token for row in token_ids for token in row])
    values[mask] = torch.tensor([value for row in logprobs for value in row])
    stops = set(params.stop_token_ids)
    finished = torch.tensor([row[-1] in stops for row in token_ids])
    return Completions(ids, mask, values, finished)
