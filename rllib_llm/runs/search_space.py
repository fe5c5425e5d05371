"""Search in YAML: spaces such as `{grid_search: [...]}`, schedulers and searchers by name."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping
from typing import Any

from ray import tune
from ray.tune import TuneError
from ray.tune.schedulers import SCHEDULER_IMPORT, PopulationBasedTraining, create_scheduler
from ray.tune.search import SEARCH_ALG_IMPORT, create_searcher
from ray.tune.search.sample import Categorical, Float, Integer
from ray.tune.search.variant_generator import generate_variants

from rllib_llm.config.schema import flat_settings
from rllib_llm.config.tabled_config import flattened
from rllib_llm.runs.experiments import Experiment, algorithm_class
from rllib_llm.runs.results import flatten, number
from rllib_llm.shared.errors import Problem, Problems, require, suggestion, unknown_key
from rllib_llm.shared.setting import LISTS, SAMPLERS


def to_tune(value: Any, where: str) -> Any:
    """Return `value` with every `{sampler: arguments}` replaced by the `ray.tune` object.

    Arguments are a list in the order of Tune's function, or a mapping by name. `grid_search` stays
    the mapping that Tune itself understands.

    Raises:
        Problems: wrong arguments for a sampler.
    """
    if isinstance(value, list):
        return [to_tune(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    name, arguments = next(iter(value.items())) if len(value) == 1 else ("", [])
    if name in LISTS:
        require(isinstance(arguments, list) and arguments, f"{where}.{name}", arguments,
                "be a list of at least one value", "these are tried",
                f"Write {{{name}: [1, 2]}}")  # fmt: skip
        if name == "choice":
            return tune.choice(arguments)
        return {"grid_search": [to_tune(item, where) for item in arguments]}
    return _from_range(name, arguments, where) if name in SAMPLERS else _entries(value, where)


def _entries(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `values`, which are no search space whatever they are called, each `to_tune`."""
    return {key: to_tune(item, f"{where}.{key}") for key, item in values.items()}


def examples(config: dict[str, Any], limit: int = 64) -> list[dict[str, Any]]:
    """Return concrete configs of the space: every grid point up to `limit`, samplers drawn once."""
    variants = generate_variants(config, random_state=0)
    return [variant for _, variant in itertools.islice(variants, limit)]


