"""Checks of experiments before anything runs: configs, names, data, resources."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray.tune import CheckpointConfig

from rllib_llm.algorithms.language_model import LanguageModelAlgorithm
from rllib_llm.algorithms.places import Reservation, check_nodes, total_of
from rllib_llm.algorithms.registry import ALGORITHMS
from rllib_llm.checkpoints.algorithm import restore_source
from rllib_llm.config.environments import entry_config
from rllib_llm.config.schema import as_written, checked_config
from rllib_llm.config.tabled_config import TabledConfig
from rllib_llm.runs.doctor.data_rules import SETTINGS, row_problems, source_problems
from rllib_llm.runs.doctor.stage import Stage, env_settings
from rllib_llm.runs.experiments import (
    KEYS,
    Experiment,
    StandIn,
    algorithm_class,
    model_of,
    with_stand_ins,
)
from rllib_llm.runs.metrics import (
    COUNTERS,
    NAMES,
    OPEN_GROUPS,
    TUNES_OWN,
    describes,
    is_held_out,
)
from rllib_llm.runs.search_space import (
    examples,
    make_scheduler,
    make_searcher,
    planned_iterations,
    points,
    search_space,
)
from rllib_llm.runs.trackers import wrong_trackers
from rllib_llm.shared.errors import (
    Problem,
    SettingWarning,
    did_you_mean,
    distinct,
    errors_of,
    nearest,
    problems_in,
    refusals,
    report,
    require,
    suggestion,
    warning,
    without_consequences,
)
from rllib_llm.shared.storage import Place

INTERVAL = "checkpoint_interval_s"  # of `checkpoint_config`: ours, not Tune's
NUM_TO_KEEP = 2  # by default, beside the best one


@dataclass
class Examined:
    """The findings in an experiment: where no problem is an error also what one trial of each
    point of its grid reserves, and the stage of the first point, if its algorithm is ours."""

    experiment: Experiment
    problems: list[Problem]
    reserved: list[Reservation]
    stage: Stage | None


def check_experiments(
    experiments: list[Experiment], rules: Callable[[Stage], Iterable[Problem]] = lambda stage: ()
) -> list[Reservation]:
    """Examines every experiment, warns of warnings, and returns what one trial of each point of
    their grids reserves.

    Raises:
        Problems: all that is wrong, with the experiments' names.
    """
    found = [examined(experiment, rules) for experiment in with_stand_ins(experiments)]
    report(problem for each in found for problem in each.problems)
    return [one for each in found for one in each.reserved]


def examined(
    experiment: Experiment, rules: Callable[[Stage], Iterable[Problem]] = lambda stage: ()
) -> Examined:
    """Examines an experiment, every point of its grid: the one examination of `rllib train` and
    `rllib doctor`, which differ in the further `rules` of a stage whose settings are valid.

    What it takes from an earlier one does not exist yet: see `with_stand_ins`.
    """
    name = experiment.name
    result = Examined(experiment, [], [], None)
    found: list[Problem] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        try:
            problems_in(_experiment_problems, experiment, into=found)
            problems_in(_config_problems, result, into=found)
        except Exception:
            if not errors_of(found):  # else a consequence
                raise
    for each in said:
        if isinstance(each.message, SettingWarning):
            found.append(each.message.problem.within(f"{name}.config"))
        elif issubclass(each.category, UserWarning):
            found.append(warning(str(each.message)))
    found = [problem.within(name) for problem in without_consequences(distinct(found))]
    if errors := errors_of(found):
        return Examined(experiment, errors, [], None)
    if result.stage is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found += [named(problem, result.stage) for problem in rules(result.stage)]
    result.problems = found
    return result


def named(problem: Problem, stage: Stage) -> Problem:
    """The problem of a stage's setting, named as its experiment has it."""
    first = problem.name.split(".")[0]
    if first in stage.env and not hasattr(stage.config, first):
        problem = replace(problem, name=f"env_config.{problem.name}")
    return _placed(problem, stage.experiment, stage.config)


def _placed(problem: Problem, experiment: Experiment, config: Any) -> Problem:
    """The problem with the place of its setting: in the config, or beside it."""
    problem = as_written(problem, experiment.config, config)
    first = problem.name.split(".")[0]
    is_beside = first in KEYS and first not in experiment.config
    return problem.within(experiment.name if is_beside else f"{experiment.name}.config")


