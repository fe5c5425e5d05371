"""Evaluation on held-out prompts, through RLlib's own evaluation samplers.

The same prompts and the same noise every time: a change in a result is a change in the policy.
Training's prompt position and randomness are untouched, being functions of position and seed.
"""

from __future__ import annotations

from typing import Any

from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    EVALUATION_RESULTS,
    NUM_ENV_STEPS_SAMPLED,
    NUM_EPISODES,
)
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_llm import columns
from rllib_llm.sampling.collect import collect
from rllib_llm.sampling.request import JudgedBatch, SampleRequest


def evaluate_held_out(
    algorithm, group: EnvRunnerGroup
) -> tuple[dict[str, Any], int, int]:
    """RLlib's `custom_evaluation_function`: judges `evaluation_duration` completions.

    Raises:
        SamplingError: no evaluation sampler answers; results never go stale in silence.
    """
    config = algorithm.evaluation_config
    n = config.num_completions
    batch = collect(
        group,
        SampleRequest(
            position=0,
            num_prompts=-(-algorithm.config.evaluation_duration // n),
            num_completions=n,
            explore=config.explore,
            return_texts=True,
        ),
        algorithm.published_weights,
    )
    results = {**held_out_metrics(batch), **algorithm.held_out_losses()}
    results["iteration"] = algorithm.num_iterations_done
    algorithm.eval_metrics = results
    algorithm.samples.write(
        batch,
        iteration=results["iteration"],
        split="eval",
        limit=config.num_logged_samples,
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


def held_out_metrics(batch: JudgedBatch) -> dict[str, float]:
    """What is reported under `eval/`: scores, components and diagnostics of the rows that were
    judged, length and finished share of all."""
    mask = batch.columns[columns.COMPLETION_MASK]
    scores = batch.columns[columns.SCORES][batch.columns[columns.VALID]].float()
    return {
        "scores": float(scores.mean()) if len(scores) else 0.0,
        "scores_std": float(scores.std()) if len(scores) > 1 else 0.0,
        "output_length": float(mask.sum(dim=1).float().mean()),
        "finished": float(batch.columns[columns.FINISHED].float().mean()),
        **batch.train_metrics(),
        **batch.env_metrics(),
    }
