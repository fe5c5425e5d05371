"""Names of environments: the same id in gymnasium, in RLlib and here.

A creator is a class or function of one dict, `creator(env_config)`. Its module is imported when an
environment is made, not when its name is registered.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from rllib_llm.shared.dotted import import_dotted, looks_dotted, package_of
from rllib_llm.shared.errors import Problems, nearest
from rllib_llm.shared.messages import blamed_on
from rllib_llm.shared.ray_compat import registered_env

ENVIRONMENTS: dict[str, str] = {
    "rllib_llm/Agent-v0": "rllib_llm.envs.adapters.agent:AgentEnv",
    "rllib_llm/Reviews-v0": "rllib_llm.examples.reviews:create",
    "rllib_llm/RLHF-v0": "rllib_llm.envs.rlhf:create",
    "rllib_llm/Arithmetic-v0": "rllib_llm.examples.arithmetic:create",
    "rllib_llm/Calculator-v0": "rllib_llm.examples.calculator:Calculator",
    "rllib_llm/Chat-v0": "rllib_llm.envs.conversation:ChatEnv",
    "rllib_llm/Conversation-v0": "rllib_llm.envs.conversation:ConversationEnv",
    "rllib_llm/Lookup-v0": "rllib_llm.examples.lookup:Lookup",
    "rllib_llm/ReasoningGym-v0": "rllib_llm.envs.adapters.reasoning_gym:create",
    "rllib_llm/TwentyQuestions-v0": "rllib_llm.examples.twenty_questions:TwentyQuestions",
    "rllib_llm/TRL-v0": "rllib_llm.envs.adapters.trl:TRLEnv",
    "rllib_llm/Verifiers-v0": "rllib_llm.envs.adapters.verifiers:VerifiersEnv",
}

# What the sampler adds to env_config where the user did not set it.
SAMPLER_SETTINGS = (
    "model", "split", "seed", "device", "temperature", "max_completion_len", "reference",
    "chat_template", "template_settings", "frozen_quantization", "frozen_products",
)  # fmt: skip

_CONFIG_PARAMETERS = ("env_config", "config")


def env_ids() -> list[str]:
    """Ids of the environments of this package, sorted."""
    return sorted(ENVIRONMENTS)


def make(env: str | Callable[..., Any], env_config: Mapping[str, Any] | None = None) -> Any:
    """Makes an environment by id, dotted path or callable.

    Args:
        env: an id of `env_ids()`, any name registered with RLlib's `tune.register_env`, a dotted
            path, or a callable. A callable (a class, too) whose first parameter is called
            `env_config` or `config` gets the settings as one dict, any other as keyword arguments
            (those of `SAMPLER_SETTINGS` only where it takes them).
        env_config: its settings. RLlib's EnvContext is taken as the plain dict it holds: the
            index of a worker changes nothing, since prompts are handed out by position.

    Raises:
        Problems: an unknown name, with the nearest ones, or what its code raised.
    """
    created, settings = creator(env), dict(env_config or {})
    if isinstance(env, str) and env in ENVIRONMENTS:
        return created(settings)
    with blamed_on("env", env, "make an environment"):
        return created(settings)


def creator(env: str | Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """The function of one dict that makes `env` (see `make`)."""
    if isinstance(env, str):
        if env in ENVIRONMENTS:
            return import_dotted(ENVIRONMENTS[env])
        registered = registered_env(env)
        if registered is not None:
            return registered
        check_name(env)
        env = import_dotted(env, name="env")
    rule = "be an environment's name, dotted path, class or creator function"
    if isinstance(env, str) or not callable(env):
        raise Problems("env", rule, value=env)
    if next(iter(inspect.signature(env).parameters), None) in _CONFIG_PARAMETERS:
        return env
    return functools.partial(_make_from_keywords, env)


def check_batched(env: Any) -> None:
    """Raises Problems for one of Gymnasium's single environments, its class or the dotted
    path of one: RLlib's own algorithms take these, samplers of completions do not."""
    if isinstance(env, str) and looks_dotted(env) and registered_env(env) is None:
        env = import_dotted(env, name="env")
    if isinstance(env, gymnasium.Env) or (inspect.isclass(env) and issubclass(env, gymnasium.Env)):
        raise not_batched(env)


