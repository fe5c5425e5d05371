"""The curves of a stage as one picture: small multiples over the episodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_llm.cli.trial_logs import fresh_series, read_results, series


@dataclass(frozen=True)
class Panel:
    """One small plot: a result over the episodes, with the held-out result beside it."""

    title: str
    unit: str
    key: str
    eval_key: str = ""


PANELS = (
    Panel("Reward", "score of the judge", "objective/scores", "eval/scores"),
    Panel("Gold score", "exact score, unseen by the policy", "env/gold_score", "eval/gold_score"),
    Panel("KL to the reference", "nats per completion", "objective/kl"),
    Panel("Pretraining loss", "nats per token", "loss/ptx_avg"),
    Panel("Entropy of the policy", "nats per token", "policy/entropy_avg"),
    Panel("Grammatical", "share of completions", "env/grammatical", "eval/grammatical"),
    Panel("Loss", "nats per token", "loss/sft", "eval/loss"),
    Panel("Loss", "nats per pair", "loss/reward_model", "eval/loss"),
    Panel("Accuracy", "share of pairs", "train/accuracy", "eval/accuracy"),
    Panel("Return", "mean over episodes", "env_runners/episode_return_mean"),
)
X_AXES = (
    ("episode", "episodes"),
    ("num_env_steps_sampled_lifetime", "environment steps"),
    ("training_iteration", "iterations"),
)
COLORS = ("#0b6e99", "#c4540a", "#3f7d20", "#8a3ffc", "#a2191f", "#6f6f6f")
MAX_COLUMNS = 3
SMOOTH_FROM = 20  # points


def plot_stage(title: str, trial_folders: list[Path], labels: list[str], file: Path) -> Path | None:
    """Draw the trials' results into the PNG `file`; None where there is nothing to draw."""
    trials = [read_results(folder) for folder in trial_folders]
    panels = [p for p in PANELS if any(len(series(t, X_AXES[2][0], p.key)[1]) > 1 for t in trials)]
    if not panels:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x_key, x_title = next(
        axis for axis in X_AXES if any(series(t, axis[0], axis[0])[0] for t in trials)
    )
    columns = min(MAX_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(3.6 * columns, 2.5 * rows + 0.5),
        squeeze=False,
        dpi=150,
        layout="constrained",
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        for index, results in enumerate(trials):
            color = COLORS[index % len(COLORS)]
            _draw(axis, results, panel, x_key, color, labels[index] if len(trials) > 1 else "")
        _dress(axis, panel)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel(x_title, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    if len(trials) > 1:
        handles, names = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", fontsize=8, frameon=False, ncols=3)
    figure.savefig(file)
    plt.close(figure)
    return file


def _draw(
    axis: Any, results: list[dict[str, Any]], panel: Panel, x_key: str, color: str, label: str
) -> None:
    xs, ys = series(results, x_key, panel.key)
    if not ys:
        return
    if len(ys) >= SMOOTH_FROM:
        axis.plot(xs, ys, color=color, alpha=0.25, linewidth=0.8)
        axis.plot(xs, _running_mean(ys, len(ys) // 10), color=color, linewidth=1.8, label=label)
    else:
        axis.plot(xs, ys, color=color, linewidth=1.8, label=label)
    if not panel.eval_key:
        return
    xs, ys = fresh_series(results, x_key, panel.eval_key)
    if ys:
        axis.plot(
            xs,
            ys,
            color=color,
            linestyle="none",
            marker="o",
            markersize=4,
            markerfacecolor="white",
            markeredgewidth=1.2,
        )
        axis.text(
            0.98,
            0.04,
            "○ held-out prompts",
            transform=axis.transAxes,
            fontsize=7,
            ha="right",
            color="#555555",
            fontfamily="DejaVu Sans",
        )


def _dress(axis: Any, panel: Panel) -> None:
    axis.set_title(panel.title, loc="left", fontsize=9, fontweight="bold")
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.tick_params(labelsize=7, length=2)
    axis.grid(color="#e5e5e5", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.margins(x=0.02)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#999999")


def _running_mean(values: list[float], window: int) -> list[float]:
    """Return the mean of each value and up to `window` before and after it."""
    half = max(1, window // 2)
    means = []
    for index in range(len(values)):
        near = values[max(0, index - half) : index + half + 1]
        means.append(sum(near) / len(near))
    return means
