"""Population-based training beside fixed settings, at equal total samples.

    python -m benchmarks.runs.pbt --folder /somewhere/pbt --out benchmarks/figures/pbt.png

Runs the example `reviews_pbt` with three more stages: as many trials of PPO-ptx's default
settings, of those of `reviews_ppo_ptx.yaml`, which were found by hand, and of settings drawn at
random from the population's own ranges, which are the baseline: a search of the same space with the
same samples. Each trial has a seed of its own, all start from the same SFT and reward model. An
unfinished run in the folder is continued, a finished one only read. Prints a table and draws the
settings that every trial used, iteration by iteration.

The ranges lie around what was found by hand and leave the defaults out: a learning rate of 1e-5
and no pretraining loss are not in them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from rllib_llm.runs.results import read_results

EXAMPLES = Path(__file__).parents[2] / "tuned_examples"
SETTINGS = ("lr", "ref_kl_coeff", "clip_param", "ptx_coeff")
LABELS = {"lr": "learning rate", "ref_kl_coeff": "β", "clip_param": "ε", "ptx_coeff": "γ_ptx"}
LAST = 4  # iterations over which the end is averaged
# Stages of fixed settings, and their lines.
FIXED = {"random_search": "--", "defaults": ":", "by_hand": "-"}


def merged_file(num_trials: int, num_iterations: int, interval: int) -> dict[str, Any]:
    """The example's stages and those of `FIXED`, which change nothing on the way."""
    stages = yaml.safe_load((EXAMPLES / "reviews_pbt.yaml").read_text(encoding="utf-8"))
    tuned = yaml.safe_load((EXAMPLES / "reviews_ppo_ptx.yaml").read_text(encoding="utf-8"))
    search = stages["pbt"]
    search["stop"] = {"training_iteration": num_iterations}
    search["num_samples"] = num_trials
    search["scheduler_config"]["perturbation_interval"] = interval
    by_hand = {key: tuned["ppo"]["config"][key] for key in SETTINGS if key != "clip_param"}
    seeds = {"grid_search": list(range(num_trials))}
    unscheduled = {key: search[key] for key in search if not key.startswith("scheduler")}
    for name, settings in (("defaults", {}), ("by_hand", by_hand)):
        config = {**search["config"], **settings, "seed": seeds}
        stages[name] = {**unscheduled, "num_samples": 1, "config": config}
    drawn = search["scheduler_config"]["hyperparam_mutations"]
    config = {**search["config"], **drawn, "seed": {"randint": [0, 1000]}}
    stages["random_search"] = {**unscheduled, "config": config}
    return stages


def train(stages: dict[str, Any], folder: Path) -> None:
    """Runs the stages in `folder`, or goes on with them."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "stages.yaml"
    resume = ["--resume"] if (folder / "run").is_dir() else []
    file.write_text(yaml.safe_dump(stages, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "rllib_llm.cli.main", "train", "file", str(file)]
    options = ["--storage-path", str(folder), "--experiment-name", "run", *resume]
    subprocess.run([*command, *options], check=True)


def trials_of(stage: Path) -> list[list[dict[str, Any]]]:
    """The results of every trial of a stage, in the order in which they were made."""
    return [read_results(file.parent) for file in sorted(stage.glob("*/result.json"))]


def at_the_end(trial: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(result[name] for result in trial[-LAST:])


def print_table(stages: dict[str, list[list[dict[str, Any]]]]) -> None:
    print("| | trials × completions | gold score, mean | best | grammatical | KL | ptx loss |")
    print("|---|---|---|---|---|---|---|")
    for name, trials in stages.items():
        gold = [at_the_end(trial, "env/gold_score") for trial in trials]
        rest = [
            statistics.mean(at_the_end(trial, key) for trial in trials)
            for key in ("env/grammatical", "objective/kl", "loss/ptx_avg")
        ]
        size = f"{len(trials)} × {trials[0][-1]['episode']}"
        print(f"| {name} | {size} | {statistics.mean(gold):.2f} | {max(gold):.2f} | "
              f"{rest[0]:.2f} | {rest[1]:.2f} | {rest[2]:.2f} |")  # fmt: skip


def points(trial: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Iterations and values, with a gap where the trial went on from another one's checkpoint."""
    xs: list[float] = []
    ys: list[float] = []
    for row in trial:
        if key not in row:
            continue
        if xs and row["training_iteration"] <= xs[-1]:
            xs.append(math.nan)
            ys.append(math.nan)
        xs.append(row["training_iteration"])
        ys.append(row[key])
    return xs, ys


def draw(stages: dict[str, list[list[dict[str, Any]]]], out: Path) -> None:
    """One panel per setting, and the score; a line per trial, the fixed ones grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {**{f"effective/{name}": LABELS[name] for name in SETTINGS},
              "env/gold_score": "gold score"}  # fmt: skip
    figure, axes = pyplot.subplots(len(panels), 1, sharex=True, figsize=(7, 10))
    for axis, (key, label) in zip(axes, panels.items(), strict=True):
        for name, trials in stages.items():
            for trial in trials:
                axis.plot(
                    *points(trial, key),
                    **(
                        {"color": "grey", "linewidth": 0.8, "linestyle": FIXED[name]}
                        if name in FIXED
                        else {}
                    ),
                )  # fmt: skip
        axis.set_ylabel(label)
        if key.startswith("effective/"):
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("iteration")
    axes[0].set_title(
        "what optimiser and loss used\ngrey: fixed settings, dotted: the defaults, dashed: drawn"
    )
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--out", type=Path, default=Path("pbt.png"))
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=32)
    parser.add_argument("--interval", type=int, default=8, help="iterations between mutations")
    args = parser.parse_args()
    run = args.folder / "run"
    if not (run / "random_search" / "stage.json").is_file():
        train(merged_file(args.trials, args.iterations, args.interval), args.folder)
    stages = {name: trials_of(run / name) for name in ("pbt", *FIXED)}
    print_table(stages)
    draw(stages, args.out)
    mutations = run / "pbt" / "pbt_global.txt"
    lines = mutations.read_text(encoding="utf-8").splitlines() if mutations.is_file() else []
    for target, source, *_, new in map(json.loads, lines):
        changed = {name: float(f"{new[name]:.3g}") for name in SETTINGS}
        print(f"{target} goes on from {source}: {changed}")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
