"""Evaluation on held-out prompts, through RLlib's own evaluation samplers.

Completions are greedy, one of each prompt, unless `evaluation_config` has `explore: true`. The same
prompts and the same noise every time: a change in a result is a change in the policy. Training's
prompt position and randomness are untouched, being functions of position and seed.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.rllib.callbacks.utils import make_callback
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    EVALUATION_RESULTS,
    NUM_ENV_STEPS_SAMPLED,
    NUM_EPISODES,
)
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_llm.algorithms.pass_metrics import pass_metrics
from rllib_llm.rollouts.errors import NoSamplersError, NoServerError, SamplingError
from rllib_llm.rollouts.request import JudgedBatch
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.shared import columns

logger = logging.getLogger(__name__)


def evaluate_by_request(algorithm) -> dict[str, Any]:
    """`Algorithm.evaluate` without what the samplers here do not need: RLlib's would send them the
    whole state of the model first, twice, into memory of their own.

    Raises:
        ValueError: the algorithm was built without evaluation samplers.
    """
    config, group = algorithm.config, algorithm.eval_env_runner_group
    if group is None:
        raise ValueError(
            f"evaluation_interval={config.evaluation_interval!r} must be at least 1: an algorithm "
            "that is built without it has no samplers of held-out prompts. Set it, large where "
            "evaluate() is to be called by hand alone."
        )
    options = {"algorithm": algorithm, "metrics_logger": algorithm.metrics}
    make_callback(
        "on_evaluate_start",
        callbacks_objects=algorithm.callbacks,
        callbacks_functions=config.callbacks_on_evaluate_start,
        kwargs=options,
    )
    config.custom_evaluation_function(algorithm, group)
    results = algorithm.metrics.peek(key=EVALUATION_RESULTS, default={}, latest_merged_only=True)
    make_callback(
        "on_evaluate_end",
        callbacks_objects=algorithm.callbacks,
        callbacks_functions=config.callbacks_on_evaluate_end,
        kwargs={**options, "evaluation_metrics": results},
    )
    return results


def evaluate_held_out(algorithm, group: EnvRunnerGroup) -> tuple[dict[str, Any], int, int]:
    """RLlib's `custom_evaluation_function`: judges `evaluation_duration` completions.

    While no evaluation sampler comes back, or the server that generates for them does not answer,
    there are no held-out results, rather than old ones.

    Raises:
        SamplingError: a sampler failed, or all die of it whenever they are asked.
        NoSamplersError, NoServerError: none came back or the server gave no answer,
            `evaluation_error_after_n_consecutive_skips` times.
    """
    named = algorithm.evaluation_groups
    try:
        batch = _judged(algorithm, algorithm.evaluation_config, group)
        further = {name: _judged(algorithm, *of) for name, of in named.items()}
    except (NoSamplersError, NoServerError) as error:
        _skip(algorithm, error)
        return {}, 0, 0
    algorithm.num_evaluations_skipped = 0
    results = {**_results(batch, algorithm.evaluation_config), **algorithm.held_out_losses()}
    for name, judged in further.items():
        found = _results(judged, named[name][0])
        results |= {f"{name}/{metric}": value for metric, value in found.items()}
    results["iteration"] = algorithm.num_iterations_done
    algorithm.eval_metrics = results
    algorithm.recorder.record(batch, "evaluated", iteration=results["iteration"])
    for split, rows in {"eval": batch, **{f"eval/{n}": b for n, b in further.items()}}.items():
        algorithm.samples.write(
            rows,
            iteration=results["iteration"],
            split=split,
            limit=algorithm.evaluation_config.num_logged_samples,
        )
    # RLlib's own place and names, reduced as an EnvRunner's results would be.
    rllib_results = MetricsLogger(root=False)
    for name in (NUM_EPISODES, NUM_ENV_STEPS_SAMPLED):
        rllib_results.log_value(name, batch.num_rows, reduce="sum")
    rllib_results.log_value(EPISODE_RETURN_MEAN, float(batch.rewards.mean()), window=1)
    algorithm.metrics.aggregate(
        [rllib_results.reduce()], key=(EVALUATION_RESULTS, ENV_RUNNER_RESULTS)
    )
    return {}, batch.num_rows, batch.num_rows


def _judged(algorithm, config, group: EnvRunnerGroup) -> JudgedBatch:
    """`evaluation_duration` completions by the samplers of an evaluation."""
    # Greedy completions of a prompt are all alike.
    n = config.num_completions if config.explore else 1
    settings = ServingSettings(n, explore=config.explore, min_valid=0)
    return algorithm.sample_held_out(group, -(-config.evaluation_duration // n), settings)


def _results(batch: JudgedBatch, config) -> dict[str, float]:
    """What is reported of a batch, under `eval/` or the name of its environment."""
    results = held_out_metrics(batch)
    if config.pass_at:
        asked = (config.pass_at, config.pass_on, config.answer_pattern)
        results.update(pass_metrics(batch, *asked))
    return results


def _skip(algorithm, error: SamplingError) -> None:
    algorithm.eval_metrics = None
    algorithm.faults.evaluations_skipped += 1
    algorithm.num_evaluations_skipped += 1
    limit = algorithm.config.evaluation_error_after_n_consecutive_skips
    if limit is not None and algorithm.num_evaluations_skipped >= limit:
        raise error
    logger.error("This evaluation is skipped: %s", error)


def held_out_metrics(batch: JudgedBatch) -> dict[str, float]:
    """What is reported under `eval/`: scores, components and diagnostics of the rollouts that were
    judged, length and finished share of all."""
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
    }
