"""Checks of experiments before anything runs: configs, names, data, resources."""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_llm.algorithms.places import Reservation, check_nodes, total_of
from rllib_llm.algorithms.registry import ALGORITHMS
from rllib_llm.checkpoints.algorithm import restore_source
from rllib_llm.config.schema import build_config
from rllib_llm.config.sections import sections_of, table
from rllib_llm.config.setting import IN_ENV
from rllib_llm.config.tabled_config import TabledConfig
from rllib_llm.runs.doctor.data_rules import check_data, check_sources, data_settings
from rllib_llm.runs.experiments import KEYS, Experiment, algorithm_class, model_of, with_stand_ins
from rllib_llm.runs.metrics import (
    COUNTERS,
    TYPICAL,
    USUAL_COUNTERS,
    describes,
    is_held_out,
    is_reported,
    may_report,
    reporters,
    result_like,
)
from rllib_llm.runs.search_space import examples, make_scheduler, make_searcher, search_space
from rllib_llm.shared.errors import UserError, all_complaints, complain, noted, suggestion
from rllib_llm.shared.storage import Place

INTERVAL = "checkpoint_interval_s"  # of `checkpoint_config`: ours, not Tune's
NUM_TO_KEEP = 2  # by default, beside the best one


def check_experiments(experiments: list[Experiment]) -> list[Reservation]:
    """Validate every experiment; return what one trial of each point of their grids reserves.

    What a later stage takes from an earlier one does not exist yet. For the check, the earlier
    stage's own `model` stands in for it: the same architecture and tokenizer.

    Raises:
        UserError: all that is wrong, with the experiments' names.
    """
    reserved: list[Reservation] = []
    complaints: list[str] = []
    for experiment in with_stand_ins(experiments):
        try:
            reserved += check_experiment(experiment)
        except UserError as error:
            complaints.append(str(error))
    if complaints:
        raise UserError("\n".join(complaints))
    return reserved


def check_experiment(experiment: Experiment) -> list[Reservation]:
    """Validate one experiment, every point of its grid, and return what one trial of each point
    reserves.

    Raises:
        UserError: all that is wrong, a line each, with the experiment's name.
    """
    with all_complaints() as errors:
        reserved = examine_experiment(experiment)
    if errors:
        texts = (_named(as_written(str(e), experiment), experiment.name) for e in errors)
        raise UserError("\n".join(texts)) from errors[0]
    return reserved


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


def _named(text: str, name: str) -> str:
    return text if text.startswith(name) else f"{name}: {text}"


def examine_experiment(experiment: Experiment) -> list[Reservation]:
    """As `check_experiment`, with complaints as `rllib_llm.shared.errors` has them."""
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
        _check_stop(experiment)
        _check_names(experiment)
    reserved: list[Reservation] = []
    read: set[str] = set()
    for settings in examples(search_space(experiment)):
        config = build_config(algo_class, settings, f"{name}.config", KEYS)
        with noted():
            check_env(config, algo_class)
        with noted():
            is_there = ours and check_sources(settings, f"{name}.config")
            if is_there and data_settings(settings) not in read:
                read.add(data_settings(settings))
                check_data(config, f"{name}.config")
        one = Reservation.of(algo_class.default_resource_request(config), config)
        if one not in reserved:
            reserved.append(one)
    return reserved


def is_ours(run: str, algo_class: type) -> bool:
    """True for an algorithm of this package, or one built on it: its settings mean what we know."""
    from rllib_llm.algorithms.language_model import LanguageModelAlgorithm

    return run in ALGORITHMS or issubclass(algo_class, LanguageModelAlgorithm)


def _check_counters(experiment: Experiment) -> None:
    for key in COUNTERS:
        limit = experiment.stop.get(key, 1)
        if limit <= 0:
            complain(
                UserError(
                    name=f"{experiment.name}.stop.{key}",
                    value=limit,
                    rule="be above 0",
                    reason="a trial ends when its count reaches it",
                    remedy="Raise it, or drop the experiment",
                )
            )


def _check_stop(experiment: Experiment) -> None:
    """Tune refuses a result that is not there only after an iteration, and waits for ever for one
    that RLlib reports as 0. Code of the user's own may report more than we know."""
    for key in experiment.stop:
        known = describes(key) or _may_report_more(experiment)
        meant = USUAL_COUNTERS if known else COUNTERS
        near = difflib.get_close_matches(key, meant, n=1, cutoff=0.85)
        if key not in COUNTERS and (near or not known):
            hint = (
                f"Did you mean {near[0]!r}?" if near else f"Count by {' or '.join(COUNTERS[:2])}."
            )
            complain(
                UserError(
                    f"{experiment.name}.stop: unknown result {key!r}: no trial reports it. {hint}"
                )
            )
        else:
            _check_reported(experiment, "stop", key, "no trial would end by it")


def _check_names(experiment: Experiment) -> None:
    """Tune refuses a metric that no trial reports only after an iteration, and a pass criterion
    that none reports is found missed only at the end."""
    for where, key, reason in _compared(experiment):
        if is_reported(key):
            _check_reported(experiment, where, key, reason)
        elif not _may_report_more(experiment):
            remedy = result_like(key, experiment.run)
            if not remedy.startswith("Did you mean"):
                remedy = _such_as(experiment.run)
            complain(
                UserError(
                    name=f"{experiment.name}.{where}",
                    value=key,
                    rule=f"be a result of {experiment.run}",
                    reason=f"{reason}, and no trial reports it",
                    remedy=remedy,
                )
            )
    for key in experiment.pass_criteria:
        if is_reported(key):
            _check_reported(experiment, "pass_criteria", key, "it could never be met")


