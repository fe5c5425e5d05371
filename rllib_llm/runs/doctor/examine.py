"""Everything the doctor looks at, in order: the machine, each experiment, and, if asked, models and
two iterations with all their measurements.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rllib_llm.algorithms.language_model_config import decided
from rllib_llm.algorithms.places import Reservation
from rllib_llm.data.encoding import render_chat
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
from rllib_llm.runs.doctor.stage import Stage
from rllib_llm.runs.experiments import Experiment, with_stand_ins
from rllib_llm.runs.run_folder import check_writable
from rllib_llm.shared.errors import Problem, distinct, note, problems_of, warning
from rllib_llm.shared.storage import Place


def examine(
    experiments: list[Experiment],
    machine: Machine,
    *,
    folder: Place | None = None,
    is_here: bool = True,
) -> list[Problem]:
    """Problems of the machine and the experiments, errors first, without loading a model.

    Args:
        folder: where results will go, for the disk.
        is_here: Ray will be started on this machine.
    """
    found = list(installation_rules(machine.versions))
    try:
        filled = with_stand_ins(experiments)
    except ValueError as error:
        return distinct([*found, *problems_of(error)])
    for experiment in filled:
        problems = examine_experiment(experiment, machine, is_here)
        found += [problem.within(experiment.name) for problem in problems]
    if folder is not None:
        try:
            check_writable(folder)
            if not any(finding.severity == "error" for finding in found):
                plan.check_disk(experiments, folder, free=machine.disk_bytes)
        except ValueError as error:
            found += problems_of(error)
    return distinct(found)


def examine_experiment(
    experiment: Experiment, machine: Machine, is_here: bool = True
) -> Iterator[Problem]:
    """Problems of one experiment: first by the rules that `rllib train` enforces; if none is
    broken, by all others."""
    found, _, stage = plan.examined(experiment)
    yield from found
    if stage is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rules = stage_rules(stage, machine, is_here)
            yield from (plan.named(problem, stage) for problem in rules)


def stage_rules(stage: Stage, machine: Machine, is_here: bool = True) -> Iterator[Problem]:
    """Problems of a stage with valid settings."""
    yield from plan_rules(stage)
    yield from model_rules(stage)
    if is_here:
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
        Problems: the errors, a line each.
    """
    return plan.check_experiments(experiments, _rules_of_a_run)


def _rules_of_a_run(stage: Stage) -> Iterator[Problem]:
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


def deep_rules(stage: Stage) -> Iterator[Problem]:
    """Findings of two iterations in this process, and of proofs on the tokenizer."""
    yield from chat_rules(stage)
    yield from oracle_rules(stage)
    results = two_iterations(stage)
    last = results[-1]
    throughput = last.get("throughput", {})
    seconds = throughput.get("iteration_seconds") or last.get("time_this_iter_s", math.nan)
    yield note(
        f"an iteration takes {seconds:.1f} s here, in one process", _whole_run(stage, seconds)
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


def _sampled(stage: Stage, result: Mapping[str, Any], seconds: float) -> Iterator[Problem]:
    """An iteration's results about sampling: log-probs, weights, rewards."""
    gap = result.get("sampler", {}).get("logprob_gap")
    config = stage.config
    kind = "bfloat16" if config.dtype == "bfloat16" or decided(config) else "float32"
    if gap is not None:
        yield Problem(
            "gap between log-probs of decoding and of a forward pass",
            f"be within {MAX_GAP[kind]:g} in {kind}", "the ratio is not 1 on policy, and the wrong "
            "policy is corrected", "Use engine='torch', dtype float32, or another model", gap,
        ) if gap > MAX_GAP[kind] else note(
            f"decoding and a forward pass differ by {gap:.2g} nats per token"
        )
    throughput = result.get("throughput", {})
    swap = throughput.get("publish_seconds", 0.0)
    yield warning(
        f"publishing weights ({swap:.2f} s)", f"be a small part of an iteration of {seconds:.1f} s",
        "samplers wait for it", "Use lora or dtype bfloat16",
    ) if swap > SLOW_SWAP * seconds else note(f"publishing weights takes {swap:.2f} s")
    spread = result.get("objective", {}).get("scores_std")
    if spread == 0:
        yield warning(
            "rewards", "differ", "every completion of two iterations got the same one",
            "Look at reward functions and prompts; raise temperature or max_new_tokens",
        )  # fmt: skip


def chat_rules(stage: Stage) -> Iterator[Problem]:
    """Whether the chat template only appends, so that a continued conversation extends its
    tokens."""
    tokenizer = stage.config.load_tokenizer()
    if not tokenizer.chat_template:
        return
    whole = render_chat(tokenizer, DIALOGUE)
    so_far = render_chat(tokenizer, DIALOGUE[:2])
    opened = render_chat(tokenizer, DIALOGUE[:3], generation_prompt=True)
    appends = whole.startswith(so_far) and whole.startswith(opened)
    yield note("the chat template appends") if appends else warning(
        "chat_template", "render turns alike wherever they stand",
        "it changes earlier turns, and a conversation does not keep its tokens", "Give another",
    )  # fmt: skip


def oracle_rules(stage: Stage) -> Iterator[Problem]:
    """Whether rewards prefer a row's own answer to another row's, where rows have answers."""
    scores = answer_scores(stage) if stage.is_rlhf else None
    if scores is None:
        return
    right, wrong = scores
    yield note(f"right answers are rewarded with {right:.3g}, wrong ones with {wrong:.3g}") if (
        right > wrong
    ) else warning(
        "rewards", "prefer the rows' own answers", f"they give {right:.3g} to them and {wrong:.3g} "
        "to each other's", "Look at the reward functions: how do they find the answer in a text?",
    )  # fmt: skip
