"""One experiment: what each of its keys may be, and what refers to other experiments,
`${name.model}`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from rllib_llm.shared.errors import Problem, Problems, report, require, unknown_key
from rllib_llm.shared.setting import OF_EXPERIMENT, Section, Settings, setting

if TYPE_CHECKING:
    from ray.tune import Trainable

LIMITS = ("stop", "pass_criteria")  # of results
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


class Checkpoints(Settings):
    """When checkpoints are saved and which are kept: arguments of `ray.tune.CheckpointConfig`."""

    checkpoint_interval_s: float | Literal["auto"] | None = setting(
        "auto", "the seconds between checkpoints: 300 without checkpoint_frequency", least=0
    )
    checkpoint_frequency: int = setting(
        0, "the iterations between checkpoints; 0: none between", least=0,
        remedy="Write `checkpoint_frequency: 10`",
    )  # fmt: skip
    checkpoint_at_end: bool = setting(True, "whether one is saved at the end")
    num_to_keep: int | None = setting(
        None, "how many checkpoints a trial keeps; null: all", least=1
    )
    checkpoint_score_attribute: str | None = setting(
        None, "the result by which checkpoints are kept"
    )
    checkpoint_score_order: Literal["max", "min"] = setting(
        "max", "which way that result improves: max or min"
    )


class Experiment(Settings):
    """One experiment; the fields are the keys that YAML may use, `name` being the key it stands
    under.

    Raises:
        Problems: what cannot be, all of it at once.
    """

    name: str = setting(..., "the key it stands under")
    run: str = setting(..., "the algorithm's name or dotted path", remedy="Write `run: GRPO`")
    env: str | Callable | None = setting(
        None, "a registered environment's name or a dotted path",
        remedy="Write `env: rllib_llm/RLHF-v0`",
    )  # fmt: skip
    config: dict[str, Any] = setting({}, "the algorithm's settings, with search spaces")
    stop: dict[str, Any] = setting({}, "the results at which a trial ends")
    num_samples: int = setting(
        1, "how often the search space is sampled", least=1, remedy="Write `num_samples: 4`"
    )
    checkpoint_config: dict[str, Any] = setting(
        {}, "when checkpoints are saved: by default from time to time and at the end"
    )
    storage_path: str | None = setting(None, "where results go, unless --storage-path says it")
    restore: str | None = setting(None, "the checkpoint from which the trials start")
    max_failures: int = setting(
        0, "how often a failed trial goes on from its last checkpoint; -1: always", least=-1,
        remedy="Write `max_failures: 2`",
    )  # fmt: skip
    time_budget_s: float | None = setting(
        None, "the seconds after which the experiment ends", above=0,
        remedy="Write `time_budget_s: 3600`",
    )  # fmt: skip
    metric: str | None = setting(
        None, "the result that search and schedulers improve, and by which `${name.model}` is the "
        "best of several trials'", remedy="Write `metric: objective/scores`",
    )  # fmt: skip
    mode: Literal["max", "min"] | None = setting(None, "which way the metric improves: max or min")
    scheduler: str | None = setting(
        None, "a Tune scheduler's name: asha, pbt, ...", remedy="Write `scheduler: asha`"
    )
    scheduler_config: dict[str, Any] = setting({}, "the scheduler's arguments")
    search_alg: str | None = setting(
        None, "a Tune searcher's name: optuna, ...", remedy="Write `search_alg: optuna`"
    )
    search_config: dict[str, Any] = setting({}, "the searcher's arguments")
    max_concurrent_trials: int | None = setting(
        None, "how many trials run at once", least=0, remedy="Write `max_concurrent_trials: 2`"
    )
    pass_criteria: dict[str, Any] = setting(
        {}, "the least values of the last result that count as a pass"
    )
    trackers: list[str] = setting(
        [], "experiment trackers that get every result: wandb, mlflow, tensorboard, trackio",
        remedy="Write `trackers: [wandb]`",
    )  # fmt: skip
    description: str = setting(
        "", "what the experiment does, for readers of the file", may_be_empty=True
    )

    def __init__(
        self, name: str, run: Any = None, env: Any = None, config: Any = None, **settings: Any
    ):
        given = {"name": name, "run": run, "env": env, "config": config, **settings}
        given = {key: value for key, value in given.items() if value is not None}
        problems = _problems(EXPERIMENT, given, name)
        if run is None and not any("'run'" in problem.remedy for problem in problems):
            what = "it names the algorithm"
            problems.append(Problem(f"{name}.run", "be set", what, "Write `run: GRPO`"))
        report(problems)
        super().__init__(**given)
        require(not self.mode or self.metric, f"{name}.mode", self.mode, "come with a metric",
                "it says which way the metric improves, and there is none",
                "Write `metric: objective/scores`, or drop it")  # fmt: skip

    def replace(self, **changes: Any) -> Experiment:
        """Return the experiment with `changes`, checked as a new one."""
        return Experiment(**{**vars(self), **changes})


CHECKPOINTS = Section.of("checkpoint_config", Checkpoints, place=OF_EXPERIMENT)
EXPERIMENT = Section.of("experiment", Experiment, place=OF_EXPERIMENT)
KEYS = tuple(row.name for row in EXPERIMENT.settings if row.name != "name")


def _problems(section: Section, given: Mapping[str, Any], where: str) -> list[Problem]:
    """The problems of settings; limits of results are numbers."""
    from rllib_llm.algorithms.language_model_config import LanguageModelConfig

    rows = {row.name: row for row in section.settings}
    found = []
    for key, value in given.items():
        if key not in rows:
            known, hint = list(rows), ""
            if section is EXPERIMENT:
                known = list(KEYS)
                if key in MOVED:
                    hint = f"It is {MOVED[key]!r} here."
                elif LanguageModelConfig.algorithms_with(key):
                    hint = "It is the algorithm's: write it below `config:`."
            found.append(unknown_key(where, key, known, hint))
        elif (error := rows[key].problem(value, place=where)) is not None:
            if isinstance(rows[key].default, dict) and not isinstance(value, dict):
                error = dataclasses.replace(error, remedy=f"Write `{key}: {{name: value}}`")
            found.append(error)
        elif key == "checkpoint_config":
            found += _problems(CHECKPOINTS, value, f"{where}.{key}")
        for name, limit in value.items() if key in LIMITS and isinstance(value, dict) else ():
            remedy = f"Write `{name}: 100`"
            if isinstance(limit, Mapping) and len(limit) == 1:
                ((inner, inner_value),) = limit.items()
                remedy = f"Write `{name}/{inner}: {inner_value}`"
            row = dataclasses.replace(rows[key], name=name, type=float, remedy=remedy)
            if (error := row.problem(limit, place=f"{where}.{key}")) is not None:
                found.append(error)
    return found


def algorithm_class(name: str, where: str) -> type[Trainable]:
    """Return the algorithm called `name`: a registered name or a dotted path to a class.

    It is an Algorithm of RLlib, or another Trainable of Tune with a `get_default_config()`.

    Raises:
        Problems: nothing of that name; the message has the nearest ones.
    """
    from ray.tune import Trainable

    from rllib_llm.algorithms.registry import get_algorithm_class

    found = get_algorithm_class(name)
    is_trainable = isinstance(found, type) and issubclass(found, Trainable)
    require(is_trainable and hasattr(found, "get_default_config"), f"{where}.run", name,
            "be an RLlib Algorithm or another Tune Trainable", f"it is {found!r}",
            "Check the path")  # fmt: skip
    return found


REFERENCE = re.compile(r"\$\{([^}]*)\}")


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
    require("${" not in REFERENCE.sub("", value), where, value, "close every ${ with }",
            "a reference ends there", "Write the missing }")  # fmt: skip
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


class StandIn(str):
    """The model that an earlier experiment starts from, in place of the one that it will make.

    made_by: the experiment.
    chat_template: that is saved with the model, where an experiment on the way to it sets one.
    """

    made_by: Experiment
    chat_template: str | None


def with_stand_ins(experiments: list[Experiment]) -> list[Experiment]:
    """Return the experiments with `${name.model}` replaced by the model that `name` starts from.

    Raises:
        Problems: an experiment uses another's result that will not be saved.
    """
    by_name = {experiment.name: experiment for experiment in experiments}
    stand_ins: dict[str, Any] = {}
    filled = []
    for experiment in experiments:
        for name, product in references(vars(experiment)):
            _check_leaves(by_name[name], product, experiment.name)
        config = substitute(
            experiment.config, lambda ref, _: stand_ins.get(ref, f"${{{ref}}}"), experiment.name
        )
        model = model_of(config)
        if isinstance(model, str):
            stand_in = stand_ins[f"{experiment.name}.model"] = StandIn(model)
            stand_in.made_by = experiment
            inherited = getattr(model, "chat_template", None)
            stand_in.chat_template = model_of(config, "chat_template") or inherited
        filled.append(experiment.replace(config=config))
    return filled


def _check_leaves(experiment: Experiment, product: str, user: str) -> None:
    """Raises Problems where an experiment will not leave what `user` takes of it."""
    name, run, reference = experiment.name, experiment.run, f"${{{experiment.name}.{product}}}"
    found, why = algorithm_class(run, name), f"{user!r} uses {reference}"
    if product == "model" and found.__module__.startswith("ray."):
        raise Problems(
            reference, "be of an experiment that trains a language model",
            f"{name}.run={run!r} is RLlib's own and leaves none", "Name another experiment",
        ).within(user)  # fmt: skip
    if product != "rollouts":
        saves = experiment.checkpoint_config.get("checkpoint_at_end") is not False
        require(saves, f"{name}.checkpoint_config.checkpoint_at_end", False, "be true", why,
                "Drop the key")  # fmt: skip
        return
    from rllib_llm.algorithms.rlhf import RLHF  # which few need

    if not issubclass(found, RLHF):
        raise Problems(
            reference, "be of an experiment that samples", f"{name}.run={run!r} does not",
            "Name one of GRPO, PPOPtx, ..",
        ).within(user)  # fmt: skip
    section = experiment.config.get("rollouts")
    section = section if isinstance(section, dict) else {}
    kept = experiment.config.get("store_rollouts", section.get("store", True))
    require(kept is not False, f"{name}.config.store_rollouts", False, "be true", why,
            "Drop the key")  # fmt: skip


def model_of(config: Mapping[str, Any], name: str = "model") -> Any:
    """The experiment's starting model, or another setting of the section `language_model`, wherever
    the config has it."""
    section = config.get("language_model")
    return config.get(name) or (section.get(name) if isinstance(section, dict) else None)
