"""An iteration's results: by group and name as in `runs/metrics.py`, under RLlib's common names,
and under short names at the top, since Tune's reporter shows the first four numbers; also where
rollouts are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyarrow.fs import LocalFileSystem
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    NUM_EPISODES_LIFETIME,
)
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_llm.data.encoding import vocabulary_hash
from rllib_llm.data.rollout_store import ROLLOUTS, RolloutStore, rollouts_in
from rllib_llm.rollouts.judged_batch import JudgedBatch, take_rows
from rllib_llm.rollouts.recorder import AboutRun, RolloutRecorder
from rllib_llm.shared import columns
from rllib_llm.shared.storage import UrlPath
from rllib_llm.weights.published import PublishedWeights

Groups = dict[str, dict[str, Any]]


def with_sampling(
    groups: Groups, sampled: JudgedBatch, learnt_version: int, ages: dict[str, float]
) -> Groups:
    """The learners' metrics, in place, with those of the rows that were new in this iteration;
    `ages`: of all rows that were learnt from, where that is corrected for."""
    val = groups.setdefault("val", {})
    if "ratio_square" in val:  # absent until the loss of an iteration had a finite token
        val["ratio_var"] = max(0.0, val.pop("ratio_square") - val["ratio"] ** 2)
    groups["train"] |= sampled.train_metrics()
    scores = sampled.columns[columns.SCORES][sampled.columns[columns.VALID]]
    if len(scores) > 1:
        groups.setdefault("objective", {})["scores_std"] = float(scores.float().std())
    # Updates between the weights that sampled a token and those that learnt from it.
    groups["train"]["staleness"] = learnt_version - sampled.mean_version()
    if ages:
        group = groups["off_policy"] = {**groups.get("off_policy", {}), **ages}
        # (Σw)²/(n Σw²): the share of the tokens that would say as much, weighted alike.
        if (square := group.pop("weight_square", None)) is not None:
            group["ess_share"] = group["weight"] ** 2 / square if square else 0.0
    groups["env"] = sampled.env_metrics()
    return groups


def of_environments(names: Sequence[str], batch: JudgedBatch, version: int) -> dict[str, float]:
    """Metrics of each of several environments, as `<name>/<metric>`; of those that the batch has
    no rows of, their share alone. `version`: of the weights that learn from it."""
    if columns.ENVIRONMENT not in batch.columns:
        return {}
    found = {f"{name}/share_of_batch": 0.0 for name in names}
    num_groups = len(batch.columns[columns.GROUP].unique())
    for number, rows in parts_by_environment(batch):
        whole, judged, held = rows.rollouts, rows.judged, rows.columns
        scores, groups = held[columns.SCORES][judged].float(), held[columns.GROUP]
        lengths = whole.total(rows.sampled_mask.sum(dim=1))[whole.is_first].float()
        ended = whole.at_end(held[columns.FINISHED])[whole.is_first].float()
        spread = [bool((of := scores[groups[judged] == g]).numel() and of.max() > of.min())
                  for g in groups.unique()]  # fmt: skip
        of_one = {
            "reward": float(scores.mean()) if len(scores) else 0.0,
            "reward_std": float(scores.std()) if len(scores) > 1 else 0.0,
            "episodes": float(rows.num_rollouts), "tokens": float(rows.sampled_mask.sum()),
            "output_length": float(lengths.mean()), "truncated": 1.0 - float(ended.mean()),
            "invalid": 1.0 - float(judged.sum()) / rows.num_rollouts,
            "zero_variance_groups": 1.0 - sum(spread) / len(spread),
            "share_of_batch": len(spread) / num_groups,
        }  # fmt: skip
        if bool(rows.sampled_mask.any()):
            of_one["age"] = version - rows.mean_version()
        of_one |= {name: value for name, value in rows.train_metrics().items() if name != "rewards"}
        of_one |= rows.env_metrics()
        found |= {f"{names[number]}/{name}": value for name, value in of_one.items()}
    return found


def parts_by_environment(batch: JudgedBatch) -> Iterator[tuple[int, JudgedBatch]]:
    """The rows of each environment that a batch has any of, with the environment's number; without
    what the others alone report."""
    numbers = batch.columns[columns.ENVIRONMENT]
    for number in numbers.unique().tolist():
        part = take_rows(batch, (numbers == number).nonzero().squeeze(1))
        for held in (part.components, part.metrics):
            for name in [name for name, column in held.items() if bool(column.isnan().all())]:
                del held[name]
        yield number, part


def weights_metrics(
    published: PublishedWeights, publisher: Mapping[str, float], sampled: JudgedBatch, version: int
) -> dict[str, Any]:
    """Metrics of the last published weights, and the staleness of the oldest row when weights of
    this version learnt from it."""
    found = {
        "version": published.version, "publish_seconds": published.publish_seconds,
        **publisher, **sampled.weights_metrics(),
    }  # fmt: skip
    if "oldest_version" in found:
        found["versions_behind"] = version - found["oldest_version"]
    return found


def throughput(sampled: JudgedBatch, seconds: Mapping[str, float]) -> dict[str, float]:
    """Sampled tokens and rollouts per second of "iteration", and the seconds of its parts."""
    return {
        "tokens_per_s": int(sampled.sampled_mask.sum()) / seconds["iteration"],
        "samples_per_s": sampled.num_rollouts / seconds["iteration"],
        **{f"{name}_seconds": value for name, value in seconds.items()},
        **sampled.timings,
    }


def log_as_rllib(metrics: MetricsLogger, sampled: JudgedBatch, mean_reward: float) -> None:
    """RLlib's own names; an episode is one step long here."""
    num_rollouts = sampled.num_rollouts
    for name in (NUM_ENV_STEPS_SAMPLED, NUM_EPISODES):
        metrics.log_value((ENV_RUNNER_RESULTS, name), num_rollouts, reduce="sum")
    for name in (NUM_ENV_STEPS_SAMPLED_LIFETIME, NUM_EPISODES_LIFETIME):
        metrics.log_value((ENV_RUNNER_RESULTS, name), num_rollouts, reduce="lifetime_sum")
    metrics.log_value((ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN), mean_reward, window=1)


