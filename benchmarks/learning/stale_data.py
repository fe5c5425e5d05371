"""Learning from data of a fixed age under different corrections: the curves in one plot.

    python -m benchmarks.learning.stale_data [--age 4] [--iterations 60] [--seeds 3]
        [--lr 5e-4 1e-3]
                                    [--plot stale_data.png]

GRPO on one-digit sums after supervised training, in one process, in lockstep: from the `--age`-th
update on every batch was sampled by weights that are exactly so much older. JSON, one line for each
correction and learning rate: the share of right answers at the end (mean and standard deviation
over seeds, last five iterations), the lowest after the first ten iterations, and the mean curve.

    fresh       sampled with the newest weights
    plain       the ratio starts at the learner's own log-probs, and nothing weighs the data
    bypass      the clipped ratio is to the sampler's log-probs
    decoupled   the same start as plain, with importance weights, none of them bounded
    truncated   decoupled with weights truncated at 2
    masked      decoupled with tokens left out whose weight is not in 0.5 .. 2
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import ray

from rllib_llm import GRPOConfig, SFTConfig

UNBOUNDED = 1e30
CASES: dict[str, dict[str, Any]] = {
    "fresh": {},
    "plain": {"off_policy": "decoupled", "off_policy_weights": None},
    "bypass": {"off_policy": "bypass"},
    "decoupled": {"off_policy": "decoupled", "off_policy_upper": UNBOUNDED},
    "truncated": {"off_policy": "decoupled", "off_policy_upper": 2.0},
    "masked": {
        "off_policy": "decoupled", "off_policy_weights": "mask", "off_policy_lower": 0.5,
        "off_policy_upper": 2.0,
    },
}  # fmt: skip
TOYS = "rllib_llm.examples.arithmetic"


def supervised(folder: Path) -> Path:
    """A model that gets some of the sums right, as in tuned_examples/shared_arithmetic.yaml."""
    algorithm = (
        SFTConfig()
        .language_model(model=f"{TOYS}.build_model")
        .training(
            data=f"{TOYS}.sft_texts", train_batch_size_per_learner=64, max_length=16, lr=3e-3,
            lr_num_warmup_updates=10,
        )
        .build_algo()
    )  # fmt: skip
    for _ in range(100):
        algorithm.train()
    path = algorithm.export_model(folder / "sft")
    algorithm.stop()
    shutil.rmtree(algorithm.logdir, ignore_errors=True)
    return path


def curve(
    model: Path, case: str, age: int, lr: float, seed: int, num_iterations: int
) -> list[float]:
    """The share of right answers of each iteration's batch."""
    config = (
        GRPOConfig()
        .language_model(model=str(model))
        .environment("rllib_llm/Arithmetic-v0")
        .sampling(max_new_tokens=4, num_completions=8, log_samples_every=0)
        .training(
            train_batch_size_per_learner=256, minibatch_size=64, lr=lr, ref_kl_coeff=0.0,
            **CASES[case],
        )
        .streaming(max_staleness=0 if case == "fresh" else age)
        .debugging(seed=seed)
    )  # fmt: skip
    algorithm = config.build_algo()
    right = [algorithm.train()["train"]["correct_rewards"] for _ in range(num_iterations)]
    algorithm.stop()
    shutil.rmtree(algorithm.logdir, ignore_errors=True)
    return right


def summary(case: str, lr: float, curves: list[list[float]]) -> dict[str, Any]:
    ends = [statistics.mean(one[-5:]) for one in curves]
    return {
        "case": case, "lr": lr, "end": round(statistics.mean(ends), 3),
        "end_std": round(statistics.stdev(ends), 3) if len(ends) > 1 else 0.0,
        "lowest": round(min(min(one[10:] or one) for one in curves), 3),
        "curve": [round(statistics.mean(points), 3) for points in zip(*curves, strict=True)],
    }  # fmt: skip


def draw(found: list[dict[str, Any]], age: int, file: Path) -> None:
    """One panel for each learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = sorted({each["lr"] for each in found})
    figure, panels = plt.subplots(1, len(rates), figsize=(6 * len(rates), 4), squeeze=False)
    for panel, lr in zip(panels[0], rates, strict=True):
        for each in found:
            if each["lr"] == lr:
                panel.plot(each["curve"], label=each["case"])
        panel.set(title=f"learning rate {lr:g}", xlabel="iterations", ylabel="right answers")
        panel.legend()
    figure.suptitle(f"Learning from data that is {age} updates old")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--age", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, nargs="+", default=[5e-4, 1e-3])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = supervised(Path(folder))
        for lr in args.lr:
            for case in args.cases:
                curves = [
                    curve(model, case, args.age, lr, seed, args.iterations)
                    for seed in range(args.seeds)
                ]
                found.append(summary(case, lr, curves))
                print(json.dumps(found[-1]), flush=True)
    if args.plot:
        draw(found, args.age, args.plot)
    ray.shutdown()


if __name__ == "__main__":
    main()
