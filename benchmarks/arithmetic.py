"""The arithmetic examples with several seeds each: share of right answers before and after.

    python benchmarks/arithmetic.py --seeds 0 1 2

Every `tuned_examples/arithmetic_*.yaml` runs as written, its stages in this process instead of
Tune's, and each seed seeds both stages. One JSON line for each run, then a table.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rllib_llm.algorithms.settings.schema import build_config
from rllib_llm.experiments.algorithms import algorithm_class
from rllib_llm.experiments.yaml_experiments import Experiment, fill, load
from rllib_llm.experiments.yaml_loader import read
from rllib_llm.tune.flat_results import flatten

FOLDER = Path(__file__).parents[1] / "tuned_examples"


def run_stage(experiment: Experiment, model_folder: Path) -> list[dict[str, Any]]:
    """The results of all iterations; the trained model goes to `model_folder`."""
    settings = {**experiment.config, **({"env": experiment.env} if experiment.env else {})}
    algo_class = algorithm_class(experiment.run, experiment.name)
    algorithm = build_config(algo_class, settings, experiment.name).build_algo()
    try:
        results = [flatten(algorithm.train()) for _ in range(experiment.stop["training_iteration"])]
        algorithm.export_model(model_folder)
    finally:
        algorithm.stop()
        shutil.rmtree(algorithm.logdir, ignore_errors=True)
    return results


def run_file(file: Path, seed: int, stages: dict[str, Path], folder: Path) -> dict[str, Any]:
    """One example with one seed. Stages that another example has run already are not repeated."""
    start, first, last, experiment = time.process_time(), 0.0, 0.0, None
    models: dict[str, str] = {}
    for experiment in load(read(file), file.name, (f"seed={seed}",)):
        key = repr((experiment.run, experiment.config, experiment.stop))
        experiment = fill(experiment, lambda reference, where: models[reference])
        if key not in stages or "sft.model" in key:
            stages[key] = folder / f"{len(stages)}"
            results = run_stage(experiment, stages[key])
            if experiment.pass_criteria:
                (metric,) = experiment.pass_criteria
                first, last = results[0][metric], results[-1][metric]
        models[f"{experiment.name}.model"] = str(stages[key])
    assert experiment is not None
    mark = next(iter(experiment.pass_criteria.values()))
    return {
        "example": file.stem,
        "seed": seed,
        "before": round(first, 3),
        "after": round(last, 3),
        "pass_mark": mark,
        "passed": last >= mark,
        "cpu_s": round(time.process_time() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--examples", nargs="+", default=["arithmetic_*"], help="name patterns")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    files = sorted(file for name in args.examples for file in FOLDER.glob(f"{name}.yaml"))
    stages: dict[str, Path] = {}
    rows: dict[str, list[dict[str, Any]]] = {file.stem: [] for file in files}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for file in files:
                rows[file.stem].append(run_file(file, seed, stages, Path(folder)))
                print(json.dumps(rows[file.stem][-1]), flush=True)
    print("\n| example | before | after | pass mark | CPU-s |\n|---|---|---|---|---|")
    for name, runs in rows.items():
        cells = [
            "/".join(f"{run[key]:.2f}"[1:] if run[key] < 1 else "1" for run in runs)
            for key in ("before", "after")
        ]
        seconds = max(run["cpu_s"] for run in runs)
        print(f"| {name} | {' | '.join(cells)} | {runs[0]['pass_mark']} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
