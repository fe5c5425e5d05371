"""`--set a.b=value`: change what a YAML file says, from the command line."""

from __future__ import annotations

import copy
from typing import Any

from rllib_llm.runs.yaml_loader import parse
from rllib_llm.shared.errors import UserError, suggestion

HELP = (
    "Change a setting of the file: KEY=VALUE, as often as needed. KEY is a path of names joined by "
    "dots: 'sft.config.lr=1e-3' for the experiment sft, 'config.lr=1e-3' or 'stop.episode=100' for "
    "every experiment, 'vars.data=FILE' for a variable. Settings of the algorithm may leave out "
    "config: 'sft.lr=1e-3'. Without an experiment's name, such a setting goes to each experiment "
    "whose algorithm knows it. VALUE is YAML: 1e-3, true, [1, 2], {grid_search: [1, 2]}."
)


def apply_overrides(
    data: dict[str, Any], overrides: tuple[str, ...], source: str
) -> dict[str, Any]:
    """Return a copy of the parsed YAML file `data` with the `--set` texts applied in order.

    Raises:
        UserError: no "=", or a key that fits no experiment.
    """
    data = copy.deepcopy(data)
    for text in overrides:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise UserError(
                f"--set {text!r} must be KEY=VALUE: a path of names joined by dots, and a value. "
                "Write --set sft.config.lr=1e-3."
            )
        _apply(data, keys, parse(value, f"--set {path}"), source)
    return data


def _apply(data: dict[str, Any], keys: list[str], value: Any, source: str) -> None:
    from rllib_llm.runs.experiment import KEYS

    experiments = {name: spec for name, spec in data.items() if name != "vars"}
    if keys[0] == "vars":
        _known_variable(data, keys, source)
        _assign(data, keys, value)
        return
    if keys[0] in experiments and len(keys) > 1:
        targets, rest = {keys[0]: experiments[keys[0]]}, keys[1:]
    elif keys[0] in KEYS:
        targets, rest = experiments, keys
    else:
        targets, rest = _that_know(keys[0], experiments), keys
        if not targets:
            raise UserError(
                f"--set {'.'.join(keys)}: {keys[0]!r} is neither an experiment of {source} "
                f"({', '.join(experiments)}), nor a setting of one, nor known to their algorithms. "
                f"{suggestion(keys[0], [*experiments, *KEYS, *_known_settings(experiments)])}"
            )
    if rest[0] not in KEYS:
        rest = ["config", *rest]
    for spec in targets.values():
        if isinstance(spec, dict):
            _assign(spec, _where_it_stands(spec, rest), copy.deepcopy(value))


def _where_it_stands(spec: dict[str, Any], keys: list[str]) -> list[str]:
    """Return the path of a setting inside its section, if the file has it there."""
    config = spec.get("config")
    if keys[0] != "config" or len(keys) != 2 or not isinstance(config, dict) or keys[1] in config:
        return keys
    sections = (name for name, value in config.items() if isinstance(value, dict))
    holder = next((n for n in sections if n != "env_config" and keys[1] in config[n]), None)
    return keys if holder is None else ["config", holder, keys[1]]


def _known_variable(data: dict[str, Any], keys: list[str], source: str) -> None:
    known = data.get("vars") or {}
    if not isinstance(known, dict):
        return  # told where the file is read
    if len(keys) < 2 or keys[1] not in known:
        raise UserError(
            f"--set {'.'.join(keys)}: {source} has no such variable. "
            f"It has: {', '.join(known) or 'none (no `vars` at its top)'}."
        )


def _that_know(key: str, experiments: dict[str, Any]) -> dict[str, Any]:
    """Return the experiments whose algorithm has a setting called `key`."""
    return {
        name: spec for name, spec in experiments.items() if key in _known_settings({name: spec})
    }


def _known_settings(experiments: dict[str, Any]) -> set[str]:
    """Return the settings, and sections, of all algorithms that the experiments run."""
    from rllib_llm.config.schema import allowed_keys, sections
    from rllib_llm.runs.algorithms import algorithm_class

    names = {
        spec["run"] for spec in experiments.values() if isinstance(spec, dict) and "run" in spec
    }
    configs = [algorithm_class(name, "run").get_default_config() for name in sorted(names)]
    return {key for config in configs for key in (*allowed_keys(config), *sections(config))}


def _assign(target: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set `target[keys[0]][keys[1]]...` to `value`, making mappings where there are none."""
    where: Any = target
    for done, key in enumerate(keys[:-1], 1):
        if isinstance(where, list):
            where = where[_index(where, key, keys)]
            continue
        if where.get(key) is None:
            where[key] = {}
        where = where[key]
        if not isinstance(where, dict | list):
            raise UserError(
                f"--set {'.'.join(keys)}: {'.'.join(keys[:done])} is {where!r}, which holds no "
                "settings of its own. Shorten the path."
            )
    if isinstance(where, list):
        where[_index(where, keys[-1], keys)] = value
    else:
        where[keys[-1]] = value


def _index(items: list[Any], key: str, keys: list[str]) -> int:
    if not key.isdigit() or int(key) >= len(items):
        raise UserError(
            f"--set {'.'.join(keys)}: {key!r} must be a number from 0 to {len(items) - 1}: "
            "it picks an item of a list. Check the position."
        )
    return int(key)
