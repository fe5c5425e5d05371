"""Everything the doctor looks at, in order: the machine, each experiment, and, if asked, models and
two iterations with all their measurements.
"""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rllib_llm.algorithms.language_model_config import decided
from rllib_llm.algorithms.places import Reservation
from rllib_llm.data.encoding import render_chat
from rllib_llm.envs.judges.reward_functions import RewardError
from rllib_llm.runs import plan
from rllib_llm.runs.doctor.data_rules import data_rules
from rllib_llm.runs.doctor.machine_rules import (
    Machine,
    installation_rules,
    machine_rules,
    memory_rules,
)
from rllib_llm.runs.doctor.model_rules import model_rules, plan_rules, turn_rules
from rllib_llm.runs.doctor.reward_rules import answer_scores, reward_rules
from rllib_llm.runs.doctor.stage import Finding, Stage, distinct
from rllib_llm.runs.experiments import Experiment, StandIn, model_of, with_stand_ins
from rllib_llm.runs.run_folder import check_writable
from rllib_llm.shared.errors import SettingError, all_complaints
from rllib_llm.shared.storage import Place

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
         "metric", "num_to_keep", "checkpoint_at_end", "checkpoint_score_attribute", "stop",
         "pass_criteria", "storage_path"), "experiment",
    ),
}  # fmt: skip


def examine(
    experiments: list[Experiment],
    machine: Machine,
    *,
    folder: Place | None = None,
    is_here: bool = True,
) -> list[Finding]:
    """Findings about the machine and the experiments, errors first, without loading a model.

    Args:
        folder: where results will go, for the disk.
        is_here: Ray will be started on this machine.
    """
    found = list(installation_rules(machine.versions))
    try:
        filled = with_stand_ins(experiments)
    except ValueError as error:
        return distinct([*found, *Finding.from_errors(error, "experiment")])
    for experiment in filled:
        found += [
            f if f.where else f.at(experiment.name)
            for f in examine_experiment(experiment, machine, is_here)
        ]
    if folder is not None:
        try:
            check_writable(folder)
            if not any(finding.severity == "error" for finding in found):
                plan.check_disk(experiments, folder, free=machine.disk_bytes)
        except ValueError as error:
            found += Finding.from_errors(error, "disk")
    return distinct(found)


def examine_experiment(
    experiment: Experiment, machine: Machine, is_here: bool = True
) -> Iterator[Finding]:
    """Findings about one experiment: first by the rules that `rllib train` enforces; if none is
    broken, by all others."""
    name = experiment.name
    # A stand-in that is wrong is reported for the experiment that names it.
    foreign = "model" if isinstance(model_of(experiment.config), StandIn) else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        with all_complaints() as errors:
            _, stage = plan.examine_experiment(experiment)
    for error in errors:
        finding = Finding.from_error(error, "settings", name)
        subject = finding.id.partition(".")[2]
        if subject == foreign:
            continue
        area = "rewards" if isinstance(error, RewardError) else AREAS.get(subject, "settings")
        found = plan.as_written(finding.found, experiment)
        yield replace(finding, id=f"{area}.{subject}", found=found)
    # A warning about a setting that was refused judges the default in its place.
    refused = [error.subject for error in errors if isinstance(error, SettingError)]
    for warning in said:
        finding = Finding.from_warning(warning.message)
        follows = any(re.search(rf"\b{name}=", finding.found) for name in refused if name)
        if issubclass(warning.category, UserWarning) and not follows:
            yield finding
    if not errors and stage is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield from stage_rules(stage, machine, is_here)


def stage_rules(stage: Stage, machine: Machine, is_here: bool = True) -> Iterator[Finding]:
    """Findings about a stage with valid settings."""
    yield from plan_rules(stage)
    yield from model_rules(stage)
    yield from memory_rules(stage, machine)
    yield from machine_rules(stage, machine, is_here=is_here)
    yield from data_rules(stage)
    if stage.is_rlhf:
        yield from turn_rules(stage)
        yield from reward_rules(stage)


def before_a_run(experiments: list[Experiment]) -> list[Reservation]:
    """The checks of `rllib train` before a run: those of `plan`, and where no setting is refused
    the rules for plans, models, data and conversations; warnings are printed. Reward functions are
    not called, classes of tools neither, and the machine, which may be another, is not checked.
    Returns what one trial of each point of the grids reserves.

    Raises:
        UserError: the errors, a line each.
    """
    return plan.check_experiments(experiments, _rules_of_a_run)


def _rules_of_a_run(stage: Stage) -> Iterator[Finding]:
    for rule in (plan_rules, model_rules, data_rules):
        yield from rule(stage)
    if stage.is_rlhf:
        yield from turn_rules(stage, makes_tools=False)


