"""Settings of engines and of overlapped sampling, checked before anything starts."""

from __future__ import annotations

import importlib.util
from typing import Any

from rllib_llm.algorithms.settings.checks import require


def check_engine(config: Any) -> None:
    """Raises ValueError for an engine that cannot serve this config."""
    if config.engine == "openai":
        _check_openai(config)
    if config.engine == "vllm" and config.num_env_runners:
        _check_vllm(config)


def _check_openai(config: Any) -> None:
    require(
        config.in_evaluation, "engine", config.engine, "'torch' or 'vllm' in training",
        "a server generates with weights and tokens of its own, so nothing can be learnt from it",
        "Set it for evaluation: evaluation_config={'engine': 'openai', ...}",
    )  # fmt: skip
    missing = {"base_url", "served_model"} - set(config.engine_settings or {})
    require(
        not missing, "engine_settings", config.engine_settings,
        "a dictionary with 'base_url' and 'served_model'",
        "they say which server and which of its models answers", f"Add {sorted(missing)}",
    )  # fmt: skip


def _check_vllm(config: Any) -> None:
    from rllib_llm.engines.vllm_engine import MISSING
    from rllib_llm.engines.vllm_params import check_params

    if importlib.util.find_spec("vllm") is None:
        raise ValueError(MISSING)
    require(
        config.lora is None, "lora", config.lora, "None with engine='vllm'",
        "adapters alone are published, and vLLM is given whole weights", "Use engine='torch'",
    )  # fmt: skip
    check_params(config.temperature, config.top_k, config.top_p, config.min_new_tokens)


def check_pipeline(config: Any) -> None:
    """Raises ValueError for older batches that are not corrected for."""
    exact = config.dtype == "float32" and config.autocast_dtype is None
    require(
        not config.pipeline_depth or config.off_policy is not None
        or config.critic == "none" or exact,
        "off_policy", config.off_policy,
        "set with pipeline_depth=1 and a critic in half precision, which has log-probs recomputed",
        "the batch was sampled by an older policy than the one they are taken from",
        "Set off_policy='decoupled'",
    )  # fmt: skip
