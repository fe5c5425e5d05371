"""Builds a validated `AlgorithmConfig` from a dictionary, as YAML gives it.

RLlib's `AlgorithmConfig.update_from_dict` takes any key in silence and drops values equal to -1,
its mark for "deprecated". Here both are errors, before Ray starts. So are RLlib's own names that
are retired; those that YAML writes otherwise are translated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ray.rllib.algorithms import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_llm.config.rllib import READ_ONLY, RENAMED, RETIRED
from rllib_llm.config.sections import (
    defaults,
    known_names,
    other_names,
    rllib_table,
    section_names,
    table,
)
from rllib_llm.config.tabled_config import TabledConfig, flattened, needed_env, unknown_settings
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import (
    KNOWN_KEY,
    Problem,
    Problems,
    complain,
    noted,
    suggestion,
    unknown_key,
)

CLASS_SUFFIXES = ("_class", "_cls", "_fn", "evaluation_function")
# Of this package's algorithms alone, and what somebody looks for who tries them with RLlib's.
LANGUAGE = "`run: GRPO` or `run: PPOPtx`"
FOR_LANGUAGE = ("prompts", "rewards", "sampling", "max_new_tokens", "num_completions")


def build_config(
    algo_class: type[Algorithm],
    settings: Mapping[str, Any],
    where: str = "config",
    beside: Collection[str] = (),
) -> AlgorithmConfig:
    """Return the algorithm's default config with `settings` applied, checked by `validate()`.

    `settings`: plain values, no search spaces; `where`: how an error names the place, e.g.
    "ppo.config"; `beside`: names that an experiment has beside its config, not in it.

    Raises:
        ValueError: unknown key, -1, text where a number belongs, or what `validate()` refuses.
    """
    config = algo_class.get_default_config()
    settings = flat_settings(config, settings)
    with noted():
        check_keys(config, settings, where, beside)
    config = config.update_from_dict(checked_values(config, settings, where))
    config.validate()
    return config


def allowed_keys(config: AlgorithmConfig) -> set[str]:
    """Return every key a user may set on `config`: its public attributes, by their YAML names; of
    a config with a table, those that act."""
    if isinstance(config, TabledConfig):
        return set(known_names(type(config)))
    public = {name for name in vars(config) if not name.startswith("_")}
    if not isinstance(config, AlgorithmConfig):  # of a Trainable that is no RLlib Algorithm
        return public
    internal = {"algo_class", "in_evaluation", "local_gpu_idx"}
    return (public | set(RENAMED) | {"multiagent"}) - internal - set(RETIRED)


def sections(config: Any) -> tuple[str, ...]:
    """Return the names under which settings of `config` may be grouped."""
    return section_names(type(config)) if isinstance(config, TabledConfig) else ()


def flat_settings(config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings`, the sections in it (`sampling: {...}`) dissolved; with the environment
    they need.

    Raises:
        ValueError: keys of a section that are none of its settings, or one given twice.
    """
    if not isinstance(config, TabledConfig):
        return dict(settings)
    flat = flattened(type(config), settings)
    if (needed := needed_env(type(config), settings)) is not None:
        flat.setdefault("env", needed)
    return flat


def check_keys(
    config: AlgorithmConfig,
    settings: Mapping[str, Any],
    where: str,
    beside: Collection[str] = (),
) -> None:
    """Raise ValueError for the keys of `settings` that `config` does not have, all at once;
    `beside`: see `build_config`."""
    allowed = allowed_keys(config)
    unknown = [key for key in settings if key not in allowed]
    is_tabled = isinstance(config, TabledConfig)
    if unknown and is_tabled:
        remedies = {key: _moved_out(config, key) for key in unknown if key in beside}
        raise unknown_settings(type(config), unknown, where, remedies=remedies)
    if language := _of_language(unknown):  # others may be known to the algorithm that is meant
        why, unknown = "RLlib's own algorithm trains no language model", []
        found = Problem(", ".join(language), KNOWN_KEY, why, f"Write {LANGUAGE}")
        complain(found.within(where))
    for key in unknown:
        remedy = _moved_out(config, key) if key in beside else _hint(str(key), allowed)
        complain(unknown_key(where, key, allowed, remedy))
    overrides = settings.get("evaluation_config")
    if isinstance(overrides, Mapping) and not is_tabled:  # those check their own
        check_keys(config, overrides, f"{where}.evaluation_config")


def _of_language(keys: Iterable[str]) -> list[str]:
    return [key for key in keys if key in FOR_LANGUAGE]


def _moved_out(config: AlgorithmConfig, key: str) -> str:
    """The remedy for a name that an experiment has beside its config."""
    if key == "env":  # of an algorithm that trains on rows
        return f"{type(config).__name__.removesuffix('Config')} has no environment: leave it out."
    others = other_names(type(config)) if isinstance(config, TabledConfig) else {}
    or_else = f" Or did you mean {others[key].name!r}?" if key in others else ""
    return f"{key} stands beside config:, not in it.{or_else}"


def _hint(key: str, allowed: set[str]) -> str:
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
            if isinstance(config, TabledConfig):
                of = type(config)
                row = rllib_table(of).get(key) or table(of).get(RENAMED.get(key, key))
                found = None if row is None else row.error(value, defaults(of))
                if found is not None:
                    complain(found.within(where))
                    continue
            elif key == "model" and _of_language(settings):  # which `check_keys` has told
                continue
            else:
                _check_value(config, key, value, where)
            right |= resolved
    return right


def _check_value(config: AlgorithmConfig, key: str, value: Any, where: str) -> None:
    if not isinstance(value, bool) and isinstance(value, int | float) and value == -1:
        raise Problems(
            f"{where}.{key}", "not be -1", "RLlib reads -1 as 'not set' and drops it",
            "Leave the key out for its default, use null or 0 where it means 'off', or write "
            "-1.000001 where the number is meant", value,
        )  # fmt: skip
    if key.startswith("num_") and isinstance(value, int | float) and value < 0:
        raise Problems(f"{where}.{key}", "be at least 0", "it counts", "Use 0 for none", value)
    default = getattr(config, RENAMED.get(key, key), None)
    if isinstance(default, int | float) and isinstance(value, str) and value != "auto":
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise Problems(
            f"{where}.{key}", f"be {kind}", f"its default is {default!r}", f"Write {kind}", value,
        )  # fmt: skip
    if isinstance(default, dict) and not isinstance(value, Mapping | None):
        raise Problems(
            f"{where}.{key}", "be a mapping", "it holds several settings of RLlib's own algorithm",
            f"Write {LANGUAGE}" if key == "model" else f"Write `{key}: {{name: value}}`", value,
        )  # fmt: skip


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
