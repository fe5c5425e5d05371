"""Builds a validated `AlgorithmConfig` from a dictionary, as YAML gives it.

RLlib's `AlgorithmConfig.update_from_dict` takes any key in silence and drops values equal to -1,
its mark for "deprecated". Here both are errors, before Ray starts. So are RLlib's own names that
are retired; those that YAML writes otherwise are translated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import SettingError, complain, noted, suggestion, unknown_key

if TYPE_CHECKING:
    from ray.rllib.algorithms import Algorithm
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

# YAML names -> the attributes in which RLlib keeps them.
RENAMED = {
    "callbacks": "callbacks_class",
    "custom_eval_function": "custom_evaluation_function",
    "framework": "framework_str",
    "input": "input_",
    "lambda": "lambda_",
    "learner_class": "_learner_class",
    "model_config": "_model_config",
    "rl_module_spec": "_rl_module_spec",
    "train_batch_size_per_learner": "_train_batch_size_per_learner",
}
# Names of Ray 2.40 and before, and what replaced them.
RETIRED = {
    "num_workers": "num_env_runners",
    "num_rollout_workers": "num_env_runners",
    "num_sgd_iter": "num_epochs",
    "sgd_minibatch_size": "minibatch_size",
    "evaluation_num_workers": "evaluation_num_env_runners",
    "num_envs_per_worker": "num_envs_per_env_runner",
    "num_learner_workers": "num_learners",
}
# Properties without a setter: here the attribute behind them is set.
READ_ONLY = ("learner_class", "model_config")


CLASS_SUFFIXES = ("_class", "_cls", "_fn", "evaluation_function")
# Of this package's algorithms alone, and what somebody looks for who tries them with RLlib's.
FOR_LANGUAGE = ("prompts", "rewards", "sampling", "max_new_tokens", "num_completions")


def build_config(
    algo_class: type[Algorithm], settings: Mapping[str, Any], where: str = "config"
) -> AlgorithmConfig:
    """Return the algorithm's default config with `settings` applied, checked by `validate()`.

    `settings`: plain values, no search spaces; `where`: how an error names the place, e.g.
    "ppo.config".

    Raises:
        ValueError: unknown key, -1, text where a number belongs, or what `validate()` refuses.
    """
    config = algo_class.get_default_config()
    settings = flat_settings(config, settings)
    with noted():
        check_keys(config, settings, where)
    config = config.update_from_dict(checked_values(config, settings, where))
    config.validate()
    return config


@runtime_checkable
class Tabled(Protocol):
    """A config whose settings are declared in a table (`config/tabled_config.py`)."""

    def known_settings(self) -> frozenset[str]:
        """The keys that may be set."""

    def sections_known(self) -> tuple[str, ...]:
        """The names under which they may be grouped."""

    def flat(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """`settings`, the sections in it dissolved."""

    def unknown(self, names: Iterable[str], where: str) -> ValueError:
        """The error for names that are no settings."""

    def check_setting(self, name: str, value: Any, where: str) -> None:
        """Raises the error of a value at `where` that the setting cannot have."""


def allowed_keys(config: AlgorithmConfig) -> set[str]:
    """Return every key a user may set on `config`: its public attributes, by their YAML names; of
    a config with a table, those that act."""
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    if isinstance(config, Tabled):
        return set(config.known_settings())
    public = {name for name in vars(config) if not name.startswith("_")}
    if not isinstance(config, AlgorithmConfig):  # of a Trainable that is no RLlib Algorithm
        return public
    internal = {"algo_class", "in_evaluation", "local_gpu_idx"}
    return (public | set(RENAMED) | {"multiagent"}) - internal - set(RETIRED)


def sections(config: Any) -> tuple[str, ...]:
    """Return the names under which settings of `config` may be grouped."""
    return config.sections_known() if isinstance(config, Tabled) else ()


def flat_settings(config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings`, the sections in it (`sampling: {...}`) dissolved.

    Raises:
        ValueError: keys of a section that are none of its settings, or one given twice.
    """
    return config.flat(settings) if isinstance(config, Tabled) else dict(settings)


def check_keys(config: AlgorithmConfig, settings: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for the keys of `settings` that `config` does not have, all at once."""
    allowed = allowed_keys(config)
    unknown = [key for key in settings if key not in allowed]
    if unknown and isinstance(config, Tabled):
        raise config.unknown(unknown, where)
    if unknown:
        for key in unknown:
            complain(unknown_key(where, key, allowed, _hint(str(key), allowed)))
    overrides = settings.get("evaluation_config")
    if isinstance(overrides, Mapping) and not isinstance(config, Tabled):  # those check their own
        check_keys(config, overrides, f"{where}.evaluation_config")


def _hint(key: str, allowed: set[str]) -> str:
    if key in FOR_LANGUAGE:
        return "It is for language models: write `run: GRPO` or `run: PPOPtx`."
    if key in RETIRED and RETIRED[key] in allowed:
        return f"It is {RETIRED[key]!r} now."
    return suggestion(key, allowed)


def checked_values(
    config: AlgorithmConfig, settings: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return the known ones of `settings`, dotted paths of classes and functions replaced by the
    objects, without values that RLlib would drop, misread or trip over.

    Raises:
        ValueError: the first of those, outside of `all_complaints`.
    """
    right: dict[str, Any] = {}
    for key in filter(allowed_keys(config).__contains__, settings):
        with noted():
            resolved = resolve_classes({key: settings[key]}, where)
            (value,) = resolved.values()
            if isinstance(config, Tabled):
                config.check_setting(key, value, where)
            else:
                _check_value(config, key, value, where)
            right |= resolved
    return right


def _check_value(config: AlgorithmConfig, key: str, value: Any, where: str) -> None:
    if not isinstance(value, bool) and isinstance(value, int | float) and value == -1:
        raise SettingError(
            name=f"{where}.{key}",
            value=value,
            rule="not be -1",
            reason="RLlib reads -1 as 'not set' and drops it",
            remedy="Leave the key out for its default, use null or 0 where it means 'off', or "
            "write -1.000001 where the number is meant",
        )
    if key.startswith("num_") and isinstance(value, int | float) and value < 0:
        raise SettingError(
            name=f"{where}.{key}",
            value=value,
            rule="be at least 0",
            reason="it counts",
            remedy="Use 0 for none",
        )
    default = getattr(config, RENAMED.get(key, key), None)
    if isinstance(default, int | float) and isinstance(value, str) and value != "auto":
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise SettingError(
            name=f"{where}.{key}",
            value=value,
            rule=f"be {kind}",
            reason=f"its default is {default!r}",
            remedy=f"Write {kind}",
        )
    if isinstance(default, dict) and not isinstance(value, Mapping | None):
        raise SettingError(
            name=f"{where}.{key}",
            value=value,
            rule="be a mapping",
            reason=f"{type(config).__name__} keeps several settings there",
            remedy=f"Write `{key}: {{name: value}}`",
        )


def resolve_classes(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `settings` with dotted paths of classes and functions replaced by the objects.

    Keys that hold a class or function are known by their ending (`CLASS_SUFFIXES`), and
    `callbacks`, `callbacks_on_*`.
    """
    resolved = {}
    for key, value in settings.items():
        takes_object = key.endswith(CLASS_SUFFIXES) or key.startswith("callbacks")
        if takes_object and isinstance(value, str):
            value = import_dotted(value, name=f"{where}.{key}")
        resolved[RENAMED[key] if key in READ_ONLY else key] = value
    return resolved
