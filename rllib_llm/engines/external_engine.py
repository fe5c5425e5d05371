"""Engines other than our own decode loop, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rllib_llm.shared.errors import SettingError

if TYPE_CHECKING:
    from rllib_llm.engines.servers import ClientPolicy, CompletionClient
    from rllib_llm.engines.vllm_engine import VLLMEngine

ENGINES = ("torch", "vllm", "openai")
ENDPOINTS = ("completions", "tokens")
"""Of a server: OpenAI's texts, for evaluation; token ids in and out, for training too."""


def open_engine(
    name: str,
    model: str,
    settings: Mapping[str, Any] | None = None,
    *,
    temperature: float,
    dtype: str,
    max_rows: int | None = None,
    is_local: bool = False,
) -> VLLMEngine | None:
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
    from rllib_llm.engines.servers import ClientPolicy, OpenAICompletions, TokenCompletions
    from rllib_llm.modules.tokenizer import load_tokenizer, policy_eos_ids

    if endpoint not in ENDPOINTS:
        raise SettingError(
            name="engine_settings['endpoint']",
            value=endpoint,
            rule=f"be one of {ENDPOINTS}",
            reason="a server is asked in no other way",
            remedy="Use 'tokens' for one that gives token ids",
        )
    tokenizer = load_tokenizer(model)
    client: CompletionClient
    if endpoint == "tokens":
        client = TokenCompletions(**settings)
    else:
        client = OpenAICompletions(tokenizer, **settings)
    return ClientPolicy(client, tokenizer, policy_eos_ids(model, tokenizer))
