"""Settings of engines, checked before anything starts."""

from __future__ import annotations

import importlib.util
from typing import Any

from rllib_llm.config.checks import require
from rllib_llm.shared.dotted import import_dotted


def check_engine(config: Any) -> None:
    """Raises ValueError for an engine that cannot serve this config."""
    if config.generate_function is not None:
        import_dotted(config.generate_function, name="generate_function")
    if config.engine == "openai":
        _check_openai(config)
    if config.engine == "vllm" and config.num_env_runners:
        _check_vllm(config)


def _check_openai(config: Any) -> None:
    given = config.engine_settings or {}
    needed = {"base_url"} if given.get("endpoint") == "tokens" else {"base_url", "served_model"}
    missing = needed - set(given)
    require(
        not missing, "engine_settings", config.engine_settings,
        f"a dictionary with {' and '.join(map(repr, sorted(needed)))}",
        "they say which server and which of its models answers", f"Add {sorted(missing)}",
    )  # fmt: skip
    if not config.in_evaluation:
        _check_training_with_a_server(config, given)


def _check_training_with_a_server(config: Any, given: dict[str, Any]) -> None:
    tokens = "endpoint='tokens' of its engine_settings"
    require(
        given.get("endpoint") == "tokens", "engine", config.engine,
        f"'torch' or 'vllm' in training, or come with {tokens}",
        "texts are not the tokens that a server sampled, so nothing can be learnt from them",
        "Add endpoint: tokens, or set it in evaluation_config alone",
    )  # fmt: skip
    require(
        config.gives_weights_away and given.get("follows_run", True), "engine", config.engine,
        "'torch' or 'vllm' in training, or come with weights_name or weights_push",
        "the server has to have the weights that are learnt",
        "Set weights_name, and serve with the same one, and leave follows_run out",
    )  # fmt: skip
    require(
        not config.streams, "engine", config.engine,
        "'torch' or 'vllm' with max_staleness, oversample or filters",
        "a server is asked for whole batches by the newest weights", "Leave those out",
    )  # fmt: skip


def _check_vllm(config: Any) -> None:
    from rllib_llm.engines.vllm_engine import MISSING, check_params

    if importlib.util.find_spec("vllm") is None:
        raise ValueError(MISSING)
    require(
        config.lora is None, "lora", config.lora, "None with engine='vllm'",
        "adapters alone are published, and vLLM is given whole weights", "Use engine='torch'",
    )  # fmt: skip
    check_params(config.temperature, config.top_k, config.top_p, config.min_new_tokens)
