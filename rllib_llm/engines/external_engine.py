"""Engines other than our own decode loop: what a sampler asks of them, and how it gets one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rllib_llm.engines.completions import Completions
from rllib_llm.engines.params import SamplingParams

if TYPE_CHECKING:
    from rllib_llm.engines.client import ClientPolicy, CompletionClient

ENGINES = ("torch", "vllm", "openai")
ENDPOINTS = ("completions", "tokens")
"""Of a server: OpenAI's texts, for evaluation; token ids in and out, for training too."""


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


def open_engine(
    name: str,
    model: str,
    settings: Mapping[str, Any] | None = None,
    *,
    temperature: float,
    dtype: str,
    max_rows: int | None = None,
    is_local: bool = False,
) -> ExternalEngine | None:
    """The engine of a sampler by its name; None: the module's own decode loop, or a server.

    Args:
        name: one of `ENGINES`.
        model: folder, hub id or dotted path of the policy.
        settings: of the engine itself; what they say goes before the rest.
        dtype: that the policy computes in.
        max_rows: completions generated at once; None: all that fit.
        is_local: whether the sampler is in the driver's process. It may share the learner's module
            and has no need of a second copy of the policy.

    Raises:
        ImportError: the engine's package is not installed.
    """
    settings = dict(settings or {})
    if name == "vllm" and not is_local:
        from rllib_llm.engines.vllm_engine import VLLMEngine

        settings.setdefault("dtype", dtype)
        if max_rows is not None:
            settings.setdefault("max_num_seqs", max_rows)
        return VLLMEngine(model, temperature=temperature, **settings)
    return None


def open_server(model: str, *, endpoint: str = "completions", **settings: Any) -> ClientPolicy:
    """Completions by a server.

    Args:
        model: folder, hub id or dotted path of the policy, for its tokenizer.
        endpoint: one of `ENDPOINTS`.
        settings: of `OpenAICompletions` or `TokenCompletions`.

    Raises:
        ValueError: an unknown endpoint.
    """
    # Here, since transformers would make importing the package slow.
    from rllib_llm.engines.client import ClientPolicy
    from rllib_llm.engines.openai_completions import OpenAICompletions
    from rllib_llm.engines.policy_files import policy_eos_ids
    from rllib_llm.engines.token_completions import TokenCompletions
    from rllib_llm.modules.tokenizer import load_tokenizer

    if endpoint not in ENDPOINTS:
        raise ValueError(
            f"engine_settings['endpoint']={endpoint!r} must be one of {ENDPOINTS}: a server is "
            "asked in no other way. Use 'tokens' for one that gives token ids."
        )
    tokenizer = load_tokenizer(model)
    client: CompletionClient
    if endpoint == "tokens":
        client = TokenCompletions(**settings)
    else:
        client = OpenAICompletions(tokenizer, **settings)
    return ClientPolicy(client, tokenizer, policy_eos_ids(model, tokenizer))
