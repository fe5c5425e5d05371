"""Checks of experiments before anything runs: configs, names, data, resources."""

from __future__ import annotations

import difflib
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rllib_llm.algorithms.places import Reservation, check_nodes, total_of
from rllib_llm.algorithms.registry import ALGORITHMS
from rllib_llm.checkpoints.algorithm import restore_source
from rllib_llm.config.checks import require
from rllib_llm.config.schema import build_config
from rllib_llm.config.sections import sections_of, table
from rllib_llm.config.tabled_config import TabledConfig
from rllib_llm.runs.doctor.data_rules import check_data, check_sources, data_settings
from rllib_llm.runs.doctor.stage import Stage, distinct, stage_of
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
    TYPICAL,
    USUAL_COUNTERS,
    is_held_out,
    is_reported,
    may_report,
    reporters,
    result_like,
)
from rllib_llm.runs.search_space import (
    examples,
    make_scheduler,
    make_searcher,
    planned_iterations,
    search_space,
)
from rllib_llm.shared.errors import (
    Problem,
    Problems,
    SettingWarning,
    all_complaints,
    complain,
    noted,
    suggestion,
    warning,
)
from rllib_llm.shared.setting import IN_ENV
from rllib_llm.shared.storage import Place

INTERVAL = "checkpoint_interval_s"  # of `checkpoint_config`: ours, not Tune's
NUM_TO_KEEP = 2  # by default, beside the best one


def check_experiments(
    experiments: list[Experiment], rules: Callable[[Stage], Iterable[Problem]] = lambda stage: ()
) -> list[Reservation]:
    """Validate every experiment; return what one trial of each point of their grids reserves.

    What a later stage takes from an earlier one does not exist yet. For the check, the earlier
    stage's own `model` stands in for it: the same architecture and tokenizer.

    Args:
        rules: gives further problems of a stage of ours whose settings are valid. What is no error
            is warned of.

    Raises:
        Problems: all that is wrong, with the experiments' names.
    """
    reserved: list[Reservation] = []
    problems: list[Problem] = []
    for experiment in with_stand_ins(experiments):
        found, of_trials, stage = examined(experiment)
        reserved += of_trials
        if stage is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found += [problem.within(experiment.name) for problem in rules(stage)]
        problems += found
    _tell(distinct(problems))
    return reserved


def check_experiment(experiment: Experiment) -> list[Reservation]:
    """Validate one experiment, every point of its grid, and return what one trial of each point
    reserves.

    Raises:
        Problems: all that is wrong, a line each, with the experiment's name.
    """
    found, reserved, _ = examined(experiment)
    _tell(found)
    return reserved


def _tell(problems: Iterable[Problem]) -> None:
    """Warns of what is no error; raises Problems where something is."""
    errors = [problem for problem in problems if problem.severity == "error"]
    for problem in problems:
        if problem.severity == "warning":
            warnings.warn(SettingWarning(problem), stacklevel=3)
    if errors:
        raise Problems(errors)


def examined(experiment: Experiment) -> tuple[list[Problem], list[Reservation], Stage | None]:
    """Returns the problems of an experiment. Where none is an error: also what one trial of each
    point of its grid reserves, and the stage of the first point, if its algorithm is ours."""
    name = experiment.name
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        with all_complaints() as errors:
            _, stage = found = examine_experiment(experiment)
    if errors:
        # A stand-in that is wrong is reported for the experiment that names it.
        is_foreign = isinstance(model_of(experiment.config), StandIn)
        wrong = [p for p in errors if not (is_foreign and re.fullmatch(r"(.*\.)?model", p.name))]
        return [
            replace(each, name=as_written(each.name, experiment)).within(name) for each in wrong
        ], [], None
    told = [each.message for each in said if issubclass(each.category, UserWarning)]
    problems = [
        each.problem if isinstance(each, SettingWarning) else warning(str(each)) for each in told
    ]
    return [problem.within(name) for problem in problems], *found


def as_written(text: str, experiment: Experiment) -> str:
    """An error with settings of the environment as the experiment has them: `prompts.data` in place
    of `env_config.prompts`, where that stands in no `env_config` of it."""
    if "env_config" not in text:
        return text
    given = experiment.config.get("env_config")
    config_class = type(algorithm_class(experiment.run, experiment.name).get_default_config())
    if not issubclass(config_class, TabledConfig) or not isinstance(given, Mapping | None):
        return text
    rows, places = table(config_class), sections_of(config_class)

    def name(match: re.Match[str]) -> str:
        row = rows.get(match[2])
        before = text[: match.start()]
        in_evaluation = before.endswith("evaluation_config.") or "eval_envs." in before
        if row is None or row.place != IN_ENV or in_evaluation or match[2] in (given or {}):
            return match[0]
        return f"{match[1]}{places[row.name]}.{row.in_section}"

    text = re.sub(r"\benv_config\['(\w+)'\]", r"env_config.\1", text)
    text = re.sub(r"\benv_config\.()(\w+)", name, text)
    text = re.sub(r"\benv_config of (\S+ unknown key ')(\w+)", name, text)
    return text if given else re.sub(r"^((?:[\w.]+: )?)env_config: ", r"\1", text)