# Short name: where it stands in a result, "" for its top. The first four that there are become
# columns; every stage has four, so that none is filled with a counter of RLlib's.
HEADLINE: Mapping[str, tuple[str, str]] = {
    "reward": ("objective", "scores"), "held_out_reward": ("eval", "scores"),
    "kl": ("objective", "kl"), "length": ("train", "output_length"),
    "sft_loss": ("loss", "sft"), "rm_loss": ("loss", "reward_model"), "dpo_loss": ("loss", "dpo"),
    "held_out_loss": ("eval", "loss"), "accuracy": ("train", "accuracy"),
    "held_out_accuracy": ("eval", "accuracy"), "entropy": ("policy", "entropy_avg"),
    "tokens_per_s": ("throughput", "tokens_per_s"), "episode": ("", "episode"), "lr": ("", "lr"),
}  # fmt: skip


def with_headline(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result, with the most important metrics first."""
    head = {}
    for name, (group, key) in HEADLINE.items():
        values = result.get(group) if group else result
        if isinstance(values, Mapping) and key in values:
            head[name] = values[key]
    return {**head, **result}


_DRAWN = ("temperature", "top_p", "top_k")


def stored_rollouts(config: Any, storage: Any, trial_folder: Path) -> RolloutRecorder:
    """The recorder of rollouts, for a run that stores them: in the trial's folder on this machine,
    in Tune's `storage` where that is elsewhere, or below `rollouts_path`."""
    tokenizer = config.load_tokenizer()
    held_out = config.get_evaluation_config_object()
    samples_held_out = held_out is not None and held_out.explore
    about = AboutRun(
        run=trial_folder.name, env=str(config.env),
        of_envs=tuple({"env": name, **{key: getattr(each, key) for key in _DRAWN}}
                      for name, each in config.env_configs().items() if name),
        num_completions=config.num_completions,
        num_held_out_completions=held_out.num_completions if samples_held_out else 1,
        **{key: getattr(config, key) for key in _DRAWN},
        seed=config.seed or 0, tokenizer=tokenizer, vocabulary=vocabulary_hash(tokenizer),
    )  # fmt: skip
    chosen = rollouts_in(trial_folder, config.rollouts_path)
    kept_by = LocalFileSystem() if storage is None else storage.storage_filesystem
    if not config.rollouts_path and not isinstance(kept_by, LocalFileSystem):
        folder, filesystem = f"{storage.trial_fs_path}/{ROLLOUTS}", kept_by
    elif isinstance(chosen, UrlPath):
        folder, filesystem = chosen.path, chosen.filesystem
    else:
        folder, filesystem = str(chosen), None
    store = RolloutStore(
        folder, filesystem=filesystem, on_error=config.store_on_error,
        keep_iterations=config.store_keep_iterations,
    )  # fmt: skip
    return RolloutRecorder(store, about)
