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
from rllib_llm.data.encoding import render_chat
from rllib_llm.runs import plan
from rllib_llm.runs.doctor.data_rules import data_rules
from rllib_llm.runs.doctor.machine_rules import Machine, installation_rules, machine_rules
from rllib_llm.runs.doctor.model_rules import model_rules, plan_rules, turn_rules
from rllib_llm.runs.doctor.reward_rules import answer_scores, reward_rules
from rllib_llm.runs.doctor.stage import Stage, of_each_env
from rllib_llm.runs.experiments import Experiment, with_stand_ins
from rllib_llm.runs.run_folder import check_writable
from rllib_llm.shared.errors import (
    Problem,
    distinct,
    errors_of,
    note,
    problems_of,
    refusals,
    warning,
)
from rllib_llm.shared.storage import Place


def examine(
    experiments: list[Experiment], machine: Machine, *, folder: Place | None = None,
    is_here: bool = True,
) -> tuple[list[Problem], list[plan.Examined]]:  # fmt: skip
    """Examines the machine and the experiments, without loading a model. Returns the findings,
    and those experiments that have no error by their settings.

    Args:
        folder: where results will go, for the disk.
        is_here: Ray will be started on this machine.
    """

    def rules(stage: Stage) -> Iterator[Problem]:
        yield from run_rules(stage, makes_tools=True)
        yield from machine_rules(stage, machine, is_here=is_here)
        if stage.is_rlhf:
            yield from of_each_env(reward_rules, stage)

    found = list(installation_rules(machine.versions))
    try:
        each = [plan.examined(one, rules) for one in with_stand_ins(experiments)]
    except ValueError as error:
        return distinct([*found, *problems_of(error)]), []
    found += [problem.within(one.experiment.name) for one in each for problem in one.problems]
    if folder is not None:
        found += refusals(check_writable, folder)
        if not errors_of(found):
            found += refusals(plan.check_disk, experiments, folder, machine.disk_bytes)
    return distinct(found), [one for one in each if not errors_of(one.problems)]


def run_rules(stage: Stage, makes_tools: bool = False) -> Iterator[Problem]:
    """Problems of a stage with valid settings that `rllib train` looks at before a run. Reward
    functions are not called, classes of tools neither, and the machine, which may be another, is
    not checked."""
    for rule in (plan_rules, model_rules):
        yield from rule(stage)
    yield from of_each_env(data_rules, stage)
    if stage.is_rlhf:
        yield from of_each_env(turn_rules, stage, makes_tools=makes_tools)


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
    tokenizer = stage.config.load_tokenizer()
    if tokenizer.chat_template:
        whole = render_chat(tokenizer, DIALOGUE)
        so_far = render_chat(tokenizer, DIALOGUE[:2])
        opened = render_chat(tokenizer, DIALOGUE[:3], generation_prompt=True)
        # Else a continued conversation does not extend its tokens.
        appends = whole.startswith(so_far) and whole.startswith(opened)
        yield note("the chat template appends") if appends else warning(
            "chat_template", "render turns alike wherever they stand",
            "it changes earlier turns, and a conversation does not keep its tokens", "Give another",
        )  # fmt: skip
    if stage.is_rlhf:
        yield from of_each_env(_answer_rules, stage)
    last = two_iterations(stage)[-1]
    throughput = last.get("throughput", {})
    seconds = throughput.get("iteration_seconds") or last.get("time_this_iter_s", math.nan)
    num, whole_run = stage.num_planned_iterations, ""
    if num is not None and not math.isnan(seconds):
        whole_run = f"{num} of them take about {num * seconds / 3600:.1f} h."
    yield note(f"an iteration takes {seconds:.1f} s here, in one process", whole_run)
    if stage.is_rlhf:
        yield from _sampled(stage, last, seconds)


def _answer_rules(stage: Stage) -> Iterator[Problem]:
    if (scores := answer_scores(stage)) is None:
        return
    right, wrong = scores
    fact = f"right answers are rewarded with {right:.3g}, wrong ones with {wrong:.3g}"
    yield note(fact) if right > wrong else warning(
        "rewards", "prefer the rows' own answers",
        f"they give {right:.3g} to them and {wrong:.3g} to each other's",
        "Look at the reward functions: how do they find the answer in a text?",
    )  # fmt: skip


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