def examine_experiment(experiment: Experiment) -> tuple[list[Reservation], Stage | None]:
    """As `check_experiment`, with complaints as `rllib_llm.shared.errors` has them; also the stage
    of the first point of the grid, if its algorithm is ours."""
    name = experiment.name
    algo_class = algorithm_class(experiment.run, name)
    with noted():
        make_scheduler(experiment)
    with noted():
        make_searcher(experiment)
    with noted():
        if experiment.restore is not None and "${" not in experiment.restore:
            restore_source(experiment.restore, algo_class, f"{name}.restore", experiment.stop)
    with noted():
        checkpoint_settings(experiment)
    ours = is_ours(experiment.run, algo_class)
    _check_counters(experiment)
    if ours:
        _check_results(experiment)
    reserved: list[Reservation] = []
    stages: list[Stage | None] = []
    read: set[str] = set()
    for settings in examples(search_space(experiment)):
        config = build_config(algo_class, settings, f"{name}.config", KEYS)
        with noted():
            check_env(config, algo_class)
            if not stages:
                stages.append(stage_of(experiment, config))
        with noted():
            is_there = ours and check_sources(settings, f"{name}.config")
            if is_there and data_settings(settings) not in read:
                read.add(data_settings(settings))
                check_data(config, f"{name}.config")
        one = Reservation.of(algo_class.default_resource_request(config), config)
        if one not in reserved:
            reserved.append(one)
    return reserved, next(iter(stages), None)


def is_ours(run: str, algo_class: type) -> bool:
    """True for an algorithm of this package, or one built on it: its settings mean what we know."""
    from rllib_llm.algorithms.language_model import LanguageModelAlgorithm

    return run in ALGORITHMS or issubclass(algo_class, LanguageModelAlgorithm)


def _check_counters(experiment: Experiment) -> None:
    for key in COUNTERS:
        limit = experiment.stop.get(key, 1)
        require(
            limit > 0, f"{experiment.name}.stop.{key}", limit, "above 0",
            "a trial ends when its count reaches it", "Raise it, or drop the experiment",
        )  # fmt: skip


def _check_results(experiment: Experiment) -> None:
    """Complain of results that no trial reports: Tune refuses a metric only after an iteration,
    waits for ever for a limit that RLlib reports as 0, and a pass criterion is found missed at the
    end. Code of the user's own may report more than we know: there it is a warning."""
    name, run, is_certain = experiment.name, experiment.run, not _may_report_more(experiment)
    for where, key, use in _named_results(experiment):
        known, others = is_reported(key), reporters(key)
        hint = _meant_counter(key, known or not is_certain) if where == "stop" else ""
        if hint:
            text = f"{name}.stop: unknown result {key!r}: no trial reports it. {hint}"
            complain(Problems(text))
            continue
        rule, typical = f"be a result of {run}", TYPICAL.get(run, "training_iteration")
        remedy = f"Name one that {run} reports, such as {typical!r}"
        if not known:
            why, like = "no trial reports it", result_like(key, run if is_certain else "")
            remedy = like if like.startswith("Did you mean") else remedy
        elif is_certain and not may_report(run, key):
            why = f"of our algorithms only {' and '.join(sorted(others or ()))} report it"
        elif is_certain and is_held_out(key) and not _may_evaluate(experiment):
            rule, why = "come with an evaluation_interval", "without one nothing is evaluated"
            remedy = f"Set evaluation_interval: 10, or name another result, such as {typical!r}"
        elif run in ALGORITHMS and run not in (others or ALGORITHMS):
            why = ""  # an environment may have a metric of that name
        else:
            continue
        if is_certain and why:
            complain(Problems(f"{name}.{where}", rule, f"{use}, and {why}", remedy, key))
        else:
            found = warning(
                f"{name}.{where}", rule, "unless code of yours reports it, nothing ever happens by "
                "it, or, by a metric, the trials end after an iteration", remedy, key,
            )  # fmt: skip
            warnings.warn(SettingWarning(found), stacklevel=2)


def _meant_counter(key: str, is_known: bool) -> str:
    """Returns what to write in place of a limit that no trial reports; "" for one that trials
    may."""
    near = difflib.get_close_matches(key, USUAL_COUNTERS if is_known else COUNTERS, 1, cutoff=0.85)
    if key in COUNTERS or is_known and not near:
        return ""
    if "reward" in key:
        return "The mean reward is 'objective/scores'."
    return f"Did you mean {near[0]!r}?" if near else f"Count by {' or '.join(COUNTERS[:2])}."


