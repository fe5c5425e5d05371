"""Which results a person wants to see, by what names, in what form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_llm.runs.flat_results import number
from rllib_llm.runs.trial_logs import fresh_series


@dataclass(frozen=True)
class Metric:
    """One result as it is shown: `key` in the flat result, column title, number format."""

    key: str
    title: str
    form: str = ".3f"

    def text(self, value: float) -> str:
        """Return `value` as it is shown; what rounds to zero has no sign."""
        text = format(value, self.form)
        return text if any(digit in text for digit in "123456789") else text.removeprefix("-")


NONE = "–"  # where nothing was measured
EPISODES = Metric("episode", "episodes", ",.0f")
INVALID = Metric("train/num_invalid", "completions without a score", ",.0f")
STALENESS = Metric("train/staleness", "staleness, updates", ".2f")
TOKENS_PER_S = Metric("throughput/tokens_per_s", "tokens/s", ",.0f")
# Columns of the live table, by a result that tells the kind of the stage.
COLUMNS: dict[str, tuple[Metric, ...]] = {
    "loss/sft": (
        EPISODES,
        Metric("loss/sft", "loss"),
        Metric("eval/loss", "held out"),
        TOKENS_PER_S,
    ),
    "loss/reward_model": (
        EPISODES,
        Metric("loss/reward_model", "loss"),
        Metric("train/accuracy", "accuracy"),
        Metric("eval/accuracy", "held out"),
        TOKENS_PER_S,
    ),
    "loss/dpo": (
        EPISODES,
        Metric("loss/dpo", "loss"),
        Metric("train/accuracy", "accuracy"),
        Metric("eval/accuracy", "held out"),
        Metric("rewards/margins", "margin"),
        TOKENS_PER_S,
    ),
    "objective/scores": (
        EPISODES,
        Metric("objective/scores", "reward"),
        Metric("env/gold_score", "gold"),
        Metric("objective/kl", "KL"),
        TOKENS_PER_S,
    ),
    "episode": (EPISODES, TOKENS_PER_S),
}
# Of RLlib's own algorithms.
STOCK_METRICS = (
    Metric("num_env_steps_sampled_lifetime", "env steps", ",.0f"),
    Metric("env_runners/episode_return_mean", "return", ".1f"),
)
# What a summary shows, first against last.
SUMMARY_METRICS = (
    Metric("episode", "episodes", ",.0f"),
    Metric("loss/sft", "loss, nats per token"),
    Metric("loss/reward_model", "loss, nats per pair"),
    Metric("loss/dpo", "loss, per pair"),
    Metric("eval/loss", "  held out"),
    Metric("train/accuracy", "pairs ordered rightly"),
    Metric("eval/accuracy", "  held out"),
    Metric("rewards/margins", "reward of chosen less rejected"),
    Metric("logps/chosen", "log-prob of the chosen, nats per completion", ".1f"),
    Metric("objective/scores", "reward"),
    Metric("eval/scores", "  held out"),
    Metric("env/gold_score", "gold score"),
    Metric("eval/gold_score", "  held out"),
    Metric("env/grammatical", "grammatical share"),
    Metric("eval/grammatical", "  held out"),
    Metric("env/distinct", "distinct share"),
    Metric("eval/distinct", "  held out"),
    Metric("objective/kl", "KL to the reference, nats per completion"),
    Metric("loss/ptx_avg", "pretraining loss, nats per token"),
    Metric("eval/ptx_loss", "  held out"),
    Metric("policy/entropy_avg", "entropy, nats per token"),
    Metric("train/output_length", "completion length, tokens", ".1f"),
    Metric("throughput/tokens_per_s", "tokens/s", ",.0f"),
    STALENESS,
    INVALID,
)
# Which way is up, to mark the best of several trials where the experiment does not say.
BEST = (
    ("objective/scores", "max"),
    ("eval/accuracy", "max"),
    ("eval/loss", "min"),
    ("loss/reward_model", "min"),
    ("loss/sft", "min"),
    ("env_runners/episode_return_mean", "max"),
)


def columns(results: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Return the columns of the live table for the flat `results` of a stage's trials."""
    for marker, metrics in COLUMNS.items():
        if any(marker in result for result in results):
            return _held(results, metrics)
    return _held(results, STOCK_METRICS)