def check_name(env: Any) -> None:
    """Raises Problems for a name that is not registered; dotted paths are not imported."""
    if not isinstance(env, str) or ":" in env or looks_dotted(env) or env in ENVIRONMENTS:
        return
    if registered_env(env) is not None:
        return
    if env in gymnasium.registry and gymnasium.spec(env).entry_point is not None:
        raise not_batched(env)
    called = {name: known for known in ENVIRONMENTS for name in (known, known.split("/")[1][:-3])}
    near = dict.fromkeys(repr(called[name]) for name in nearest(env, called))
    remedy = f"Did you mean {' or '.join(near)}?" if near else "Check the spelling, or use --import"
    reason = ""
    if package := package_of(env):  # such a path gets here where its package is not there
        reason, remedy = f"there is no module {package!r}", "Put its folder on PYTHONPATH"
    rule = f"be one of {env_ids()}, a name of ray.tune.register_env, or a dotted path"
    raise Problems("env", rule, reason, remedy, env)


def check_arguments(env: str, env_config: Mapping[str, Any]) -> None:
    """Raises Problems where `make` could not call `env` with these settings."""
    made = creator(env)
    if isinstance(made, functools.partial) and made.func is _make_from_keywords:
        _keywords(made.args[0], {**dict.fromkeys(SAMPLER_SETTINGS), **env_config})


def _make_from_keywords(env: Callable[..., Any], env_config: dict[str, Any]) -> Any:
    return env(**_keywords(env, env_config))


def _keywords(env: Callable[..., Any], env_config: Mapping[str, Any]) -> dict[str, Any]:
    """`env_config` without those settings of the sampler that `env` does not take."""
    parameters = inspect.signature(env).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    left_out = set() if takes_any else {*SAMPLER_SETTINGS} - {*parameters}
    given = {key: value for key, value in env_config.items() if key not in left_out}
    try:
        inspect.signature(env).bind(**given)
    except TypeError as error:
        raise Problems(
            "env", "be called with the settings of env_config", f"{error}; given are {[*given]}",
            "Name an environment or its creator, and set its arguments in env_config", env,
        ) from error  # fmt: skip
    return given


def default_settings(env_id: str) -> dict[str, Any]:
    """The settings of an environment of this package by name: rows, or defaults alone."""
    module, _, name = ENVIRONMENTS[env_id].partition(":")
    imported = importlib.import_module(module)
    made = getattr(imported, name)
    listed = getattr(made, "default_settings", None)  # of a class; else beside the function
    return dict(imported.DEFAULTS if listed is None else listed())


def register_envs() -> None:
    """Registers every id with gymnasium and RLlib; calling it again changes nothing."""
    from ray import tune

    def refuse_single(env_id: str, **env_config: Any) -> Any:
        rule = f"be gymnasium.make_vec({env_id!r}, num_envs=8)"
        raise Problems(f"gymnasium.make({env_id!r})", rule, "one step judges a whole batch")

    def make_vec(env_id: str, num_envs: int = 1, **env_config: Any) -> Any:
        return make(env_id, {"num_envs": num_envs, **env_config})

    for env_id in ENVIRONMENTS:
        if env_id not in gymnasium.registry:
            gymnasium.register(
                env_id, entry_point=functools.partial(refuse_single, env_id),
                vector_entry_point=functools.partial(make_vec, env_id),
            )  # fmt: skip
        if registered_env(env_id) is None:
            tune.register_env(env_id, functools.partial(make, env_id))


def register_user_env(env: str) -> bool:
    """Registers with RLlib, and so for all processes, the environment that a dotted path
    "module:Name" names; False where it names none. Names that the module registers with gymnasium
    when it is imported are found as gymnasium finds them."""
    from ray import tune

    module, _, name = env.partition(":")
    if not name or not looks_dotted(env):
        return False
    importlib.import_module(module)
    if name in gymnasium.registry:
        return True
    import_dotted(env, name="env")
    if registered_env(env) is None:
        tune.register_env(env, lambda config: make(import_dotted(env, name="env"), config))
    return True


def not_batched(env: Any) -> Problems:
    """The error for an environment of single episodes."""
    return Problems(
        "env", "be a gymnasium.vector.VectorEnv", "one step judges a whole batch",
        "Build on rllib_llm.envs.bandit.BanditEnv", env,
    )  # fmt: skip