def _compared(experiment: Experiment) -> Iterator[tuple[str, str, str]]:
    """Settings that name the result by which trials or checkpoints are compared, each with that
    name and its use."""
    if experiment.metric is not None:
        yield "metric", experiment.metric, "trials are compared by it"
    for where in ("scheduler_config", "search_config"):
        if isinstance(key := getattr(experiment, where).get("metric"), str):
            yield f"{where}.metric", key, "trials are compared by it"
    score = "checkpoint_score_attribute"
    if isinstance(key := experiment.checkpoint_config.get(score), str):
        yield f"checkpoint_config.{score}", key, "checkpoints are kept by it"


def _check_reported(experiment: Experiment, where: str, key: str, reason: str) -> None:
    """Complain of a known result that this algorithm, with these settings, never reports."""
    run = experiment.run
    if _may_report_more(experiment):
        return
    name = f"{experiment.name}.{where}"
    if not may_report(run, key):
        others = " and ".join(sorted(reporters(key) or ()))
        complain(
            UserError(
                name=name,
                value=key,
                rule=f"be a result of {run}",
                reason=f"{reason}, and of our algorithms only {others} report it",
                remedy=_such_as(run),
            )
        )
    elif is_held_out(key) and not _may_evaluate(experiment):
        complain(
            UserError(
                name=name,
                value=key,
                rule="come with an evaluation_interval",
                reason=f"{reason}, and without one nothing is evaluated",
                remedy=f"Set evaluation_interval: 10, or name another result, such as "
                f"{TYPICAL[run]!r}",
            )
        )


def _such_as(run: str) -> str:
    return f"Name one that {run} reports, such as {TYPICAL[run]!r}"


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
        check_batched,
        creator,
        default_settings,
        register_user_env,
    )

    env = getattr(config, "env", None)
    is_of_rllib = isinstance(config, AlgorithmConfig) and not isinstance(config, TabledConfig)
    if env is None and is_of_rllib and config.observation_space is None:
        raise UserError(
            name="env",
            rule="be a gymnasium id, a registered name or a dotted path",
            reason="an algorithm of RLlib learns in it",
            remedy="Write `env: CartPole-v1` beside `run:`",
        )
    if not isinstance(env, str):
        return
    if env in ENVIRONMENTS:
        from rllib_llm.envs.rlhf import with_defaults

        with_defaults(config.env_config, default_settings(env), env_id=env)
    elif issubclass(algo_class, LanguageModelAlgorithm):
        creator(env)
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
    raise UserError(
        name="env",
        value=env,
        rule="be a gymnasium id, a registered name or a dotted path",
        reason="it is none of these",
        remedy=suggestion(env, gymnasium.registry),
    )


# A checkpoint holds weights and Adam's two moments; a fourth share is for critic and model folder.
CHECKPOINT_SHARES = 4
LEAST_FREE_BYTES = 100 * 1024**2


def check_resources(reservation: Reservation, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that the cluster's nodes can hold one trial, which would otherwise wait for ever.

    Raises:
        UserError: they cannot.
    """
    cluster = total_of(nodes)
    for name, amount in reservation.totals.items():
        if amount > cluster.get(name, 0.0):
            raise UserError(
                name=f"one trial reserves {amount:g} {name}s and",
                rule=f"fit into Ray's {cluster.get(name, 0.0):g}",
                reason="it would wait for ever",
                remedy=f"Give Ray more (--ray-num-{name.lower()}s, a bigger cluster), or lower "
                f"num_env_runners, num_learners or num_{name.lower()}s_per_..",
            )
    check_nodes(reservation, nodes)


def check_disk(experiments: list[Experiment], folder: Place, free: int | None = None) -> None:
    """Check that the disk of `folder` has room for the experiments' checkpoints; a URL has no end.

    Models that are not local folders are of unknown size and count as small. `free`: its free
    bytes, where they are known.

    Raises:
        UserError: there is too little.
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
        raise UserError(
            name="storage_path",
            value=str(folder),
            rule=f"have about {_gigabytes(needed)} free for the checkpoints",
            reason=f"{_gigabytes(free)} are",
            remedy="Free some, choose another disk with --storage-path, or keep fewer with "
            "--keep-checkpoints-num",
        )


def _num_checkpoints(experiment: Experiment) -> int:
    """Return the number of checkpoints that one trial keeps, if the experiment sets it."""
    settings = experiment.checkpoint_config
    frequency = settings.get("checkpoint_frequency") or 0
    iterations = experiment.stop.get("training_iteration", 0)
    made = 1 + (int(iterations) // frequency if frequency else 0)
    return min(made, settings.get("num_to_keep") or made)


def _folder_bytes(model: Any) -> int:
    if not isinstance(model, str) or not Path(model).expanduser().is_dir():
        return 0
    folder = Path(model).expanduser()
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1024**3:.2f} GiB"
