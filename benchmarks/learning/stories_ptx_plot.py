"""Draw what pretraining loss (ptx) is for: held-out score and held-out pretraining loss of the
trials of `tuned_examples/stories_sentiment.yaml`, side by side.

    python -m benchmarks.learning.stories_ptx_plot RUN_FOLDER \\
        --out benchmarks/figures/stories_ptx.png

Prints the same figures as a table, and some held-out prompts before and after with --stories.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rllib_llm.rollouts.recorder import SAMPLES_FILE
from rllib_llm.runs.results import before_and_after, fresh_series, read_json_lines, read_results

STAGE = "stories"
COLORS = ("#c4540a", "#0b6e99")
GREY = "#666666"
LARGEST_RISE = 0.1  # nats per token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the run, as `rllib train` printed it")
    parser.add_argument("--out", type=Path, default=Path("stories_ptx.png"))
    parser.add_argument("--stories", type=int, default=0, help="held-out prompts to print")
    arguments = parser.parse_args()
    trials = [Trial(folder) for folder in trial_folders(arguments.run / STAGE)]
    trials.sort(key=lambda trial: trial.ptx_coeff)
    for trial in trials:
        print(trial.summary())
    draw(trials, arguments.out)
    print(f"wrote {arguments.out}")
    for before, after in trials[-1].pairs[: arguments.stories]:
        print(f"\n[{before['prompt']}]{before['completion']}   ({before['score']:+.2f})")
        print(f"[{after['prompt']}]{after['completion']}   ({after['score']:+.2f})")


def trial_folders(stage: Path) -> list[Path]:
    """Folders below `stage` that hold results, at least one."""
    folders = sorted(path.parent for path in stage.glob("*/result.json"))
    if not folders:
        raise SystemExit(
            f"run={str(stage.parent)!r} must hold results in {stage.name}/*/result.json: there are "
            "none. Give the folder that `rllib train file` printed."
        )
    return folders


class Trial:
    """Held-out results of one trial, over its episodes."""

    def __init__(self, folder: Path) -> None:
        results = read_results(folder)
        config: dict[str, Any] = json.loads((folder / "params.json").read_text(encoding="utf-8"))
        self.ptx_coeff = float(config["ptx_coeff"])
        self.episodes, self.scores = fresh_series(results, "episode", "eval/scores")
        _, self.ptx_loss = fresh_series(results, "episode", "eval/ptx_loss")
        self.std = fresh_series(results, "episode", "eval/scores_std")[1][0]
        self.seconds = results[-1]["time_total_s"]
        self.kl = results[-1]["objective/kl"]
        self.pairs = before_and_after(read_json_lines(folder / SAMPLES_FILE))

    @property
    def gains(self) -> list[float]:
        """Rise of the mean held-out score, in standard deviations of the untouched model's."""
        return [(score - self.scores[0]) / self.std for score in self.scores]

    @property
    def rises(self) -> list[float]:
        """Rise of the held-out pretraining loss, nats per token."""
        return [loss - self.ptx_loss[0] for loss in self.ptx_loss]

    def summary(self) -> str:
        return (
            f"ptx_coeff={self.ptx_coeff:g}: {self.episodes[-1]:.0f} episodes in "
            f"{self.seconds:.0f} s; score {self.scores[0]:.2f} -> {self.scores[-1]:.2f} (std of "
            f"the untouched model's {self.std:.2f}: +{self.gains[-1]:.2f} std); pretraining loss "
            f"{self.ptx_loss[0]:.3f} -> {self.ptx_loss[-1]:.3f} (+{self.rises[-1]:.3f} nats per "
            f"token); KL {self.kl:.1f} nats per completion"
        )


def draw(trials: list[Trial], file: Path) -> None:
    """Two panels over the episodes: score gained, pretraining loss paid for it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.5), dpi=150, layout="constrained")
    for trial, color in zip(trials, COLORS, strict=False):
        label = "without ptx" if trial.ptx_coeff == 0 else f"with ptx ({trial.ptx_coeff:g})"
        line = {"color": color, "marker": "o", "markersize": 4, "linewidth": 1.8, "label": label}
        left.plot(trial.episodes, trial.gains, **line)
        right.plot(trial.episodes, trial.rises, **line)
    _dress(left, "Score of held-out stories", "standard deviations gained", 1.0, "wanted: 1")
    _dress(
        right, "Loss on held-out pretraining text", "nats per token lost", LARGEST_RISE,
        f"allowed: {LARGEST_RISE:g}",
    )  # fmt: skip
    left.legend(loc="upper left", fontsize=8, frameon=False)
    figure.suptitle(
        "Steering stories to positive sentiment", x=0.01, ha="left", fontsize=11, fontweight="bold"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


def _dress(axis: Any, title: str, unit: str, limit: float, limit_label: str) -> None:
    axis.axhline(limit, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
    axis.annotate(
        limit_label, (1.0, limit), xycoords=("axes fraction", "data"), xytext=(0, 3),
        textcoords="offset points", ha="right", fontsize=7, color=GREY,
    )  # fmt: skip
    axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axis.set_ylabel(unit, fontsize=8)
    axis.set_xlabel("episodes", fontsize=8)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    axis.tick_params(labelsize=7, length=2)
    axis.grid(color="#e5e5e5", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
