"""Everything the doctor looks at, in order: the machine, each experiment, and, if asked, models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rllib_llm.envs.judges.reward_functions import RewardError
from rllib_llm.runs.doctor.data_rules import data_rules
from rllib_llm.runs.doctor.installation import installation_rules
from rllib_llm.runs.doctor.machine_rules import Machine, machine_rules, memory_rules
from rllib_llm.runs.doctor.model_rules import model_rules, plan_rules
from rllib_llm.runs.doctor.reward_rules import reward_rules
from rllib_llm.runs.doctor.stage import Finding, Stage, distinct, make_stage
from rllib_llm.runs.experiment import Experiment
from rllib_llm.shared.errors import UserError, all_complaints

# Which area a setting's complaint belongs to; the others are "settings".
AREAS = {
    **dict.fromkeys(
        ("data", "eval_data", "prompts", "eval_prompts", "ptx_data", "prompt", "prompt_column",
         "eval_fraction", "column", "prompt_overflow", "messages", "normalization_data"), "data",
    ),
    **dict.fromkeys(
        ("model", "critic_model", "reward_model", "reference", "tokenizer", "truncated",
         "max_prompt_len", "pretrained_model", "chat_template"), "model",
    ),
    **dict.fromkeys(("reward_functions", "rewards"), "rewards"),
    **dict.fromkeys(
        ("run", "restore", "scheduler", "scheduler_config", "search_alg", "search_config",
         "metric", "num_to_keep", "checkpoint_at_end", "storage_path"), "experiment",
    ),
}  # fmt: skip


def examine(
    experiments: list[Experiment],
    machine: Machine,
    *,
    folder: Path | None = None,
    is_here: bool = True,
) -> list[Finding]:
    """Findings about the machine and the experiments, errors first, without loading a model.

    Args:
        folder: where results will go, for the disk.
        is_here: Ray will be started on this machine.
    """
    from rllib_llm.runs.plan import check_disk
    from rllib_llm.runs.yaml_experiments import with_stand_ins

    found = list(installation_rules(machine.versions))
    try:
        filled = with_stand_ins(experiments)
    except ValueError as error:
        return distinct([*found, Finding.from_error(error, "experiment")])
    for experiment in filled:
        found += [
            f if f.where else f.at(experiment.name)
            for f in examine_experiment(experiment, machine, is_here)
        ]
    if folder is not None:
        try:
            check_disk(experiments, folder, free=machine.disk_bytes)
        except ValueError as error:
            found.append(Finding.from_error(error, "disk"))
    return distinct(found)


def examine_experiment(
    experiment: Experiment, machine: Machine, is_here: bool = True
) -> Iterator[Finding]:
    """Findings about one experiment: first by the rules that `rllib train` enforces; if none is
    broken, by all others."""
    from rllib_llm.runs import plan
    from rllib_llm.runs.yaml_experiments import StandIn, model_of

    name = experiment.name
    # A stand-in that is wrong is reported for the experiment that names it.
    foreign = "model" if isinstance(model_of(experiment.config), StandIn) else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        with all_complaints() as errors:
            plan.examine_experiment(experiment)
    for error in errors:
        finding = Finding.from_error(error, "settings", name)
        subject = finding.id.partition(".")[2]
        if subject == foreign:
            continue
        area = "rewards" if isinstance(error, RewardError) else AREAS.get(subject, "settings")
        yield replace(finding, id=f"{area}.{subject}")
    for warning in said:
        if issubclass(warning.category, UserWarning):
            yield Finding.from_warning(warning.message)
    if errors:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stage = make_stage(experiment)
        if stage is not None:
            yield from stage_rules(stage, machine, is_here)


def stage_rules(stage: Stage, machine: Machine, is_here: bool = True) -> Iterator[Finding]:
    """Findings about a stage with valid settings."""
    yield from plan_rules(stage)
    yield from model_rules(stage)
    yield from memory_rules(stage, machine)
    yield from machine_rules(stage, machine, is_here=is_here)
    yield from data_rules(stage)
    if stage.is_rlhf:
        yield from reward_rules(stage)


def before_a_run(experiments: list[Experiment]) -> None:
    """The checks of `rllib train` before a run: errors found by the rules for plans, models and
    data in experiments with valid settings; warnings are printed. Reward functions are not called,
    and the machine, which may be another, is not checked.

    Raises:
        UserError: the errors, a line each.
    """
    from rllib_llm.runs.yaml_experiments import with_stand_ins

    errors = []
    for experiment in with_stand_ins(experiments):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stage = make_stage(experiment)
            rules = (plan_rules, model_rules, data_rules) if stage is not None else ()
            found = distinct(finding for rule in rules for finding in rule(stage))  # type: ignore[arg-type]
        for finding in found:
            text = finding.at(experiment.name).text()
            if finding.severity == "error":
                errors.append(text)
            else:
                warnings.warn(text, stacklevel=2)
    if errors:
        raise UserError("\n".join(errors))
