"""Further environments of an evaluation, by name: the setting `eval_envs`.

    eval_envs:
      hard: {env_config: {digits: 4}}
      gsm: {env: rllib_llm/RLHF-v0, env_config: {prompts: gsm.jsonl, ...}, evaluation_duration: 32}

Each is a group of samplers of its own, with `evaluation_config` and what its name has laid over the
config; one of another `env` begins with an empty `env_config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_llm.config.checks import require

_NAME = re.compile(r"[A-Za-z][\w.-]*")


def check_eval_envs(config: Any) -> None:
    """Raises ValueError where names or settings of further environments cannot be."""
    envs = config.eval_envs
    if not envs:
        return
    require(
        bool(config.evaluation_interval) or config.in_evaluation,
        "eval_envs", sorted(envs), "left out without evaluation_interval",
        "nothing is evaluated", "Set evaluation_interval",
    )  # fmt: skip
    for name, overlay in envs.items():
        require(
            bool(_NAME.fullmatch(name)) and isinstance(overlay, Mapping),
            "eval_envs", {name: overlay}, "{name: {env, env_config, ...}}",
            "results are reported as eval/<name>/<metric>",
            "Take a name of letters and digits, and a mapping of settings",
        )  # fmt: skip


def eval_env_config(config: Any, name: str) -> Any:
    """The config of the samplers of one further environment, not validated.

    `config`: the algorithm's.
    """
    overlay = dict(config.eval_envs[name])
    base = config.copy(copy_frozen=False)
    base.eval_envs = None
    settings = dict(config.evaluation_config or {})
    if overlay.get("env", base.env) != base.env:
        base.env_config = {}
        settings.pop("env_config", None)
    elif "env_config" in overlay and "env_config" in settings:
        overlay["env_config"] = {**settings["env_config"], **overlay["env_config"]}
    base.evaluation_config = {**settings, **overlay}
    return base.get_evaluation_config_object()


def open_eval_envs(algorithm: Any) -> dict[str, tuple[Any, EnvRunnerGroup]]:
    """(config, samplers) of each further environment by name.

    Raises:
        ValueError: settings that cannot be.
    """
    opened = {}
    for name in algorithm.config.eval_envs or {}:
        config = eval_env_config(algorithm.config, name)
        config.validate()
        config.freeze()
        group = EnvRunnerGroup(
            config=config,
            local_env_runner=config.create_local_env_runner,
            logdir=algorithm.logdir,
            tune_trial_id=algorithm.trial_id,
            pg_offset=algorithm.config.num_env_runners,
        )
        opened[name] = (config, group)
    return opened
