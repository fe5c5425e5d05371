"""Whole iterations beside TRL's: the same model, prompts, batch and settings, turn by turn.

    export RLHF_ASSETS=/somewhere
    python ../shared/bench/bench_trl.py --make_assets      # once
    python -m benchmarks.loop.iteration --peer_python /venv/with/trl/bin/python \\
        --peer_ppo_path /folder/with/trl/1.12 --cases grpo_full rloo_full ppo_full grpo_mixed

Each side runs in a process of its own, in turn, `--rounds` times; a process takes `--steps`
iterations and reports medians without the first. One JSON line per case: completions per CPU-second
of both and their ratio, with generation, scoring (judge, reference, old log-probs and values) and
training apart, and peak memory.

`--precision bf16` has ours compute so (`mixed_precision`) and runs the peer in float32 and with its
`bf16=True`; the ratios are to the better of the two, which the line names. Skipped where the
processor has neither AMX nor AVX512-BF16.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import last_json_line
from benchmarks.loop.peer_task import (
    Task,
    import_bench,
    make_config,
    make_mixed_assets,
    model_folders,
)
from rllib_llm.shared.process import multiplies_bfloat16

SPANS = ("generate", "score", "train", "total")
THEIR_NAMES = {"generate": "gen", "score": "score", "train": "train", "total": "total"}
HIDDEN, LAYERS = 256, 4


@dataclass(frozen=True)
class Case:
    """`vocab`: of the policy; `mixed`: completions end by EOS, about 24 tokens long, else at the
    limit (random weights draw EOS once in `vocab` tokens)."""

    task: Task
    vocab: int = 2048
    mixed: bool = False


_FULL = Task("grpo", 0.0, prompt_len=32, completion_len=64, reward="char")
CASES = {
    "grpo_full": Case(_FULL),
    "rloo_full": Case(replace(_FULL, algo="rloo", beta=0.05)),
    # One trunk for policy and value, which TRL does not offer.
    "ppo_full": Case(replace(_FULL, algo="ppo", beta=0.05, critic="shared")),
    "ppo_two_trunks": Case(replace(_FULL, algo="ppo", beta=0.05)),
    # A small learning rate leaves the lengths as they are.
    "grpo_mixed": Case(replace(_FULL, lr=1e-6), vocab=32_000, mixed=True),
}


def run_ours(case: Case, bench: Any, folder: Path, steps: int) -> dict[str, Any]:
    """Medians over iterations, in this process."""
    import ray
    import torch

    from benchmarks.common import Stopwatch, add

    if "RAY_ADDRESS" not in os.environ:
        ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=2**27)
    torch.set_num_threads(1)
    policy = f"sft_{HIDDEN}_{LAYERS}"
    if not case.mixed:  # the script writes its random model on first use
        bench.build_policy(HIDDEN, LAYERS, "random", case.task.seed)
        policy = f"random_{HIDDEN}_{LAYERS}_{case.vocab}_{case.task.seed}"
    names = {"policy": policy}
    if case.task.algo == "ppo":
        names["rm"] = f"rm_{HIDDEN}_{LAYERS}"
    model_folders(bench, folder, names)
    watch = Stopwatch()
    config = make_config(bench, folder, case.task)
    config.env_runners(env_runner_cls=watch.timed_runner(config.get_default_env_runner_class()))
    learner_class = config.get_default_learner_class()
    config.learners(learner_class=watch.timed_class(learner_class, {"prepare": "prepare"}))
    algorithm = config.build_algo()
    iterations, lengths = [], []
    for _ in range(steps):
        with watch.span("train"):
            result = algorithm.train()
        spans = watch.take()
        spans["score"] = add(spans.pop("judge"), spans.pop("prepare"))
        spans["total"] = add(*spans.values())
        iterations.append(spans)
        lengths.append(result["train"]["output_length"])
    algorithm.stop()
    return {
        "seconds": {n: [_median([i[n][k] for i in iterations[1:]]) for k in (0, 1)] for n in SPANS},
        "mean_length": round(statistics.mean(lengths[1:]), 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def run_peer(
    case: Case, args: argparse.Namespace, environ: dict[str, str], precision: str
) -> dict[str, Any]:
    """The same from the peer's script."""
    task = case.task
    command = [
        args.peer_python, str(Path(args.bench_dir) / "bench_trl.py"), "--algo", task.algo,
        "--steps", str(args.steps), "--batch", str(task.batch),
        "--num_generations", str(task.group), "--minibatch", str(task.minibatch),
        "--epochs", str(task.epochs), "--prompt_len", str(task.prompt_len),
        "--completion_len", str(task.completion_len), "--threads", "1", "--lr", str(task.lr),
        "--beta", str(task.beta), "--reward", task.reward, "--seed", str(task.seed),
        "--init", "sft" if case.mixed else "random",
    ]  # fmt: skip
    if args.peer_ppo_path:
        command += ["--trl_ppo_path", args.peer_ppo_path]
    if precision == "bf16":
        command.append("--bf16")
    line = last_json_line(command, environ)
    seconds = line["median_iter_seconds[wall,cpu]"]
    return {
        "name": f"{line['impl']} {precision}",
        "seconds": {name: seconds[THEIR_NAMES[name]] for name in SPANS},
        "mean_length": round(line["mean_completion_len"], 1),
        "peak_rss_mb": round(line["peak_rss_mb"]),
    }


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turn; ratios are medians over the rounds of theirs to ours."""
    case = CASES[name]
    ours: list[dict[str, Any]] = []
    peers: dict[str, list[dict[str, Any]]] = {precision: [] for precision in _peer_precisions(args)}
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if case.mixed:
            bench = import_bench(args.bench_dir)
            make_mixed_assets(bench, Path(folder), case.vocab, HIDDEN, LAYERS)
            environ["RLHF_ASSETS"] = folder
        own = [sys.executable, "-m", "benchmarks.loop.iteration", "--side", name,
               "--steps", str(args.steps), "--bench_dir", args.bench_dir,
               "--precision", args.precision]  # fmt: skip
        for _ in range(args.rounds):
            ours.append(last_json_line(own, environ))
            for precision, rounds in peers.items():
                rounds.append(run_peer(case, args, environ, precision))
    line: dict[str, Any] = {
        "case": name, "precision": args.precision, "rounds": args.rounds,
        "ours": _summary(case, ours),
    }  # fmt: skip
    for rounds in peers.values():
        line[rounds[0]["name"]] = _summary(case, rounds)
    if peers:
        theirs = min(peers.values(), key=lambda rounds: _summary(case, rounds)["cpu_s"]["total"])
        line["ratios_to"] = theirs[0]["name"]
        for span in SPANS:
            for k, unit in enumerate(("wall", "cpu")):
                pairs = zip(ours, theirs, strict=True)
                ratios = [their["seconds"][span][k] / our["seconds"][span][k]
                          for our, their in pairs]  # fmt: skip
                line[f"ratio_{span}_{unit}"] = round(statistics.median(ratios), 2)
        line["ratio_memory"] = round(
            _median([t["peak_rss_mb"] for t in theirs]) / _median([o["peak_rss_mb"] for o in ours]),
            2,
        )
    return line


def _peer_precisions(args: argparse.Namespace) -> list[str]:
    """Those in which the peer is run; the better one counts."""
    if not args.peer_python:
        return []
    return ["float32"] if args.precision == "float32" else ["float32", "bf16"]


def _summary(case: Case, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    cpu = {s: round(_median([r["seconds"][s][1] for r in rounds]), 3) for s in SPANS}
    return {
        "samples_per_cpu_s": round(case.task.batch / cpu["total"], 2),
        "cpu_s": cpu,
        "mean_length": round(_median([r["mean_length"] for r in rounds]), 1),
        "peak_rss_mb": _median([r["peak_rss_mb"] for r in rounds]),
    }


def _median(values: list[float]) -> float:
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bench_dir", default="../shared/bench", help="folder of bench_trl.py")
    parser.add_argument("--peer_python", help="interpreter with TRL; without it: ours alone")
    parser.add_argument("--peer_ppo_path", help="folder with TRL 1.12, whose PPO is the last")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--side", choices=CASES, help=argparse.SUPPRESS)  # one process of ours
    args = parser.parse_args()
    if not (Path(args.bench_dir) / "bench_trl.py").is_file():
        print(f"skipped: {args.bench_dir!r} holds no bench_trl.py; say where with --bench_dir")
        return
    if args.precision == "bf16" and not multiplies_bfloat16():
        print("skipped: the processor has neither AMX nor AVX512-BF16")
        return
    if args.side is None:
        for name in args.cases:
            print(json.dumps(compare(name, args)), flush=True)
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    bench = import_bench(args.bench_dir)
    with tempfile.TemporaryDirectory() as folder:
        case = CASES[args.side]
        if args.precision == "bf16":
            case = replace(case, task=replace(case.task, mixed_precision="bf16"))
        print(json.dumps(run_ours(case, bench, Path(folder), args.steps)))


if __name__ == "__main__":
    main()