def _named_results(experiment: Experiment) -> Iterator[tuple[str, str, str]]:
    """Settings that name results, each with the name of one and its use."""
    for key in experiment.stop:
        yield "stop", key, "no trial would end by it"
    if experiment.metric is not None:
        yield "metric", experiment.metric, "trials are compared by it"
    for where in ("scheduler_config", "search_config"):
        if isinstance(metric := getattr(experiment, where).get("metric"), str):
            yield f"{where}.metric", metric, "trials are compared by it"
    attribute = "checkpoint_score_attribute"
    if isinstance(score := experiment.checkpoint_config.get(attribute), str):
        yield f"checkpoint_config.{attribute}", score, "checkpoints are kept by it"
    for key in experiment.pass_criteria:
        yield "pass_criteria", key, "it could never be met"


def _may_evaluate(experiment: Experiment) -> bool:
    """Whether trials may have an evaluation: a search space may give them one."""
    default = algorithm_class(experiment.run, experiment.name).get_default_config()
    usual = getattr(default, "evaluation_interval", None)
    return bool(search_space(experiment).get("evaluation_interval", usual))


# Settings that name code which may report results of any name.
OWN_CODE = (
    "callbacks", "learner_class", "_learner_class", "env_runner_cls", "custom_evaluation_function",
)  # fmt: skip


def _may_report_more(experiment: Experiment) -> bool:
    """Whether code of the user's own may report results that we do not know."""
    if experiment.run not in ALGORITHMS:
        return True
    return any(str(key).startswith(OWN_CODE) for key in search_space(experiment))


def checkpoint_settings(experiment: Experiment) -> Any:
    """Return Tune's `CheckpointConfig`; a checkpoint at the end is on unless switched off.

    Of checkpoints by time two are kept, where no scheduler copies them from trial to trial.

    Raises:
        ValueError: a setting that Tune refuses.
    """
    from ray.tune import CheckpointConfig

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
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    from rllib_llm.algorithms.language_model import LanguageModelAlgorithm
    from rllib_llm.envs.registry import (
        ENVIRONMENTS,
        check_arguments,
        check_batched,
        default_settings,
        register_user_env,
    )

    env = getattr(config, "env", None)
    is_of_rllib = isinstance(config, AlgorithmConfig) and not isinstance(config, TabledConfig)
    if env is None and is_of_rllib and config.observation_space is None:
        raise Problems(
            "env", "be a gymnasium id, a registered name or a dotted path",
            "an algorithm of RLlib learns in it", "Write `env: CartPole-v1` beside `run:`",
        )  # fmt: skip
    if not isinstance(env, str):
        return
    if env in ENVIRONMENTS:
        from rllib_llm.envs.rlhf import with_defaults

        with_defaults(config.env_config, default_settings(env), env_id=env)
    elif issubclass(algo_class, LanguageModelAlgorithm):
        check_arguments(env, config.env_config)
        check_batched(env)
    elif not register_user_env(env):
        _check_stock_env(env)


def _check_stock_env(env: str) -> None:
    import gymnasium

    from rllib_llm.shared.dotted import looks_dotted
    from rllib_llm.shared.ray_compat import registered_env

    known = env in gymnasium.registry or registered_env(env) is not None
    if known or ":" in env or looks_dotted(env):
        return
    raise Problems(
        "env", "be a gymnasium id, a registered name or a dotted path", "it is none of these",
        suggestion(env, gymnasium.registry), env,
    )  # fmt: skip


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
        if amount > cluster.get(name, 0.0):
            raise Problems(
                f"one trial reserves {amount:g} {name}{'s' if amount != 1 else ''} and",
                f"fit into Ray's {cluster.get(name, 0.0):g}", "it would wait for ever",
                f"Give Ray more (--ray-num-{name.lower()}s, a bigger cluster), or lower "
                f"num_env_runners, num_learners or the {name}s of each",
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
        model_bytes = _folder_bytes(model_of(experiment.config))
        needed += model_bytes * CHECKPOINT_SHARES * _num_checkpoints(experiment)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free if free is None else free
    if free < needed:
        raise Problems(
            "storage_path", f"have about {_gigabytes(needed)} free for the checkpoints",
            f"{_gigabytes(free)} are", "Free some, choose another disk with --storage-path, or "
            "keep fewer with --keep-checkpoints-num", str(folder),
        )  # fmt: skip


def num_trials(experiment: Experiment) -> int:
    """Return how many trials the experiment's search has in all."""
    return experiment.num_samples * len(examples(search_space(experiment)))


def _num_checkpoints(experiment: Experiment) -> int:
    """Return how many checkpoints the experiment's trials keep at least, together."""
    space = search_space(experiment)
    settings = checkpoint_settings(experiment)
    defaults = algorithm_class(experiment.run, experiment.name).get_default_config()
    iterations = planned_iterations(experiment.stop, defaults, space) or 0
    frequency = settings.checkpoint_frequency
    made = 1 + (iterations // frequency if frequency else 0)
    return num_trials(experiment) * min(made, settings.num_to_keep or made)


def _folder_bytes(model: Any) -> int:
    if not isinstance(model, str) or not Path(model).expanduser().is_dir():
        return 0
    folder = Path(model).expanduser()
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1024**3:.2f} GiB"
