"""Settings of engines, checked before anything starts."""

from __future__ import annotations

import importlib.util
from typing import Any

from rllib_llm.algorithms.settings.checks import require
from rllib_llm.dotted import import_dotted


def check_engine(config: Any) -> None:
    """Raises ValueError for an engine that cannot serve this config."""
    if config.generate_function is not None:
        import_dotted(config.generate_function, name="generate_function")
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
