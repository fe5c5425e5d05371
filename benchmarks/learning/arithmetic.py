"""The arithmetic examples with several seeds each: share of right answers before and after.

    python -m benchmarks.learning.arithmetic --seeds 0 1 2
    python -m benchmarks.learning.arithmetic --examples arithmetic_grpo arithmetic_ppo \\
        --precisions float32 bf16 --plot benchmarks/figures/bf16_learning.png

Every `tuned_examples/arithmetic_*.yaml` runs as written, its stages in this process instead of
Tune's, and each seed seeds both stages. With `--precisions` the last stage runs in each of them,
from the same model. One JSON line for each run, then a table.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rllib_llm.config.schema import checked_config
from rllib_llm.runs.experiments import Experiment, algorithm_class, fill
from rllib_llm.runs.results import flatten
from rllib_llm.runs.yaml_loader import load, read
from rllib_llm.shared.errors import report

PRECISIONS = ("float32", "bf16")
FOLDER = Path(__file__).parents[2] / "tuned_examples"


def run_stage(experiment: Experiment, model_folder: Path) -> list[dict[str, Any]]:
    """The results of all iterations; the trained model goes to `model_folder`."""
    settings = {**experiment.config, **({"env": experiment.env} if experiment.env else {})}
    algo_class = algorithm_class(experiment.run, experiment.name)
    config, found = checked_config(algo_class, settings)
    report(found)
    algorithm = config.build_algo()
    try:
        results = [flatten(algorithm.train()) for _ in range(experiment.stop["training_iteration"])]
        algorithm.export_model(model_folder)
    finally:
        algorithm.stop()
        shutil.rmtree(algorithm.logdir, ignore_errors=True)
    return results


def run_file(
    file: Path, seed: int, precision: str, stages: dict[str, Path], folder: Path
) -> dict[str, Any]:
    """One example with one seed. Stages that another example has run already are not repeated."""
    start, experiment = time.process_time(), None
    curve: list[float] = []
    models: dict[str, str] = {}
    overrides = [f"seed={seed}"]
    if precision != "float32":
        *_, last = load(read(file), file.name, ())
        overrides.append(f"{last.name}.mixed_precision={precision}")
    for experiment in load(read(file), file.name, tuple(overrides)):
        key = repr((experiment.run, experiment.config, experiment.stop))
        experiment = fill(experiment, lambda reference, where: models[reference])
        if key not in stages or "sft.model" in key:
            stages[key] = folder / f"{len(stages)}"
            results = run_stage(experiment, stages[key])
            if experiment.pass_criteria:
                (metric,) = experiment.pass_criteria
                curve = [result[metric] for result in results]
        models[f"{experiment.name}.model"] = str(stages[key])
    assert experiment is not None
    mark = next(iter(experiment.pass_criteria.values()))
    return {
        "example": file.stem,
        "seed": seed,
        "precision": precision,
        "before": round(curve[0], 3),
        "after": round(curve[-1], 3),
        "last_ten": round(statistics.mean(curve[-10:]), 3),
        "pass_mark": mark,
        "passed": curve[-1] >= mark,
        "curve": [round(share, 3) for share in curve],
        "cpu_s": round(time.process_time() - start, 1),
    }


def draw(rows: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """A panel for each example, a line for each run, a colour for each precision."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    examples = list(dict.fromkeys(run["example"] for runs in rows.values() for run in runs))
    figure, axes = pyplot.subplots(1, len(examples), figsize=(5 * len(examples), 3.5), sharey=True)
    colours: dict[str, str] = {}
    for runs in rows.values():
        for run in runs:
            axis = axes[examples.index(run["example"])] if len(examples) > 1 else axes
            colour = colours.setdefault(run["precision"], f"C{len(colours)}")
            label = run["precision"] if run is runs[0] else None
            axis.plot(run["curve"], color=colour, label=label, linewidth=0.9)
            axis.set_title(run["example"])
            axis.set_xlabel("iteration")
            axis.grid(alpha=0.3)
            axis.legend()
    figure.supylabel("share of right answers")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def print_table(rows: dict[str, list[dict[str, Any]]]) -> None:
    print("\n| example | before | after | last ten, mean ± sd | pass mark | CPU-s |")
    print("|---|---|---|---|---|---|")
    for name, runs in rows.items():
        cells = [
            "/".join(f"{run[key]:.2f}"[1:] if run[key] < 1 else "1" for run in runs)
            for key in ("before", "after")
        ]
        ends = [run["last_ten"] for run in runs]
        spread = statistics.stdev(ends) if len(ends) > 1 else 0.0
        cells.append(f"{statistics.mean(ends):.3f} ± {spread:.3f}")
        seconds = max(run["cpu_s"] for run in runs)
        print(f"| {name} | {' | '.join(cells)} | {runs[0]['pass_mark']} | {seconds:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--examples", nargs="+", default=["arithmetic_*"], help="name patterns")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["float32"])
    parser.add_argument("--plot", type=Path, help="where the curves are drawn")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    files = sorted(file for name in args.examples for file in FOLDER.glob(f"{name}.yaml"))
    stages: dict[str, Path] = {}
    names = {(f.stem, p): f.stem if p == "float32" else f"{f.stem}, {p}"
             for f in files for p in args.precisions}  # fmt: skip
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for file in files:
                for precision in args.precisions:
                    run = run_file(file, seed, precision, stages, Path(folder))
                    rows[names[file.stem, precision]].append(run)
                    print(json.dumps(run), flush=True)
    print_table(rows)
    if args.plot is not None:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