def points(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `examples`, and the first of them with each further value of a `choice`."""
    drawn = examples(config)
    chosen = {key: each.categories for key, each in config.items() if isinstance(each, Categorical)}
    return drawn + [
        {**drawn[0], key: value}
        for key, values in chosen.items() for value in values if value is not drawn[0][key]
    ]  # fmt: skip


def _from_range(name: str, arguments: Any, where: str) -> Any:
    sampler = getattr(tune, name)
    names = [each for each in inspect.signature(sampler).parameters if each != "base"]
    given = arguments
    if isinstance(arguments, list) and len(arguments) == len(names):
        given = dict(zip(names, arguments, strict=True))
    place, usage = f"{where}.{name}", f"Write {{{name}: [{', '.join(names)}]}}"
    require(isinstance(given, dict) and set(given) == set(names), place, arguments,
            f"give {len(names)} numbers ({', '.join(names)})", "these are its arguments",
            usage)  # fmt: skip
    for key, bound in given.items():
        is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
        require(is_number, f"{place}.{key}", bound, "be a number", "it bounds a range", usage)
    require("lower" not in given or given["lower"] <= given["upper"], place, arguments,
            "give a lower bound that is not above the upper one",
            "values are drawn from between them", usage)  # fmt: skip
    try:
        return sampler(**given)
    except ValueError as error:
        why = f"{place}={arguments!r} cannot be sampled: {str(error).rstrip('.')}. {usage}."
        raise Problems(why) from error


SHORT_NAMES = {"asha": "async_hyperband"}


def make_scheduler(experiment: Experiment) -> Any:
    """Return the Tune scheduler that the experiment names, None for first in, first out.

    Raises:
        Problems: unknown name or argument.
    """
    name, arguments = _chosen(experiment, "scheduler", "scheduler_config", SCHEDULER_IMPORT)
    if not name:
        return None
    require(name == "fifo" or experiment.metric or arguments.get("metric"),
            f"{experiment.name}.metric", ..., "be set",
            f"scheduler {experiment.scheduler!r} compares trials by it",
            "Write `metric: objective/scores` and `mode: max`")  # fmt: skip
    try:
        return ResumablePBT(**arguments) if name == "pbt" else create_scheduler(name, **arguments)
    except (AssertionError, TuneError, TypeError, ValueError) as error:
        raise _refused(experiment, "scheduler_config", error) from error


def make_searcher(experiment: Experiment) -> Any:
    """Return the Tune searcher that the experiment names, None for grid and random search.

    Raises:
        Problems: unknown name or argument, or its package is not installed.
    """
    name, arguments = _chosen(experiment, "search_alg", "search_config", SEARCH_ALG_IMPORT)
    if not name:
        return None
    try:
        return create_searcher(name, **arguments)
    except (ImportError, AssertionError) as error:
        raise Problems(
            f"{experiment.name}.search_alg", "be installed", error,
            "Install its package, or drop the key for grid and random search", name,
        ) from error  # fmt: skip
    except (TypeError, ValueError) as error:
        raise _refused(experiment, "search_config", error) from error


def _refused(experiment: Experiment, key: str, error: object) -> Problems:
    """The error for arguments that Tune refuses."""
    return Problems(
        f"{experiment.name}.{key}", "be arguments that Ray Tune takes", error, "Correct them",
        getattr(experiment, key),
    )  # fmt: skip


def _chosen(
    experiment: Experiment, key: str, config: str, known: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Returns Tune's name for the setting `key`, and the arguments that `config` gives; ("", {})
    where nothing is chosen.

    Raises:
        Problems: unknown name or argument, or arguments for nothing.
    """
    given, place = getattr(experiment, config), f"{experiment.name}.{config}"
    if not getattr(experiment, key):
        require(not given, place, ..., f"come with {key}", "alone it has no effect",
                f"Name the {key}, or drop it")  # fmt: skip
        return "", {}
    value = str(getattr(experiment, key)).lower()
    value = SHORT_NAMES.get(value, value)
    require(value in known, f"{experiment.name}.{key}", value, "be a name that Ray Tune knows",
            "it is not", suggestion(value, [*known, *SHORT_NAMES]))  # fmt: skip
    target = known[value]
    if inspect.isfunction(target):  # Tune imports some of them late, through a function
        target = target()
    arguments = _entries(given, place)
    allowed = list(inspect.signature(target.__init__).parameters)[1:]
    for name in arguments:
        if name not in allowed:
            whole = [each for each in allowed if each.startswith(f"{name}_")]
            remedy = f"Did you mean {whole[0]!r}?" if whole else ""
            raise Problems([unknown_key(place, name, allowed, remedy)])
        require(not (name in ("metric", "mode") and experiment.metric), f"{place}.{name}",
                arguments[name], "be left out", "metric and mode of the experiment say it",
                "Drop it")  # fmt: skip
    return value, arguments


class ResumablePBT(PopulationBasedTraining):
    """Tune's scheduler, which counts from the checkpoints that trials go on from. Tune's own begins
    at 0 in a resumed run: it perturbs at once, and where trials wait for each other (`synch`) and
    two intervals or more have passed, each then waits for a time that all have reached, for ever.

    Values stay in the ranges that they were drawn from. Tune multiplies them by 1.2, again and
    again, and a trial with a value that its algorithm refuses would end the run.
    """

    _next_perturbation_sync: float  # Tune's own

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict, dict]:
        config, operations = super()._get_new_config(trial, trial_to_clone)
        return _in_range(config, self._hyperparam_mutations), operations

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        saved = trial.latest_checkpoint_result
        if saved is not None:
            interval = self._perturbation_interval
            time = flatten(saved.metrics).get(self._time_attr, 0)
            self._trial_state[trial].last_perturbation_time = time // interval * interval

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        reached = [
            self._trial_state[live].last_train_time for live in tune_controller.get_live_trials()
        ]
        if self._synch and reached and min(reached) >= self._next_perturbation_sync:
            intervals = max(reached) // self._perturbation_interval + 1
            self._next_perturbation_sync = intervals * self._perturbation_interval
        return decision


