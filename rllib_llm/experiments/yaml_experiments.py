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

`${name.model}` and `${name.checkpoint}` refer to an earlier experiment, `${vars.name}` to an entry
of the top-level mapping `vars`, `${here}` to the folder of the file. Relative paths are relative to
the folder in which the command runs.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllib_llm.config_schema import nearest
from rllib_llm.user_errors import UserError, unknown_key

REFERENCE = re.compile(r"\$\{([^}]*)\}")
NAME = re.compile(r"^[A-Za-z][A-Za-z0-9_-]*$")
PRODUCTS = ("model", "checkpoint")
CHECKPOINT_KEYS = (
    "checkpoint_interval_s",
    "checkpoint_frequency",
    "checkpoint_at_end",
    "num_to_keep",
    "checkpoint_score_attribute",
    "checkpoint_score_order",
)
# Keys of other versions of the format -> where the setting lives.
MOVED = {
    "algo": "run",
    "local_dir": "storage_path",
    "checkpoint_freq": "checkpoint_config.checkpoint_frequency",
    "checkpoint_at_end": "checkpoint_config.checkpoint_at_end",
    "keep_checkpoints_num": "checkpoint_config.num_to_keep",
    "checkpoint_score_attr": "checkpoint_config.checkpoint_score_attribute",
    "resources_per_trial": "config.num_cpus_for_main_process, config.num_gpus_per_learner, ...",
}


@dataclass
class Experiment:
    """One experiment of the file; the fields are the keys that YAML may use.

    Attributes:
        name: the key it stands under; `${name.model}` refers to it.
        run: algorithm name or dotted path.
        env: registered environment name or dotted path.
        config: settings of the algorithm, with search spaces.
        stop: result key -> value at which a trial ends.
        num_samples: how often the search space is sampled.
        checkpoint_config: see `ray.tune.CheckpointConfig`; `checkpoint_at_end` is on by default.
            Without `checkpoint_frequency` there is a checkpoint every `checkpoint_interval_s`
            seconds: 300, or more where saving would take over 2 % of the time.
        storage_path: where results go, unless --storage-path says it.
        restore: checkpoint from which the trials start.
        max_failures: how often a failed trial is started again from its last checkpoint.
        time_budget_s: seconds after which the whole experiment ends.
        metric, mode: the result that search and schedulers improve, and which of several trials
            `${name.model}` means; mode is "max" or "min".
        scheduler, scheduler_config: a Tune scheduler by name ("asha", "pbt", ...) and arguments.
        search_alg, search_config: a Tune searcher by name ("optuna", ...) and arguments.
        max_concurrent_trials: limit on trials that run at once.
        pass_criteria: result key -> the least value of the last result that counts as a pass.
        description: what the experiment does, for whoever reads the file.
    """

    name: str
    run: str
    env: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 1
    checkpoint_config: dict[str, Any] = field(default_factory=dict)
    storage_path: str | None = None
    restore: str | None = None
    max_failures: int = 0
    time_budget_s: float | None = None
    metric: str | None = None
    mode: str | None = None
    scheduler: str | None = None
    scheduler_config: dict[str, Any] = field(default_factory=dict)
    search_alg: str | None = None
    search_config: dict[str, Any] = field(default_factory=dict)
    max_concurrent_trials: int | None = None
    pass_criteria: dict[str, Any] = field(default_factory=dict)
    description: str = ""


KEYS = tuple(f.name for f in dataclasses.fields(Experiment) if f.name != "name")
MAPPINGS = tuple(f.name for f in dataclasses.fields(Experiment) if f.default_factory is dict)


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
    from rllib_llm.experiments.overrides import apply_overrides

    if not isinstance(data, dict) or not data:
        raise UserError(
            f"{source} must hold experiments: it is {type(data).__name__}. "
            "Write `name: {run: PPOPtx, env: ..., config: {...}}`."
        )
    data = apply_overrides(data, overrides, source)
    values = {f"vars.{key}": value for key, value in (data.pop("vars", None) or {}).items()}
    if here is not None:
        values["here"] = str(here)
    experiments = [_experiment(name, spec, source) for name, spec in data.items()]
    names = [experiment.name for experiment in experiments]
    return [
        fill(experiment, functools.partial(_known, values=values, names=names, index=index))
        for index, experiment in enumerate(experiments)
    ]


def fill(experiment: Experiment, lookup: Callable[[str, str], Any]) -> Experiment:
    """Return the experiment with every `${reference}` in it replaced; see `substitute`."""
    settings = {
        key: substitute(getattr(experiment, key), lookup, f"{experiment.name}.{key}")
        for key in KEYS
    }
    return Experiment(experiment.name, **settings)


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
            f"{where}: ${{{ref}}} must be ${{{name}.model}} or ${{{name}.checkpoint}}: "
            "an experiment leaves these two behind. Change what follows the dot."
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


def _experiment(name: Any, spec: Any, source: str) -> Experiment:
    if not isinstance(name, str) or not NAME.match(name):
        raise UserError(
            f"{source}: experiment name {name!r} must be letters, digits, - and _: it becomes a "
            "folder name. Rename it."
        )
    if not isinstance(spec, dict):
        raise UserError(
            f"{source}: {name}={spec!r} must be a mapping with run, env, stop, config: it is an "
            "experiment. Indent its settings below its name."
        )
    for key in spec:
        if key in MOVED:
            raise unknown_key(name, key, KEYS, hint=f"It is {MOVED[key]!r} here.")
        if key not in KEYS:
            raise unknown_key(name, str(key), KEYS)
    for key in MAPPINGS:
        if not isinstance(spec.get(key) or {}, dict):
            raise UserError(
                f"{name}.{key}={spec[key]!r} must be a mapping: it holds settings by name. "
                f"Write `{key}: {{name: value}}`."
            )
    if not spec.get("run"):
        raise UserError(f"{name}.run is missing: it names the algorithm. Write `run: PPOPtx`.")
    for key in spec.get("checkpoint_config") or {}:
        if key not in CHECKPOINT_KEYS:
            raise unknown_key(f"{name}.checkpoint_config", str(key), CHECKPOINT_KEYS)
    filled = {key: value for key, value in spec.items() if value is not None}
    return checked(Experiment(name=name, **filled))


def checked(experiment: Experiment) -> Experiment:
    """Return the experiment, its plain numbers and choices checked.

    Raises:
        UserError: one of them cannot be.
    """
    name = experiment.name
    for key in ("num_samples", "max_failures", "max_concurrent_trials"):
        value = getattr(experiment, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise UserError(f"{name}.{key}={value!r} must be a whole number: it counts. Write 1.")
    if experiment.num_samples < 1:
        raise UserError(
            f"{name}.num_samples={experiment.num_samples} must be at least 1: it is how often the "
            "search space is sampled. Write 1."
        )
    if experiment.mode not in (None, "min", "max"):
        raise UserError(
            f"{name}.mode={experiment.mode!r} must be 'max' or 'min': it says which way "
            f"{experiment.metric!r} improves. Choose one."
        )
    for key in ("stop", "pass_criteria"):
        for metric, value in getattr(experiment, key).items():
            if not isinstance(value, int | float | bool):
                raise UserError(
                    f"{name}.{key}.{metric}={value!r} must be a number: the result is compared "
                    "with it. Write it without quotes."
                )
    return experiment