def _experiment_problems(experiment: Experiment) -> Iterator[Problem]:
    """Problems of an experiment beside its config."""
    algo_class = algorithm_class(experiment.run, experiment.name)
    for check in (make_scheduler, make_searcher, checkpoint_settings):
        yield from refusals(check, experiment)
    if (source := experiment.restore) is not None and "${" not in source:
        place = f"{experiment.name}.restore"
        yield from refusals(restore_source, source, algo_class, place, experiment.stop)
    yield from wrong_trackers(experiment.trackers)
    for key in COUNTERS:
        if (limit := experiment.stop.get(key, 1)) <= 0:
            yield Problem(f"stop.{key}", "be above 0", "a trial ends when its count reaches it",
                          "Raise it, or drop the experiment", limit)  # fmt: skip
    if issubclass(algo_class, LanguageModelAlgorithm):  # what its settings and results mean we know
        yield from _result_problems(experiment)


def _config_problems(result: Examined) -> Iterator[Problem]:
    """Problems of the config at every point of the grid; adds to `result` what each point reserves,
    and the stage of the first."""
    experiment = result.experiment
    algo_class: Any = algorithm_class(experiment.run, experiment.name)
    ours = issubclass(algo_class, LanguageModelAlgorithm)
    # A stand-in that is wrong is reported for the experiment that names it.
    is_foreign = isinstance(model_of(experiment.config), StandIn)
    read: set[str] = set()
    found: list[Problem] = []
    for settings in points(search_space(experiment, found)):
        config, wrong = checked_config(algo_class, settings, KEYS)
        found += [*wrong, *problems_in(check_env, config, algo_class)]
        if ours:
            found += problems_in(source_problems, settings)
        key = repr([settings.get(name) for name in SETTINGS])
        if ours and not errors_of(found) and key not in read:
            read.add(key)
            found += problems_in(row_problems, config)
        if not errors_of(found):
            if ours and result.stage is None:
                result.stage = Stage(experiment, config, env_settings(config))
            one = Reservation.of(algo_class.default_resource_request(config), config)
            result.reserved += [] if one in result.reserved else [one]
        for problem in found:
            if not (is_foreign and problem.name == "model"):
                yield _placed(problem, experiment, config)
        found = []


# Settings that name code which may report results of any name.
OWN_CODE = (
    "callbacks", "learner_class", "_learner_class", "env_runner_cls", "custom_evaluation_function",
)  # fmt: skip


def _result_problems(experiment: Experiment) -> Iterator[Problem]:
    """Names that no algorithm reports, and held-out results without an evaluation: by a metric
    Tune ends a trial after an iteration, for a limit it waits for ever, and a pass criterion is
    found missed at the end. Code of the user's own may report more than we know: there it is a
    warning."""
    space = search_space(experiment, [])
    default = algorithm_class(experiment.run, experiment.name).get_default_config()
    # A search space may give trials an evaluation.
    usual = getattr(default, "evaluation_interval", None)
    may_evaluate = bool(space.get("evaluation_interval", usual))
    own_code = any(str(key).startswith(OWN_CODE) for key in space)
    is_certain = experiment.run in ALGORITHMS and not own_code
    score = "checkpoint_score_attribute"
    named = [  # settings that name results, each with the name of one
        *(("stop", key) for key in experiment.stop),
        ("metric", experiment.metric),
        ("scheduler_config.metric", experiment.scheduler_config.get("metric")),
        ("search_config.metric", experiment.search_config.get("metric")),
        (f"checkpoint_config.{score}", experiment.checkpoint_config.get(score)),
        *(("pass_criteria", key) for key in experiment.pass_criteria),
    ]
    for where, key in named:
        if not isinstance(key, str):
            continue
        if not (describes(key) or key in TUNES_OWN or key.partition("/")[0] in OPEN_GROUPS):
            names = [name for name in NAMES if "<" not in name]
            usual = "Such are 'training_iteration', 'objective/scores' (mean reward), 'eval/loss'"
            remedy = did_you_mean(key, names, cutoff=0.85, otherwise=usual)
            rule, why = f"be a result of {experiment.run}", "no trial reports it"
            # A counter that is misspelt is no result of the user's own code.
            is_counter = where == "stop" and bool(nearest(key, COUNTERS, 1, cutoff=0.85))
            if not is_certain and not is_counter:
                yield warning(where, rule, f"{why}, unless code of yours does", remedy, key)
                continue
        elif is_certain and is_held_out(key) and not may_evaluate:
            rule, why = "come with an evaluation_interval", "without one nothing is evaluated"
            remedy = "Set evaluation_interval: 10"
        else:
            continue
        yield Problem(where, rule, why, remedy, key)


