"""Learning curves at equal samples, on the task of a peer's benchmark script.

    export RLHF_ASSETS=/somewhere
    python ../shared/bench/bench_trl.py --make_assets      # once
    python -m benchmarks.learning.curves --algos grpo rloo ppo --betas 0 --seeds 0 1 2

`bench_trl.py` (found in `--bench_dir`) trains TRL's GRPO, RLOO and PPO on a language it makes
itself, and can be imported without TRL. Tokenizer, policy after SFT, reward model, prompts and the
reward are its own; batch, mini-batch, epochs, lengths, learning rate, optimiser and clipping those
with which it calls TRL. Each run prints one JSON line; a table of all runs follows.
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

from benchmarks.loop.peer_task import CONFIGS, Task, import_bench, make_config, model_folders

BATCH = 64  # completions of an iteration
POINTS = (320, 640)  # samples at which the table reads the curve


def run(bench: Any, folder: Path, algo: str, beta: float, seed: int, steps: int) -> dict[str, Any]:
    """The curve of one run: mean score of each iteration's completions, before its update."""
    config = make_config(bench, folder, Task(algo, beta, seed, batch=BATCH))
    cpu = time.process_time()
    algorithm = config.build_algo()
    try:
        results = [algorithm.train() for _ in range(steps)]
    finally:
        algorithm.stop()
        shutil.rmtree(algorithm.logdir, ignore_errors=True)
    curve = [result["train"]["lexicon_rewards"] for result in results]
    return {
        "algo": algo,
        "beta": beta,
        "seed": seed,
        **{f"at_{samples}": round(read_curve(curve, samples), 4) for samples in POINTS},
        "last_3": round(statistics.mean(curve[-3:]), 4),
        "curve": [round(score, 4) for score in curve],
        "kl": [round(result["objective"]["kl"], 2) for result in results],
        "mean_len": [round(result["train"]["output_length"], 1) for result in results],
        "cpu_s": round(time.process_time() - cpu, 1),
    }


def read_curve(curve: list[float], samples: int) -> float:
    """Mean of the three iterations around the one sampled after learning from so many samples."""
    index = samples // BATCH
    return statistics.mean(curve[index - 1 : index + 2])


def print_table(rows: list[dict[str, Any]]) -> None:
    print("\n| | " + " | ".join(f"N = {n}" for n in POINTS) + " | last 3 |")
    print("|---|" + "---|" * (len(POINTS) + 1))
    for algo, beta in dict.fromkeys((row["algo"], row["beta"]) for row in rows):
        runs = [row for row in rows if (row["algo"], row["beta"]) == (algo, beta)]
        cells = [
            "/".join(f"{run[key]:.2f}".replace("0.", ".") for run in runs)
            for key in (*(f"at_{n}" for n in POINTS), "last_3")
        ]
        print(f"| {algo.upper()} β {beta:g} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bench_dir", default="../shared/bench", help="folder of bench_trl.py")
    parser.add_argument("--algos", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--betas", nargs="+", type=float, default=[0.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=14, help="iterations of 64 completions")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if not (Path(args.bench_dir) / "bench_trl.py").is_file():
        print(f"skipped: {args.bench_dir!r} holds no bench_trl.py; say where with --bench_dir")
        return
    bench = import_bench(args.bench_dir)
    names = {"policy": "sft_256_4"} | ({"rm": "rm_256_4"} if "ppo" in args.algos else {})
    if not all((Path(bench.ASSETS) / name).is_dir() for name in names.values()):
        print(f"skipped: {bench.ASSETS!r} holds no models; run bench_trl.py --make_assets first")
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model_folders(bench, Path(folder), names)
        for algo in args.algos:
            for beta in args.betas:
                for seed in args.seeds:
                    rows.append(run(bench, Path(folder), algo, beta, seed, args.steps))
                    print(json.dumps(rows[-1]), flush=True)
    print_table(rows)


if __name__ == "__main__":
    main()
