"""Models, data sets and reward functions that an experiment names: there, before an earlier stage
has spent its hours."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from rllib_llm.runs.stand_ins import StandIn
from rllib_llm.shared.errors import in_place

MODELS = ("model", "critic_model")
DATA = ("data", "eval_data", "normalization_data", "ptx_data", "ptx_eval_data")
ENV_MODELS = ("model", "tokenizer", "reward_model", "reference")
ENV_DATA = ("prompts", "eval_prompts")


def check_sources(settings: Mapping[str, Any], where: str) -> None:
    """Check what can be checked without loading weights: folders and their tokenizers, files and
    dotted paths.

    What an earlier experiment will make (`${name.checkpoint}`) is left out, and so is the hub.

    Args:
        settings: of one experiment, `env_config` among them.
        where: how an error names the place, e.g. "ppo.config".

    Raises:
        ValueError: what is certainly not there, with the setting's name.
    """
    from rllib_llm.data.sources import check_source
    from rllib_llm.envs.registry import ENVIRONMENTS

    env = settings.get("env_config") if settings.get("env") in ENVIRONMENTS else None
    env = env if isinstance(env, Mapping) else {}
    for name, value in (*_chosen(settings, MODELS), *_chosen(env, ENV_MODELS, "env_config.")):
        # A reference reads ids alone.
        _check_model(value, f"{where}.{name}", has_tokenizer=name != "env_config.reference")
    for name, value in (*_chosen(settings, DATA), *_chosen(env, ENV_DATA, "env_config.")):
        if "${" not in str(value):
            check_source(value, name=f"{where}.{name}")
    for name, value in _chosen(env, ("reward_functions",), "env_config."):
        _check_functions(value, f"{where}.{name}")


def _chosen(
    settings: Mapping[str, Any], names: tuple[str, ...], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    return ((prefix + name, settings[name]) for name in names if settings.get(name) is not None)


def _check_model(given: Any, name: str, *, has_tokenizer: bool) -> None:
    from rllib_llm.modules.model_source import DOTTED, FOLDER, source_kind
    from rllib_llm.shared.dotted import import_dotted

    if isinstance(given, Mapping):
        given, name = given.get("model"), f"{name}.model"
    if not isinstance(given, str) or "${" in given or isinstance(given, StandIn):
        return  # a stand-in belongs to the experiment that makes what it stands for
    kind, value = source_kind(given, name=name)
    if kind == DOTTED:
        import_dotted(value, name=name)
    if kind == FOLDER and has_tokenizer:
        _check_tokenizer(value, name)


@functools.cache  # the points of a grid share their models
def _check_tokenizer(folder: str, name: str) -> None:
    from rllib_llm.modules.tokenizer import load_tokenizer

    try:
        load_tokenizer(folder)
    except ValueError as error:
        raise in_place(error, name) from error


def _check_functions(given: Any, name: str) -> None:
    from rllib_llm.shared.dotted import import_dotted

    for function in given if isinstance(given, list) else [given]:
        path = function.get("function") if isinstance(function, Mapping) else function
        if isinstance(path, str) and "${" not in path:
            import_dotted(path, name=name)
