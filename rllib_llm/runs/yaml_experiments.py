"""The YAML format of `rllib train file`: experiments in the order in which they run.

    sft:                        # name of the experiment (stage)
      run: SFT                  # algorithm: ours, RLlib's, or a dotted path
      env: ...                  # environment, where the algorithm wants one
      stop: {training_iteration: 30}
      config: {model: ..., lr: 1e-3}
      checkpoint_config: {checkpoint_frequency: 10, num_to_keep: 2}
    ppo:
      run: PPOPtx
      config:
        model: ${sft.model}     # the Hugging Face folder that `sft` made
        lr: {grid_search: [1e-5, 1e-4]}

`${name.model}`, `${name.checkpoint}` and `${name.rollouts}` refer to an earlier experiment,
`${vars.name}` to an entry of the top-level mapping `vars`, `${here}` to the folder of the file.
Relative paths are relative to the folder in which the command runs. `include: other.yaml` puts what
another file says first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rllib_llm.runs.experiment import KEYS, Experiment, algorithm_class
from rllib_llm.runs.yaml_loader import with_includes
from rllib_llm.shared.errors import UserError, nearest

REFERENCE = re.compile(r"\$\{([^}]*)\}")
NAME = re.compile(r"^[A-Za-z][A-Za-z0-9_-]*$")
PRODUCTS = ("model", "checkpoint", "rollouts")


def load(
    data: Any, source: str, overrides: tuple[str, ...] = (), here: Path | None = None
) -> list[Experiment]:
    """Return the experiments that `data`, a parsed YAML file, describes, in file order.

    Args:
        data: mapping of experiment names to their settings, and optionally `vars`.
        source: name of the file for errors.
        overrides: `--set` texts, applied first.
        here: what `${here}` stands for.

    Raises:
        UserError: unknown keys, wrong kinds of values, references to nothing or to a later stage.
    """
    from rllib_llm.runs.yaml_loader import apply_overrides

    if not isinstance(data, dict) or not data:
        raise UserError(
            f"{source} must hold experiments: it is {type(data).__name__}. "
            "Write `name: {run: PPOPtx, env: ..., config: {...}}`."
        )
    data = apply_overrides(with_includes(data, source, here), overrides, source)
    values = _variables(data.pop("vars", None), source, here)
    if not data:
        raise UserError(
            f"{source} must hold experiments: it has nothing but `vars`. "
            "Write `name: {run: PPOPtx, env: ..., config: {...}}`."
        )
    names = list(data)
    experiments = []
    for index, (name, spec) in enumerate(data.items()):
        _check_spec(name, spec, source)
        lookup = functools.partial(_known, values=values, names=names, index=index)
        experiments.append(Experiment(**{**substitute(spec, lookup, name), "name": name}))
    return experiments


def _variables(given: Any, source: str, here: Path | None) -> dict[str, Any]:
    """The values of references: the entries of `vars`, which may refer to each other, and `here`.

    Raises:
        UserError: `vars` is no mapping, or an entry refers to nothing or to itself.
    """
    if not isinstance(given or {}, dict):
        raise UserError(
            f"{source}: vars={given!r} must be a mapping: ${{vars.name}} refers to its entries. "
            "Write `vars: {name: value}`."
        )
    raw = {f"vars.{key}": value for key, value in (given or {}).items()}
    if here is not None:
        raw["here"] = str(here)
    asked: list[str] = []

    def lookup(ref: str, where: str) -> Any:
        if ref in asked:
            raise UserError(
                f"{source}: {where} refers to itself: {' -> '.join([*asked, ref])}. Write a value."
            )
        value = _known(ref, where, values=raw, names=[], index=0)
        asked.append(ref)
        try:
            return substitute(value, lookup, ref)
        finally:
            asked.pop()

    return {name: None if value is None else lookup(name, name) for name, value in raw.items()}


def fill(experiment: Experiment, lookup: Callable[[str, str], Any]) -> Experiment:
    """Return the experiment with every `${reference}` in it replaced; see `substitute`."""
    return experiment.replace(
        **{
            key: substitute(getattr(experiment, key), lookup, f"{experiment.name}.{key}")
            for key in KEYS
        }
    )


def substitute(value: Any, lookup: Callable[[str, str], Any], where: str) -> Any:
    """Return `value`, every `${reference}` in its strings replaced by `lookup(reference, where)`.

    A string that is nothing but one reference becomes the value itself, whatever its type.
    """
    if isinstance(value, dict):
        return {k: substitute(v, lookup, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [substitute(v, lookup, f"{where}.{i}") for i, v in enumerate(value)]
    if not isinstance(value, str):
        return value
    if whole := REFERENCE.fullmatch(value):
        return lookup(whole[1].strip(), where)
    return REFERENCE.sub(lambda match: str(lookup(match[1].strip(), where)), value)


def references(value: Any) -> set[tuple[str, str]]:
    """Return the (experiment name, product) pairs that `value` refers to."""
    found: set[tuple[str, str]] = set()

    def lookup(reference: str, where: str) -> str:
        name, _, product = reference.rpartition(".")
        found.add((name, product))
        return ""

    substitute(value, lookup, "")
    return found


def _known(ref: str, where: str, *, values: Mapping[str, Any], names: list[str], index: int) -> Any:
    """Return the value of a variable, or the reference to an earlier stage unchanged."""
    if ref in values:
        if values[ref] is None:
            name = ref.removeprefix("vars.")
            raise UserError(
                f"{where}: ${{{ref}}} has no value yet. Give it with --set vars.{name}=..."
            )
        return values[ref]
    name, _, product = ref.rpartition(".")
    if name in names and product not in PRODUCTS:
        raise UserError(
            f"{where}: ${{{ref}}} must be ${{{name}.model}}, ${{{name}.checkpoint}} or "
            f"${{{name}.rollouts}}: an experiment leaves these behind. Change what follows the dot."
        )
    if name not in names:
        known = [f"{n}.{p}" for n in names[:index] for p in PRODUCTS] + sorted(values)
        close = nearest(ref, known) or known
        hint = f"Known here: {', '.join(close)}." if close else "Nothing is known here."
        raise UserError(f"{where}: ${{{ref}}} refers to nothing in this file. {hint}")
    if names.index(name) >= index:
        problem = "itself" if name == names[index] else "a later experiment"
        raise UserError(
            f"{where}: ${{{ref}}} refers to {problem}: experiments run in the order of the file "
            f"({', '.join(names)}). Move {name!r} above {names[index]!r}."
        )
    return f"${{{ref}}}"


def _check_spec(name: Any, spec: Any, source: str) -> None:
    if not isinstance(name, str) or not NAME.match(name):
        raise UserError(
            f"{source}: experiment name {name!r} must be letters, digits, - and _: it becomes a "
            "folder name. Rename it."
        )
    if name == "run" and isinstance(spec, str):
        raise UserError(
            f"{source}: an experiment must have a name: `run: {spec}` stands at the top of the "
            "file. Write a line such as `my-run:` above it, and indent the rest below."
        )
    if not isinstance(spec, dict):
        raise UserError(
            f"{source}: {name}={spec!r} must be a mapping with run, env, stop, config: it is an "
            "experiment. Indent its settings below its name."
        )


class StandIn(str):
    """The model that an earlier experiment starts from, in place of the one that it will make."""


def with_stand_ins(experiments: list[Experiment]) -> list[Experiment]:
    """Return the experiments with `${name.model}` replaced by the model that `name` starts from.

    Raises:
        UserError: an experiment uses another's result that will not be saved.
    """
    by_name = {experiment.name: experiment for experiment in experiments}
    stand_ins: dict[str, Any] = {}
    filled = []
    for experiment in experiments:
        for name, product in references(vars(experiment)):
            if product == "rollouts":
                _check_keeps_rollouts(by_name[name], experiment.name)
            elif by_name[name].checkpoint_config.get("checkpoint_at_end") is False:
                raise UserError(
                    name=f"{name}.checkpoint_config.checkpoint_at_end",
                    value=False,
                    rule="be true",
                    reason=f"{experiment.name!r} uses ${{{name}.{product}}}",
                    remedy="Drop the key",
                )
        config = substitute(
            experiment.config, lambda ref, _: stand_ins.get(ref, f"${{{ref}}}"), experiment.name
        )
        model = model_of(config)
        if isinstance(model, str):
            stand_ins[f"{experiment.name}.model"] = StandIn(model)
        filled.append(experiment.replace(config=config))
    return filled


def _check_keeps_rollouts(experiment: Experiment, user: str) -> None:
    from rllib_llm.algorithms.rlhf import RLHF

    name = experiment.name
    if not issubclass(algorithm_class(experiment.run, name), RLHF):
        raise UserError(
            where=f"{user}",
            name=f"${{{name}.rollouts}}",
            rule="be of an experiment that samples",
            reason=f"{name}.run={experiment.run!r} does not",
            remedy="Name one of GRPO, PPOPtx, ..",
        )
    section = experiment.config.get("rollouts")
    section = section if isinstance(section, dict) else {}
    kept = experiment.config.get("store_rollouts", section.get("store", True))
    if kept is False:
        raise UserError(
            name=f"{name}.config.store_rollouts",
            value=False,
            rule="be true",
            reason=f"{user!r} uses ${{{name}.rollouts}}",
            remedy="Drop the key",
        )


def model_of(config: Mapping[str, Any]) -> Any:
    """The experiment's starting model, wherever its config has it."""
    section = config.get("language_model")
    return config.get("model") or (section.get("model") if isinstance(section, dict) else None)