NUM_ITERATIONS = 2
MAX_GAP = {"float32": 1e-3, "bfloat16": 0.05}  # nats per token between decoding and learning
SLOW_SWAP = 0.1  # share of an iteration that publishing and loading weights may take
DIALOGUE = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "It is 6."},
)


def deep_rules(stage: Stage) -> Iterator[Finding]:
    """Findings of two iterations in this process, and of proofs on the tokenizer."""
    yield from chat_rules(stage)
    yield from oracle_rules(stage)
    results = two_iterations(stage)
    last = results[-1]
    throughput = last.get("throughput", {})
    seconds = throughput.get("iteration_seconds") or last.get("time_this_iter_s", math.nan)
    yield Finding(
        "deep.seconds", "note", f"an iteration takes {seconds:.1f} s here, in one process",
        _whole_run(stage, seconds), "",
    )  # fmt: skip
    if stage.is_rlhf:
        yield from _sampled(stage, last, seconds)


def two_iterations(stage: Stage) -> list[dict[str, Any]]:
    """Results of two iterations with sampler and learner in this process, as large as the run's."""
    config = stage.config.copy(copy_frozen=False)
    config.num_learners = 0
    config.evaluation_interval = None
    if stage.is_rlhf:
        config.num_env_runners = 0
        config.max_staleness = 0
        config.weights_transport = "store"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        algorithm = config.build_algo()
        try:
            return [algorithm.train() for _ in range(NUM_ITERATIONS)]
        finally:
            algorithm.stop()
            shutil.rmtree(Path(algorithm.logdir), ignore_errors=True)


def _whole_run(stage: Stage, seconds: float) -> str:
    iterations = stage.num_planned_iterations
    if iterations is None or math.isnan(seconds):
        return ""
    return f"{iterations} of them take about {iterations * seconds / 3600:.1f} h."


def _sampled(stage: Stage, result: Mapping[str, Any], seconds: float) -> Iterator[Finding]:
    """An iteration's results about sampling: log-probs, weights, rewards."""
    gap = result.get("sampler", {}).get("logprob_gap")
    config = stage.config
    kind = "bfloat16" if config.dtype == "bfloat16" or decided(config) else "float32"
    if gap is not None:
        exact = gap <= MAX_GAP[kind]
        yield Finding(
            "deep.logprobs",
            "note" if exact else "error",
            f"gap between log-probs of decoding and of a forward pass={gap:.2g} nats per token",
            "" if exact else "the ratio is not 1 on policy, and the wrong policy is corrected",
            "" if exact else "Use engine='torch', dtype float32, or another model.",
            rule="" if exact else f"be within {MAX_GAP[kind]:g} in {kind}",
        )
    throughput = result.get("throughput", {})
    swap = throughput.get("publish_seconds", 0.0)
    slow = swap > SLOW_SWAP * seconds
    yield Finding(
        "deep.swap",
        "warning" if slow else "note",
        f"publishing weights takes {swap:.2f} s of an iteration of {seconds:.1f} s",
        "it should be a small part" if slow else "",
        "Use lora or dtype bfloat16." if slow else "",
    )
    spread = result.get("objective", {}).get("scores_std")
    if spread == 0:
        yield Finding(
            "deep.rewards", "warning", "every completion of two iterations got the same reward",
            "there is nothing to learn from",
            "Look at reward functions and prompts; raise temperature or max_new_tokens.",
        )  # fmt: skip


def chat_rules(stage: Stage) -> Iterator[Finding]:
    """Whether the chat template only appends, so that a continued conversation extends its
    tokens."""
    tokenizer = stage.config.load_tokenizer()
    if not tokenizer.chat_template:
        return
    whole = render_chat(tokenizer, DIALOGUE)
    so_far = render_chat(tokenizer, DIALOGUE[:2])
    opened = render_chat(tokenizer, DIALOGUE[:3], generation_prompt=True)
    appends = whole.startswith(so_far) and whole.startswith(opened)
    yield Finding(
        "deep.chat_format", "note" if appends else "warning",
        "the chat template appends" if appends else "the chat template changes earlier turns",
        "" if appends else "a conversation of several turns does not keep its tokens",
        "" if appends else "Give one that renders turns alike wherever they stand: chat_template.",
    )  # fmt: skip


def oracle_rules(stage: Stage) -> Iterator[Finding]:
    """Whether rewards prefer a row's own answer to another row's, where rows have answers."""
    scores = answer_scores(stage) if stage.is_rlhf else None
    if scores is None:
        return
    right, wrong = scores
    told = right > wrong
    yield Finding(
        "deep.oracle", "note" if told else "warning",
        f"rewards give {right:.3g} to the rows' own answers and {wrong:.3g} to each other's",
        "" if told else "right answers should get more",
        "" if told else "Look at the reward functions: how do they find the answer in a text?",
    )  # fmt: skip