def summary_metrics(results: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Return the lines of the summary for the flat `results` of a trial."""
    is_ours = any("episode" in result for result in results)
    if not is_ours:
        return _held(results, STOCK_METRICS)
    keys = sorted({key for result in results for key in result})
    metrics = [*SUMMARY_METRICS, *_drifts(keys), *_losses_of_rows(keys)]
    after = next(i for i, metric in enumerate(metrics) if metric.key == "eval/scores") + 1
    metrics[after:after] = _reward_parts(keys)
    silent = {INVALID.key, STALENESS.key, *(metric.key for metric in _losses_of_rows(keys))}
    return [
        metric
        for metric in _held(results, metrics)
        # 0 is as it should be.
        if metric.key not in silent or any(number(result.get(metric.key)) for result in results)
    ]


def _reward_parts(keys: Sequence[str]) -> list[Metric]:
    """What the reward is made of, where that is more than one thing."""
    parts = [key for key in keys if key.startswith("train/") and key.endswith("_rewards")]
    names = [key.removeprefix("train/").removesuffix("_rewards") for key in parts]
    return [Metric(k, f"  {n}") for k, n in zip(parts, names, strict=True) if len(parts) > 1]


def _drifts(keys: Sequence[str]) -> list[Metric]:
    """How far quantised models are from their unquantised weights."""
    found = (key.removeprefix("env/").partition("/drift/") for key in keys if "/drift/" in key)
    return [Metric(f"env/{a}{b}{c}", f"drift of {a}, {c}") for a, b, c in found]


def _losses_of_rows(keys: Sequence[str]) -> list[Metric]:
    """Shares of rows that a reward function failed on, or whose prompt was cut."""
    failed = [key for key in keys if key.startswith("env/") and key.endswith("_failed")]
    names = [key.removeprefix("env/").removesuffix("_failed") for key in failed]
    shares = [Metric(k, f"share on which {n} failed") for k, n in zip(failed, names, strict=True)]
    return [*shares, Metric("train/truncated_share", "share of prompts that were cut")]


def _held(results: Sequence[Mapping[str, Any]], metrics: Sequence[Metric]) -> list[Metric]:
    """Return those `metrics` that at least one of the `results` holds as a number."""
    return [m for m in metrics if any(number(r.get(m.key)) is not None for r in results)]


def progress(flat: Mapping[str, Any], stop: Mapping[str, Any]) -> float:
    """Return how far a trial is, 0 to 1, by the criterion of `stop` that is nearest.

    Only counters tell progress: a reward to be reached does not.
    """
    shares = [0.0]
    for key, limit in stop.items():
        value, bound = number(flat.get(key)), number(limit)
        if value is None or not bound or not _is_counter(key):
            continue
        shares.append(min(1.0, max(0.0, value / bound)))
    return max(shares)


def _is_counter(key: str) -> bool:
    name = key.rpartition("/")[2]
    return name in (
        "training_iteration",
        "time_total_s",
        "episode",
        "iterations_since_restore",
    ) or (name.startswith("num_") or name.endswith(("_total", "_lifetime")))


def first_and_last(rows: list[dict[str, Any]], metric: Metric) -> tuple[str, str]:
    """A metric at both ends of a run; of a single evaluation the end at which it was made."""
    if not metric.key.startswith("eval/"):
        values = [value for row in rows if (value := number(row.get(metric.key))) is not None]
        return metric.text(values[0]), metric.text(values[-1])
    made, values = fresh_series(rows, "training_iteration", metric.key)
    if len(values) > 1:
        return metric.text(values[0]), metric.text(values[-1])
    return (metric.text(values[0]), NONE) if made[0] == 0 else (NONE, metric.text(values[0]))
