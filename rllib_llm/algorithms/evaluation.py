"""Evaluation on held-out prompts, through RLlib's own evaluation samplers.

Completions are greedy, one of each prompt, unless `evaluation_config` has `explore: true`. The same
prompts and the same noise every time: a change in a result is a change in the policy. Training's
prompt position and randomness are untouched, being functions of position and seed. Of several
completions of each prompt pass@k, pass^k and maj@k are reported.

Further environments have names, the setting `eval_envs`:

    eval_envs:
      hard: {env_config: {digits: 4}}
      gsm: {env: rllib_llm/RLHF-v0, env_config: {prompts: gsm.jsonl, ...}, evaluation_duration: 32}

Each is a separate group of samplers, with `evaluation_config` and what its name has laid over the
config; one of another `env` begins with an empty `env_config`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    EVALUATION_RESULTS,
    NUM_ENV_STEPS_SAMPLED,
    NUM_EPISODES,
)
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_llm.algorithms.results import parts_by_environment
from rllib_llm.config.tabled_config import flattened
from rllib_llm.rollouts.errors import NoSamplersError
from rllib_llm.rollouts.judged_batch import JudgedBatch
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problem, Problems
from rllib_llm.shared.remote import ServerError


def pass_metrics(
    batch: JudgedBatch, ks: Sequence[int], on: str | None, answer_pattern: str | None = None
) -> dict[str, float]:
    """`pass@<k>`, `pass^<k>` and, where there are texts, `maj@<k>` of the completions of each
    prompt, with `_low` and `_high` of their 95 % intervals over prompts. A conversation of several
    rows is one sample.

    on: the component that says what passed, 0 or 1; None: the score. answer_pattern: see
    `answers_of`.

    Raises:
        Problems: what says that a completion has passed is not there, or neither 0 nor 1.
    """
    valid = batch.columns[columns.VALID] & batch.rollouts.is_first
    column = batch.columns[columns.SCORES] if on is None else batch.components.get(on)
    if column is None or not bool(((column == 0) | (column == 1))[valid & ~column.isnan()].all()):
        found = "there is none of this name" if column is None else "it has other values, too"
        names = ", ".join(sorted(batch.components)) or "none"
        raise Problems("pass_on", "be a component of the reward that is 0 or 1", found,
                       f"Components: {names}. None is the score", on)  # fmt: skip
    from rllib_llm.numerics.pass_at_k import majority_rates, rates  # few runs need it

    right, counts = column == 1, valid & ~column.isnan()
    # A prompt that comes again, since there are fewer than an evaluation judges, is the same one.
    groups = batch.columns.get(columns.PROMPT_INDEX, batch.columns[columns.GROUP])
    if columns.ENVIRONMENT in batch.columns:  # which have prompts of the same index
        of_env = torch.stack([batch.columns[columns.ENVIRONMENT].long(), groups], dim=1)
        groups = of_env.unique(dim=0, return_inverse=True)[1]
    found_rates = rates(right, groups, counts, ks)
    if "completion" in batch.texts:
        answers = answers_of(batch, answer_pattern)
        found_rates |= majority_rates(answers, right, groups, counts, ks)
    metrics: dict[str, float] = {}
    for name, (mean, low, high) in found_rates.items():
        metrics |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return metrics


def answers_of(batch: JudgedBatch, pattern: str | None) -> list[str | None]:
    """The answer that each row votes for, stripped: the first group of the pattern's last match,
    None without one; without a pattern all that it says, in a conversation in its last message."""
    texts = batch.texts["completion"]
    if "messages" in batch.texts:
        said = [
            [message.get("content") for message in json.loads(messages)
             if message["role"] == "assistant"] if messages else [text]
            for messages, text in zip(batch.texts["messages"], texts, strict=True)
        ]  # fmt: skip
        lasts = [said[last] for last in batch.rollouts.lasts.tolist()]
        texts = [str(turns[-1] or "") if turns else "" for turns in lasts]
    if pattern is None:
        return [text.strip() for text in texts]
    matches = [list(re.finditer(pattern, text, re.DOTALL)) for text in texts]
    return [found[-1].group(1 if found[-1].re.groups else 0).strip() if found else None
            for found in matches]  # fmt: skip


_NAME = re.compile(r"[A-Za-z][\w.-]*")


def eval_env_rules(config: Any) -> Iterator[Problem]:
    """Further environments are evaluated in, and their names can be those of results."""
    envs = config.eval_envs or {}
    if envs and not config.evaluation_interval and not config.in_evaluation:
        yield Problem("eval_envs", "be left out without evaluation_interval",
                      "nothing is evaluated", "Set evaluation_interval=1, say", sorted(envs)
                      )  # fmt: skip
    for name in envs:
        if not _NAME.fullmatch(name):
            yield Problem("the name of one of eval_envs", "be letters, digits and _.-, a letter "
                          "first", "results are reported as eval/<name>/<metric>",
                          "Write math, say", name)  # fmt: skip


def eval_env_config(config: Any, name: str) -> Any:
    """The config of the samplers of one further environment, not validated.

    `config`: the algorithm's.
    """
    overlay = flattened(type(config), config.eval_envs[name])
    base = config.copy(copy_frozen=False)
    base.eval_envs = base.envs = None
    settings = flattened(type(config), config.evaluation_config or {})
    if overlay.get("env", base.env) != base.env:
        base.env_config = {}
        settings.pop("env_config", None)
    elif "env_config" in overlay and "env_config" in settings:
        overlay["env_config"] = {**settings["env_config"], **overlay["env_config"]}
    base.evaluation_config = {**settings, **overlay}
    return base.get_evaluation_config_object()


def open_eval_envs(algorithm: Any) -> dict[str, tuple[Any, EnvRunnerGroup]]:
    """(config, samplers) of each further environment by name.

    Raises:
        ValueError: settings that cannot be.
    """
    opened: dict[str, tuple[Any, EnvRunnerGroup]] = {}
    offset = algorithm.config.num_env_runners + algorithm.evaluation_config.num_env_runners
    for name in algorithm.config.eval_envs or {}:
        config = eval_env_config(algorithm.config, name)
        config.validate()
        config.freeze()
        opened[name] = config, EnvRunnerGroup(
            config=config, local_env_runner=config.create_local_env_runner,
            logdir=algorithm.logdir, tune_trial_id=algorithm.trial_id, pg_offset=offset,
        )  # fmt: skip
        offset += config.num_env_runners
    return opened


logger = logging.getLogger(__name__)


def evaluate_held_out(algorithm, group: EnvRunnerGroup) -> tuple[dict[str, Any], int, int]:
    """RLlib's `custom_evaluation_function`: judges `evaluation_duration` completions.

    While no evaluation sampler comes back, or the server that generates for them does not answer,
    there are no held-out results, rather than old ones.

    Raises:
        RuntimeError: a sampler failed, or all die of it whenever they are asked.
        NoSamplersError, ServerError: none came back or the server gave no answer,
            `evaluation_error_after_n_consecutive_skips` times.
    """
    named = algorithm.evaluation_groups
    try:
        batch = _judged(algorithm, algorithm.evaluation_config, group)
        further = {name: _judged(algorithm, *of) for name, of in named.items()}
    except (NoSamplersError, ServerError) as error:
        algorithm.eval_metrics = None
        algorithm.faults.evaluations_skipped += 1
        algorithm.num_evaluations_skipped += 1
        limit = algorithm.config.evaluation_error_after_n_consecutive_skips
        if limit is not None and algorithm.num_evaluations_skipped >= limit:
            raise
        logger.error("This evaluation is skipped: %s", error)
        return {}, 0, 0
    algorithm.num_evaluations_skipped = 0
    results = {**_results(batch, algorithm.evaluation_config), **algorithm.held_out_losses()}
    if columns.ENVIRONMENT in batch.columns:
        for number, part in parts_by_environment(batch):
            found = _results(part, algorithm.evaluation_config)
            name = algorithm.config.env_names[number]
            results |= {f"{name}/{metric}": value for metric, value in found.items()}
    for name, judged in further.items():
        found = _results(judged, named[name][0])
        results |= {f"{name}/{metric}": value for metric, value in found.items()}
    results["iteration"] = algorithm.weights_version
    algorithm.eval_metrics = results
    algorithm.recorder.record(batch, "evaluated", iteration=results["iteration"])
    for split, rows in {"eval": batch, **{f"eval/{n}": b for n, b in further.items()}}.items():
        limit = algorithm.evaluation_config.num_logged_samples
        algorithm.samples.write(rows, iteration=results["iteration"], split=split, limit=limit)
    # RLlib's own place and names, reduced as an EnvRunner's results would be.
    rllib_results = MetricsLogger(root=False)
    for name in (NUM_EPISODES, NUM_ENV_STEPS_SAMPLED):
        rllib_results.log_value(name, batch.num_rollouts, reduce="sum")
    rllib_results.log_value(EPISODE_RETURN_MEAN, results["rewards"], window=1)
    algorithm.metrics.aggregate(
        [rllib_results.reduce()], key=(EVALUATION_RESULTS, ENV_RUNNER_RESULTS)
    )
    for each in (group, *(of[1] for of in named.values())):
        algorithm.log_callbacks(each, (EVALUATION_RESULTS, ENV_RUNNER_RESULTS))
    return {}, batch.num_rollouts, batch.num_rollouts


def _judged(algorithm, config, group: EnvRunnerGroup) -> JudgedBatch:
    """`evaluation_duration` completions by the samplers of an evaluation."""
    # Greedy completions of a prompt are all alike.
    n = config.num_completions if config.explore else 1
    settings = ServingSettings(n, explore=config.explore, min_valid=0)
    num_prompts = -(-config.evaluation_duration // n)
    return algorithm.sample_held_out(group, num_prompts, settings, config.weights_of_envs())


def _results(batch: JudgedBatch, config) -> dict[str, float]:
    """Metrics of one evaluation batch, under `eval/` or its environment's name."""
    results = held_out_metrics(batch, is_greedy=not config.explore)
    if not config.pass_at:
        return results
    return results | pass_metrics(batch, config.pass_at, config.pass_on, config.answer_pattern)


def held_out_metrics(batch: JudgedBatch, is_greedy: bool = False) -> dict[str, float]:
    """Metrics under `eval/`: scores, components and diagnostics of the rollouts that were judged;
    length and finished share of all."""
    whole = batch.rollouts
    first, lengths = whole.is_first, whole.total(batch.sampled_mask.sum(dim=1))
    finished = whole.at_end(batch.columns[columns.FINISHED])
    scores = batch.columns[columns.SCORES][batch.columns[columns.VALID] & first].float()
    return {
        "scores": float(scores.mean()) if len(scores) else 0.0,
        "scores_std": float(scores.std()) if len(scores) > 1 else 0.0,
        "output_length": float(lengths[first].float().mean()),
        "finished": float(finished[first].float().mean()),
        **batch.train_metrics(),
        **batch.env_metrics(),
        "distinct": batch.distinct_share(is_greedy),
    }