def _in_range(config: Mapping[str, Any], spaces: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with each value that has a range in `spaces` moved to the nearest in it."""
    kept = dict(config)
    for key, space in spaces.items():
        if isinstance(space, dict):
            kept[key] = _in_range(config[key], space)
        elif isinstance(space, Float | Integer):  # without the upper end, of whole numbers
            highest = space.upper - isinstance(space, Integer)
            kept[key] = min(max(config[key], space.lower), highest)
    return kept


def search_space(experiment: Experiment, found: list[Problem] | None = None) -> dict[str, Any]:
    """Return the experiment's config and environment, sections dissolved, search spaces as Tune's
    objects. Problems of its keys are added to `found`, if given; otherwise they are raised."""
    defaults = algorithm_class(experiment.run, experiment.name).get_default_config()
    config = flat_settings(defaults, experiment.config, found)
    if experiment.env is not None:
        config["env"] = experiment.env
    planned = planned_iterations(experiment.stop, defaults, config)
    if planned is not None and hasattr(defaults, "planned_iterations"):
        config.setdefault("planned_iterations", planned)
    # Trials draw first values of settings that population-based training changes from their search
    # spaces; Tune would do so later and without checks.
    mutations = experiment.scheduler_config.get("hyperparam_mutations")
    where, spaces = f"{experiment.name}.scheduler_config.hyperparam_mutations", {}
    for key, space in mutations.items() if isinstance(mutations, dict) else ():
        is_grid = isinstance(space, dict) and "grid_search" in space
        require(not is_grid, f"{where}.{key}", space, "be a list or a range to draw from",
                "trials draw new values from it",
                f"Write {space['grid_search']}" if is_grid else "")  # fmt: skip
        spaces[key] = {"choice": space} if isinstance(space, list) else space
    return {**_entries(spaces, where), **_entries(config, f"{experiment.name}.config")}


def planned_iterations(
    stop: Mapping[str, Any], config: Any, changes: Mapping[str, Any] | None = None
) -> int | None:
    """Return after how many iterations `stop` ends a trial at the latest, None where it does not
    say. `changes`: settings laid over those of the algorithm's `config`. Of several environments
    with different numbers of completions the weights say how many an iteration has."""
    ends = []
    if (iterations := number(stop.get("training_iteration")) or 0.0) > 0:
        ends.append(iterations)
    names = ("train_batch_size_per_learner", "num_learners", "num_completions", "envs")
    size, learners, of_group, envs = (
        (changes or {}).get(name, getattr(config, name, None)) for name in names
    )
    num = (number(size) or 0.0) * max(1.0, number(learners) or 0.0)
    if isinstance(envs, Mapping) and hasattr(config, "envs"):
        num = num // (number(of_group) or math.inf) * _mean_of_group(type(config), envs, of_group)
    episodes = number(stop.get("episode")) or 0.0
    if episodes > 0 and num > 0 and number(learners) is not None:
        ends.append(episodes / num)
    return math.ceil(min(ends)) if ends else None


def _mean_of_group(config_class: Any, envs: Mapping[str, Any], of_run: Any) -> float:
    """Completions of a group, the mean by the weights of several environments; 0: not known yet."""
    entries = [flattened(config_class, entry, found=[]) for entry in envs.values()
               if isinstance(entry, Mapping)]  # fmt: skip
    pairs = [(number(entry.get("weight", 1)), number(entry.get("num_completions", of_run)))
             for entry in entries]  # fmt: skip
    known = [(weight, num) for weight, num in pairs if weight is not None and num is not None]
    total = sum(weight for weight, _ in known)
    are_known = total > 0 and len(known) == len(envs)
    return sum(weight * num for weight, num in known) / total if are_known else 0.0
