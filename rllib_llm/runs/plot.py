"""The curves of a stage as one picture: small multiples over the episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_llm.runs.trial_logs import fresh_series, read_results, series
from rllib_llm.shared.storage import Place


@dataclass(frozen=True)
class Panel:
    """One small plot: a result over the episodes, with the held-out result."""

    title: str
    unit: str
    key: str
    eval_key: str = ""
    is_share: bool = False


PANELS = (
    Panel("Reward", "judge's score", "objective/scores", "eval/scores"),
    Panel("Gold score", "exact score", "env/gold_score", "eval/gold_score"),
    Panel("KL to the reference", "nats per completion", "objective/kl"),
    Panel("Pretraining loss", "nats per token", "loss/ptx_avg", "eval/ptx_loss"),
    Panel("Entropy of the policy", "nats per token", "policy/entropy_avg"),
    Panel("Grammatical", "share", "env/grammatical", "eval/grammatical", is_share=True),
    Panel("Turns", "per conversation", "env/num_turns", "eval/num_turns"),
    Panel("Tool calls", "per conversation", "env/num_tool_calls", "eval/num_tool_calls"),
    Panel("Loss", "nats per token", "loss/sft", "eval/loss"),
    Panel("Loss", "nats per pair", "loss/reward_model", "eval/loss"),
    Panel("Pairs ordered rightly", "share", "train/accuracy", "eval/accuracy", is_share=True),
)
STOCK_PANELS = (Panel("Return", "mean over episodes", "env_runners/episode_return_mean"),)
X_AXIS = ("episode", "episodes")
STOCK_X_AXIS = ("num_env_steps_sampled_lifetime", "environment steps")
COLORS = ("#0b6e99", "#c4540a", "#3f7d20", "#8a3ffc", "#a2191f", "#6f6f6f")
MAX_COLUMNS = 3
SMOOTH_FROM = 20  # points
MARKED_UP_TO = 6
LEGEND_CHARS = 52  # that fit under a column of plots
LEGEND_LINE_CHARS = 8  # the space of a line in its colour


def plot_stage(
    title: str, trial_folders: list[Place], labels: list[str], file: Path
) -> Path | None:
    """Draw the trials' results into the PNG `file`; None where there is nothing to draw."""
    trials = [read_results(folder) for folder in trial_folders]
    is_ours = any("episode" in result for results in trials for result in results)
    x_key, x_title = X_AXIS if is_ours else STOCK_X_AXIS
    known = [*(PANELS if is_ours else STOCK_PANELS)]
    known += part_panels([result for results in trials for result in results])
    panels = [p for p in known if any(len(series(t, x_key, p.key)[1]) > 1 for t in trials)]
    if not panels:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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
        figure.legend(
            handles, names, loc="outside lower left", fontsize=8, frameon=False,
            ncols=max(1, LEGEND_CHARS * columns // (max(map(len, names)) + LEGEND_LINE_CHARS)),
        )  # fmt: skip
    figure.savefig(file)
    plt.close(figure)
    return file


def part_panels(results: Sequence[Mapping[str, Any]]) -> tuple[Panel, ...]:
    """One panel for each part of a reward, where there are several."""
    keys = sorted({key for result in results for key in result})
    parts = [key for key in keys if key.startswith("train/") and key.endswith("_rewards")]
    names = [key.removeprefix("train/").removesuffix("_rewards") for key in parts]
    if len(parts) < 2:
        return ()
    return tuple(
        Panel(f"Reward: {name}", "before its weight", key, key.replace("train/", "eval/"))
        for key, name in zip(parts, names, strict=True)
    )


def _draw(
    axis: Any, results: list[dict[str, Any]], panel: Panel, x_key: str, color: str, label: str
) -> None:
    xs, ys = series(results, x_key, panel.key)
    if not ys:
        return
    if len(ys) >= SMOOTH_FROM:
        axis.plot(xs, ys, color=color, alpha=0.25, linewidth=0.8)
        axis.plot(xs, _running_mean(ys, len(ys) // 10), color=color, linewidth=1.8, label=label)
    else:  # a line through two points does not say where they are
        axis.plot(
            xs, ys, color=color, linewidth=1.8, label=label,
            marker="o" if len(ys) <= MARKED_UP_TO else None, markersize=4,
        )  # fmt: skip
    if not panel.eval_key:
        return
    xs, ys = fresh_series(results, x_key, panel.eval_key)
    if ys:
        axis.plot(
            xs, ys, "o", color=color, markersize=4, markerfacecolor="white", clip_on=False, zorder=3
        )
        axis.set_title("○ held out", loc="right", fontsize=7, color="#555555")


def _dress(axis: Any, panel: Panel) -> None:
    axis.set_title(panel.title, loc="left", fontsize=9, fontweight="bold")
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.tick_params(labelsize=7, length=2)
    axis.grid(color="#e5e5e5", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.margins(x=0.02)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlim(left=0)
    if panel.is_share:
        axis.set_ylim(-0.02, 1.02)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#999999")


def _running_mean(values: list[float], window: int) -> list[float]:
    """Return the mean of each value and as many before as after it, `window` in all where there are
    so many: the first and the last value are themselves."""
    half = max(1, window // 2)
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        near = values[index - reach : index + reach + 1]
        means.append(sum(near) / len(near))
    return means