def checkpoint_settings(experiment: Experiment) -> CheckpointConfig:
    """Return Tune's `CheckpointConfig`; a checkpoint at the end is on unless switched off.

    Of checkpoints by time two are kept, where no scheduler copies them from trial to trial.

    Raises:
        ValueError: a setting that Tune refuses.
    """
    settings = {"checkpoint_at_end": True, **experiment.checkpoint_config}
    settings.pop(INTERVAL, None)
    if "checkpoint_frequency" not in settings and not experiment.scheduler:
        settings.setdefault("num_to_keep", NUM_TO_KEEP)
    return CheckpointConfig(**settings)


def check_env(config: Any, algo_class: type) -> None:
    """Check that the config's environment exists and, for ours, that its settings are known.

    Raises:
        ValueError: with the nearest names.
    """
    import gymnasium
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    from rllib_llm.envs import registry
    from rllib_llm.envs.rlhf import with_defaults
    from rllib_llm.shared.dotted import looks_dotted
    from rllib_llm.shared.ray_compat import registered_env

    for name in getattr(config, "envs", None) or ():
        found = problems_in(check_env, entry_config(config, name), algo_class)
        report([problem.within(f"envs.{name}") for problem in found])
    env = getattr(config, "env", None)
    rule = "be a gymnasium id, a registered name or a dotted path"
    is_of_rllib = isinstance(config, AlgorithmConfig) and not isinstance(config, TabledConfig)
    require(not (env is None and is_of_rllib and config.observation_space is None), "env", ...,
            rule, "an algorithm of RLlib learns in it",
            "Write `env: CartPole-v1` beside `run:`")  # fmt: skip
    if not isinstance(env, str):
        return
    if env in registry.ENVIRONMENTS:
        with_defaults(config.env_config, registry.default_settings(env))
    elif issubclass(algo_class, LanguageModelAlgorithm):
        registry.check_arguments(env, config.env_config)
        registry.check_batched(env)
    elif not registry.register_user_env(env):
        known = env in gymnasium.registry or registered_env(env) is not None
        require(known or ":" in env or looks_dotted(env), "env", env, rule, "it is none of these",
                suggestion(env, gymnasium.registry))  # fmt: skip


# A checkpoint holds weights and Adam's two moments; a fourth share is for critic and model folder.
CHECKPOINT_SHARES = 4
LEAST_FREE_BYTES = 100 * 1024**2


def check_resources(reservation: Reservation, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that the cluster's nodes can hold one trial, which would otherwise wait for ever.

    Raises:
        Problems: they cannot.
    """
    cluster = total_of(nodes)
    for name, amount in reservation.totals.items():
        have, place = cluster.get(name, 0.0), f"{amount:g} {name}{'s' if amount != 1 else ''}"
        require(amount <= have, f"one trial reserves {place} and", ..., f"fit into Ray's {have:g}",
                "it would wait for ever", f"Give Ray more (--ray-num-{name.lower()}s, a bigger "
                f"cluster), or lower num_env_runners, num_learners or the {name}s of each"
                )  # fmt: skip
    check_nodes(reservation, nodes)


def check_disk(experiments: list[Experiment], folder: Place, free: int | None = None) -> None:
    """Check that the disk of `folder` has room for the experiments' checkpoints; a URL has no end.

    Models that are not local folders are of unknown size and count as small. `free`: its free
    bytes, where they are known.

    Raises:
        Problems: there is too little.
    """
    if not isinstance(folder, Path):
        return
    needed = LEAST_FREE_BYTES
    for experiment in with_stand_ins(experiments):
        model, space = model_of(experiment.config), search_space(experiment)
        source = Path(model).expanduser() if isinstance(model, str) else None
        files = source.glob("*.safetensors") if source is not None and source.is_dir() else ()
        settings = checkpoint_settings(experiment)
        defaults = algorithm_class(experiment.run, experiment.name).get_default_config()
        iterations = planned_iterations(experiment.stop, defaults, space) or 0
        frequency = settings.checkpoint_frequency
        made = 1 + (iterations // frequency if frequency else 0)
        num_kept = num_trials(experiment) * min(made, settings.num_to_keep or made)
        needed += sum(file.stat().st_size for file in files) * CHECKPOINT_SHARES * num_kept
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free if free is None else free
    wanted, have = (f"{size / 1024**3:.2f} GiB" for size in (needed, free))
    require(free >= needed, "storage_path", str(folder),
            f"have about {wanted} free for the checkpoints", f"{have} are",
            "Free some, choose another disk with --storage-path, or "
            "keep fewer with --keep-checkpoints-num")  # fmt: skip


def num_trials(experiment: Experiment) -> int:
    """Return how many trials the experiment's search has in all."""
    return experiment.num_samples * len(examples(search_space(experiment)))
