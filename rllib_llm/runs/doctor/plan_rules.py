"""Rules about settings that are sound one by one and act against each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_llm.runs.doctor.finding import Finding
from rllib_llm.runs.doctor.stage import Stage
from rllib_llm.runs.metric_names import describes
from rllib_llm.shared.errors import suggestion

NEARLY_GREEDY = 0.2  # a temperature at which the completions of a prompt hardly differ
MUCH_PUNISHED = 0.9  # of a completion's length
COUNTERS = ("training_iteration", "episode", "time_total_s", "num_env_steps_sampled_lifetime")


def plan_rules(stage: Stage) -> Iterator[Finding]:
    """Findings about a stage's settings, with those of its experiment."""
    yield from _end(stage)
    yield from _names(stage)
    yield from _schedule(stage)
    yield from _cuts(stage)
    if stage.is_rlhf:
        yield from _sampling(stage)
        yield from _evaluation(stage)


def _end(stage: Stage) -> Iterator[Finding]:
    experiment = stage.experiment
    if not experiment.stop and experiment.time_budget_s is None:
        yield Finding(
            "experiment.no_end", "warning", "stop is empty",
            "the trial goes on until somebody stops it",
            "Write stop: {training_iteration: 100}.",
        )  # fmt: skip
    elif experiment.stop and not any(key in COUNTERS for key in experiment.stop):
        yield Finding(
            "experiment.open_end", "warning", f"stop={dict(experiment.stop)!r}",
            "without a counter the trial never ends where no result reaches its limit",
            "Add training_iteration, episode or time_total_s.",
        )  # fmt: skip
    settings = experiment.checkpoint_config
    frequency = settings.get("checkpoint_frequency")
    if settings.get("checkpoint_at_end") is False and frequency == 0:
        yield Finding(
            "experiment.nothing_kept", "warning",
            "checkpoint_at_end=False and checkpoint_frequency=0",
            "what is learnt would be lost", "Drop one of them.",
        )  # fmt: skip


def _names(stage: Stage) -> Iterator[Finding]:
    experiment = stage.experiment
    named: dict[str, Any] = {f"stop.{key}": key for key in experiment.stop}
    named |= {f"pass_criteria.{key}": key for key in experiment.pass_criteria}
    if experiment.metric:
        named["metric"] = experiment.metric
    if score := experiment.checkpoint_config.get("checkpoint_score_attribute"):
        named["checkpoint_config.checkpoint_score_attribute"] = score
    for where, key in named.items():
        if not describes(key):
            yield Finding(
                "experiment.result", "warning", f"{where}: no result is called {key!r}",
                "no trial reports it, so nothing ever happens by it",
                suggestion(key, (*COUNTERS, "objective/scores", "eval/scores", "objective/kl")),
            )  # fmt: skip


def _schedule(stage: Stage) -> Iterator[Finding]:
    config, iterations = stage.config, stage.num_planned_iterations
    if iterations is None or config.minibatch_size is None and not config.minibatch_tokens:
        per_iteration = config.num_epochs
    elif config.minibatch_tokens:
        return  # depends on lengths
    else:
        per_iteration = config.num_epochs * -(
            -config.train_batch_size_per_learner // config.minibatch_size
        )
    if iterations is None:
        return
    updates = iterations * per_iteration
    if config.lr_num_warmup_updates >= updates:
        yield Finding(
            "settings.lr_num_warmup_updates",
            "warning",
            f"lr_num_warmup_updates={config.lr_num_warmup_updates}",
            "lr never reaches its value",
            f"Use about {max(1, updates // 20)}.",
            rule=f"be below the {updates} optimiser steps of this run",
        )
    decays = config.lr_schedule != "constant" and config.lr_num_updates
    if decays and config.lr_num_updates < updates:
        yield Finding(
            "settings.lr_num_updates",
            "warning",
            f"lr_num_updates={config.lr_num_updates}",
            "afterwards lr is 0",
            f"Use {updates}, or end the run earlier.",
            rule=f"be about the {updates} optimiser steps of this run",
        )


def _cuts(stage: Stage) -> Iterator[Finding]:
    config = stage.config
    rows, size = config.train_batch_size_per_learner, config.minibatch_size
    if size and rows % size:
        yield Finding(
            "settings.minibatch_size",
            "warning",
            f"minibatch_size={size}",
            f"the last step of each pass learns from {rows % size} rows alone, as "
            "loudly as the others",
            f"Use {_divisor(rows, size)}.",
            rule=f"divide train_batch_size_per_learner={rows}",
        )


def _divisor(rows: int, size: int) -> int:
    """The largest divisor of `rows` that is at most `size`."""
    return next(value for value in range(size, 0, -1) if rows % value == 0)


def _sampling(stage: Stage) -> Iterator[Finding]:
    config = stage.config
    if config.num_completions > 1 and config.temperature < NEARLY_GREEDY:
        yield Finding(
            "settings.temperature",
            "warning",
            f"temperature={config.temperature}",
            "they are compared with each other, and equal ones teach nothing",
            "Use 0.7 to 1.",
            rule=f"let the {config.num_completions} completions of a prompt differ",
        )
    if config.top_k == 1:
        yield Finding(
            "settings.top_k", "warning", "top_k=1",
            "completions are greedy, and nothing is explored",
            "Use 0 to switch it off.",
        )  # fmt: skip
    if config.min_new_tokens == config.max_new_tokens and config.max_new_tokens > 1:
        yield Finding(
            "settings.min_new_tokens", "warning", f"min_new_tokens={config.min_new_tokens}",
            "", "Lower it.", rule="be below max_new_tokens for completions to end by themselves",
        )  # fmt: skip
    if stage.env.get("kl_coeff") and config.ref_kl_coeff:
        yield Finding(
            "settings.kl_twice", "warning",
            f"env_config.kl_coeff={stage.env['kl_coeff']}, ref_kl_coeff={config.ref_kl_coeff}",
            "the KL would be paid twice",
            "Leave env_config.kl_coeff out.",
        )  # fmt: skip
    if config.overlong_buffer > MUCH_PUNISHED * config.max_new_tokens:
        yield Finding(
            "settings.overlong_buffer",
            "warning",
            f"overlong_buffer={config.overlong_buffer}",
            "nearly every completion is punished for its length",
            f"Use {max(1, config.max_new_tokens // 5)}.",
            rule=f"be a small part of max_new_tokens={config.max_new_tokens}",
        )


def _evaluation(stage: Stage) -> Iterator[Finding]:
    config, env = stage.config, stage.env
    if not config.evaluation_interval or "eval_prompts" not in env:
        return
    if not env["eval_prompts"] and not env.get("eval_fraction"):
        yield Finding(
            "settings.evaluation_interval", "error",
            f"evaluation_interval={config.evaluation_interval}",
            "neither eval_prompts nor eval_fraction is set",
            "Set eval_fraction: 0.1, or evaluation_interval: null.", rule="have held-out prompts",
        )  # fmt: skip
