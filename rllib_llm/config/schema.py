"""Builds a validated `AlgorithmConfig` from a dictionary, as YAML gives it.

RLlib's `AlgorithmConfig.update_from_dict` takes any key in silence and drops values equal to -1,
its mark for "deprecated". Here both are errors, before Ray starts. So are RLlib's own names that
are retired; those that YAML writes otherwise are translated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ray.rllib.algorithms import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_llm.config.rllib import READ_ONLY, RENAMED, RETIRED
from rllib_llm.config.sections import (
    defaults,
    known_names,
    other_names,
    rllib_table,
    row_called,
    section_names,
    table,
)
from rllib_llm.config.tabled_config import (
    TabledConfig,
    flattened,
    hint,
    needed_env,
)
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import (
    KNOWN_KEY,
    Problem,
    problems_in,
    problems_of,
    suggestion,
    unknown_key,
    without_consequences,
)
from rllib_llm.shared.setting import IN_ENV

CLASS_SUFFIXES = ("_class", "_cls", "_fn", "evaluation_function")
# Of this package's algorithms alone, and what somebody looks for who tries them with RLlib's.
LANGUAGE = "`run: GRPO` or `run: PPOPtx`"
FOR_LANGUAGE = ("prompts", "rewards", "sampling", "max_new_tokens", "num_completions")


def checked_config(
    algo_class: type[Algorithm], settings: Mapping[str, Any], beside: Collection[str] = ()
) -> tuple[AlgorithmConfig, list[Problem]]:
    """Return the config that the sound ones of `settings` make, and what is wrong: unknown keys,
    -1, text where a number belongs, what `validate()` refuses.

    `beside`: names that an experiment has beside its config, not in it.
    """
    config = algo_class.get_default_config()
    found: list[Problem] = []
    flat = flat_settings(config, settings, found)
    right, wrong = sound_settings(config, flat, beside)
    found += wrong
    refused = {problem.name for problem in found}
    try:
        config = config.update_from_dict(right)
        later = problems_in(config.validate)
    except Exception as error:
        if not found and not isinstance(error, ValueError):
            raise
        later = problems_of(error) if isinstance(error, ValueError) else []
        for name in right.keys() & {"env", "env_config"}:  # which are looked at as well
            setattr(config, name, right[name])
    # Not what a default in the place of a refused value breaks.
    found += [problem for problem in later if problem.name not in refused]
    return config, without_consequences(found)


def sound_settings(
    config: AlgorithmConfig, settings: Mapping[str, Any], beside: Collection[str] = ()
) -> tuple[dict[str, Any], list[Problem]]:
    """Return those of `settings` that `config` has and could take, dotted paths of classes and
    functions replaced by the objects; and what is wrong with the others."""
    right: dict[str, Any] = {}
    found = [*key_problems(config, settings, beside)]
    for key in filter(allowed_keys(config).__contains__, settings):
        found += problems_in(_value_problems, config, key, settings, right)
    return right, found


def as_written(problem: Problem, settings: Mapping[str, Any], config: Any) -> Problem:
    """The problem, its setting called as `settings` call it where it stands in a section."""
    for key in sections(config):
        given = settings.get(key)
        for short in given if isinstance(given, Mapping) else ():
            if (row := row_called(type(config), key, short)) is not None:
                name = f"env_config.{row.name}" if row.place == IN_ENV else row.name
                if problem.is_of(name):
                    return problem.moved(name, f"{key}.{short}")
    return problem


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


def flat_settings(
    config: Any, settings: Mapping[str, Any], found: list[Problem] | None = None
) -> dict[str, Any]:
    """Return `settings`, the sections in it (`sampling: {...}`) dissolved; with the environment
    they need. `found`: see `flattened`."""
    if not isinstance(config, TabledConfig):
        return dict(settings)
    flat = flattened(type(config), settings, found=found)
    if (needed := needed_env(type(config), settings)) is not None:
        flat.setdefault("env", needed)
    return flat


def key_problems(
    config: AlgorithmConfig, settings: Mapping[str, Any], beside: Collection[str] = ()
) -> Iterator[Problem]:
    """The keys of `settings` that `config` does not have; `beside`: see `checked_config`."""
    allowed = allowed_keys(config)
    unknown = [key for key in settings if key not in allowed]
    is_tabled = isinstance(config, TabledConfig)
    if not is_tabled and (language := [key for key in unknown if key in FOR_LANGUAGE]):
        why, unknown = "RLlib's own algorithm trains no language model", []
        yield Problem(", ".join(language), KNOWN_KEY, why, f"Write {LANGUAGE}")
    for key in unknown:
        remedy = hint(type(config), str(key)) if is_tabled else suggestion(str(key), allowed)
        if key == "env" and key in beside:  # of an algorithm that trains on rows
            name = type(config).__name__.removesuffix("Config")
            remedy = f"{name} has no environment: leave it out."
        elif key in beside:
            others = other_names(type(config)) if is_tabled else {}
            or_else = f" Or did you mean {others[key].name!r}?" if key in others else ""
            remedy = f"{key} stands beside config:, not in it.{or_else}"
        elif not is_tabled and RETIRED.get(key) in allowed:
            remedy = f"It is {RETIRED[key]!r} now."
        yield unknown_key("", key, allowed, remedy)
    overrides = settings.get("evaluation_config")
    if isinstance(overrides, Mapping) and not is_tabled:  # those check their own
        for problem in key_problems(config, overrides):
            yield problem.within("evaluation_config")


def _value_problems(
    config: AlgorithmConfig, key: str, settings: Mapping[str, Any], right: dict[str, Any]
) -> Iterator[Problem]:
    """The problem of a value; a sound one is added to `right`, dotted paths of classes and
    functions replaced by the objects."""
    resolved = resolve_classes({key: settings[key]})
    (value,) = resolved.values()
    if isinstance(config, TabledConfig):
        of = type(config)
        row = rllib_table(of).get(key) or table(of).get(RENAMED.get(key, key))
        found = None if row is None else row.problem(value, defaults(of))
    elif key == "model" and any(name in FOR_LANGUAGE for name in settings):
        return  # `key_problems` has it
    else:
        found = _value_problem(key, value, getattr(config, RENAMED.get(key, key), None))
    if found is None:
        right |= resolved
    else:
        yield found


def _value_problem(key: str, value: Any, default: Any) -> Problem | None:
    """The problem of a value that RLlib would drop, misread or trip over."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and value == -1:
        return Problem(
            key, "not be -1", "RLlib reads -1 as 'not set' and drops it",
            "Leave the key out for its default, use null or 0 where it means 'off', or write "
            "-1.000001 where the number is meant", value,
        )  # fmt: skip
    if key.startswith("num_") and is_number and value < 0:
        return Problem(key, "be at least 0", "it counts", "Use 0 for none", value)
    if isinstance(default, int | float) and isinstance(value, str) and value != "auto":
        kind = "true or false" if isinstance(default, bool) else "a number"
        return Problem(key, f"be {kind}", f"its default is {default!r}", f"Write {kind}", value)
    if isinstance(default, dict) and not isinstance(value, Mapping | None):
        remedy = f"Write {LANGUAGE}" if key == "model" else f"Write `{key}: {{name: value}}`"
        why = "it holds several settings of RLlib's own algorithm"
        return Problem(key, "be a mapping", why, remedy, value)
    return None


def resolve_classes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` with dotted paths of classes and functions replaced by the objects.

    Keys that hold a class or function are known by their ending (`CLASS_SUFFIXES`), and
    `callbacks`, `callbacks_on_*`.
    """
    resolved = {}
    for key, value in settings.items():
        takes_object = key.endswith(CLASS_SUFFIXES) or key.startswith("callbacks")
        if takes_object and isinstance(value, str):
            value = import_dotted(value, name=key)
        resolved[RENAMED[key] if key in READ_ONLY else key] = value
    return resolved
