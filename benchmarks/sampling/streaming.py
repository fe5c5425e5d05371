"""Wall time of synchronous and streaming runs where completions have lengths of a long tail.

    python -m benchmarks.sampling.streaming [--iterations 24] [--seeds 3] [--step-ms 4]
        [--mean-steps 40]
                                   [--modes sync lockstep-1 free-1 free-2-oversampled]
                                   [--judge-ms 0] [--prompts 32]

GRPO on one-digit sums with two samplers, after supervised training. Decode time is emulated, so
that two cores can show it: a step of a sampler takes `--step-ms`, however many rows are in its
batch, and a completion is over after a number of steps drawn from a log-normal distribution (sigma
1) by its prompt and its place, which stands for long answers and for pauses of tools; the tokens
themselves are sampled by the real model within that time. Groups are judged by a coroutine that
waits for `--judge-ms`; `--prompts` groups of eight make a batch. The learner's update takes as long
as a synchronous batch takes to sample.
JSON, one line for each mode: seconds of an iteration (median
over seeds), what the trial waited for in it and how long it learnt, how many times faster than
synchronous it is, the share of right answers of 800 completions of the final model (mean and
standard deviation over seeds: all modes learn from equally many samples), and that of each
iteration's batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.learning.stale_data import supervised
from rllib_llm import GRPOConfig
from rllib_llm.examples.arithmetic import correct
from rllib_llm.learners.policy_learners import GRPOLearner
from rllib_llm.rollouts.env_runner import RLHFEnvRunner
from rllib_llm.rollouts.policy import Generation, ModulePolicy

STEP_SECONDS, MEAN_STEPS, LEARN_STEPS = "BENCH_STEP_S", "BENCH_MEAN_STEPS", "BENCH_LEARN_STEPS"
JUDGE_SECONDS = "BENCH_JUDGE_S"
MODES = {
    "sync": {},
    "lockstep-1": {"max_staleness": 1},
    "free-1": {"max_staleness": 1, "schedule": "free", "window": 8, "in_flight": "keep"},
    "free-2-oversampled": {
        "max_staleness": 2, "schedule": "free", "window": 8, "in_flight": "keep",
        "oversample": 1.25,
    },
}  # fmt: skip
NUM_COMPLETIONS = 8
NUM_EVALUATED, NEVER = 800, 1_000_000
PHASES = ("sample", "learn", "publish")  # of an iteration
SUMS = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(10)]


def num_steps(row_ids: Sequence[int]) -> np.ndarray:
    """Steps that completions take, log-normal with sigma 1, a function of their row ids."""
    mean = float(os.environ[MEAN_STEPS])
    drawn = [np.random.Generator(np.random.Philox(key=[7, row])).normal() for row in row_ids]
    return np.exp(np.array(drawn) + math.log(mean) - 0.5)


def take_steps(count: float, start: float) -> None:
    """Sleeps until so many steps have passed since `start`, `time.monotonic`'s."""
    rest = start + float(os.environ[STEP_SECONDS]) * count - time.monotonic()
    time.sleep(max(0.0, rest))


class SlowEngine:
    """A `TorchEngine` whose rows end when their number of steps is over, each step at its price."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._steps = 0
        self._over: dict[Any, int] = {}  # by row id: the step at which it is over
        self._held: dict[Any, Any] = {}  # rows that have ended, and are not over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def num_running(self) -> int:
        return self._engine.num_running + len(self._held)

    def holds(self, row_id: Any) -> bool:
        return row_id in self._held or self._engine.holds(row_id)

    def add(self, rows: Sequence[Any]) -> None:
        self._engine.add(rows)
        lengths = num_steps([row.noise.row for row in rows])
        self._over.update(
            {row.id: self._steps + int(n) for row, n in zip(rows, lengths, strict=True)}
        )

    def step(self) -> list[Any]:
        start = time.monotonic()
        self._steps += 1
        if self._engine.num_running:
            self._held.update({ended.id: ended for ended in self._engine.step()})
        take_steps(1, start)
        over = [i for i in self._held if self._over[i] <= self._steps]
        for i in over:
            del self._over[i]
        return [self._held.pop(i) for i in over]

    def sampled(self, ids: Sequence[Any], starts: Sequence[int]) -> list[Any]:
        inside = [i for i in ids if i not in self._held]
        read = dict(zip(inside, self._engine.sampled(inside, [0] * len(inside)), strict=True))
        return [self._held.get(i) or read[i] for i in ids]

    def abort(self, ids: Sequence[Any]) -> list[Any]:
        for i in ids:
            self._held.pop(i, None)
        return self._engine.abort(ids)


class SlowPolicy(ModulePolicy):
    """Generates at the same prices."""

    def generate(self, prompts: Any, asked: Generation) -> dict[str, torch.Tensor]:
        start = time.monotonic()
        completions = super().generate(prompts, asked)
        take_steps(num_steps(asked.row_ids.tolist()).max(), start)
        return completions

    def open_engine(self, version: int | None, **settings: Any) -> Any:
        return SlowEngine(super().open_engine(version, **settings))


class SlowRunner(RLHFEnvRunner):
    """A sampler whose decoding takes long."""

    def _make_policy(self) -> SlowPolicy:
        policy = SlowPolicy(self._make_module, alias=True, is_pretrained=False)
        policy.build()
        return policy


class SlowLearner(GRPOLearner):
    """A learner that takes a while."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        results = super().update(*args, **kwargs)
        take_steps(float(os.environ[LEARN_STEPS]), start)
        return results


async def judged(completions: list[str], answer: list[int]) -> list[float]:
    """Whether they are right, after a while."""
    await asyncio.sleep(float(os.environ[JUDGE_SECONDS]))
    return correct(completions, answer)


def make_config(mode: str, seed: int, model: Path, args: argparse.Namespace) -> GRPOConfig:
    config = (
        GRPOConfig()
        .language_model(model=str(model))
        .environment(
            "rllib_llm/RLHF-v0",
            env_config={"prompts": SUMS, "eval_prompts": SUMS, "max_prompt_len": 8,
                        "reward_functions": "benchmarks.sampling.streaming.judged"},
        )
        .sampling(max_new_tokens=4, num_completions=NUM_COMPLETIONS, log_samples_every=0)
        .training(
            train_batch_size_per_learner=args.prompts * NUM_COMPLETIONS, lr=args.lr,
            minibatch_size=min(64, args.prompts * NUM_COMPLETIONS),
            ref_kl_coeff=0.0, off_policy="decoupled",
        )
        .evaluation(
            evaluation_interval=NEVER, evaluation_duration=NUM_EVALUATED,
            evaluation_config={"explore": True},
        )
        .env_runners(num_env_runners=2)
        .learners(num_learners=0, learner_class=SlowLearner)
        .debugging(seed=seed)
        .streaming(**MODES[mode], groups_per_lease=args.prompts // 2)
    )  # fmt: skip
    config.env_runner_cls = SlowRunner
    return config


def run(mode: str, seed: int, args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Wall seconds of all iterations but the first, and the scores."""
    algorithm = make_config(mode, seed, model, args).build_algo()
    seconds, scores, ages, spent = [], [], [], []
    for i in range(args.iterations + 1):
        start = time.perf_counter()
        result = algorithm.train()
        if i:
            seconds.append(time.perf_counter() - start)
            scores.append(result["objective"]["scores"])
            ages.append(result["train"]["staleness"])
            spent.append([result["throughput"][f"{name}_seconds"] for name in PHASES])
    algorithm.evaluate()
    right = algorithm.eval_metrics["scores"]
    algorithm.stop()
    shutil.rmtree(algorithm.logdir, ignore_errors=True)
    return {
        "total": sum(seconds), "right": right, "age": max(ages), "spent": spent, "scores": scores,
    }  # fmt: skip


def measure(mode: str, args: argparse.Namespace, model: Path) -> dict[str, Any]:
    runs = [run(mode, seed, args, model) for seed in range(args.seeds)]
    right = [each["right"] for each in runs]
    spent = zip(*(row for each in runs for row in each["spent"]), strict=True)
    return {
        "mode": mode,
        "s_per_iteration": round(
            statistics.median(each["total"] for each in runs) / args.iterations, 3
        ),
        **{
            f"{name}_s": round(statistics.mean(values), 3)
            for name, values in zip(PHASES, spent, strict=True)
        },
        "right": round(statistics.mean(right), 3),
        "right_std": round(statistics.stdev(right), 3) if len(right) > 1 else 0.0,
        "mean_age_max": round(max(each["age"] for each in runs), 2),
        "curve": [
            round(statistics.mean(points), 3)
            for points in zip(*(each["scores"] for each in runs), strict=True)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--mean-steps", type=float, default=40.0)
    parser.add_argument("--judge-ms", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=32, help="groups of a batch, an even number")
    parser.add_argument("--lr", type=float, default=2.5e-4)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args = parser.parse_args()
    # Ray's processes inherit them.
    os.environ[STEP_SECONDS] = str(args.step_ms / 1000)
    os.environ[MEAN_STEPS] = str(args.mean_steps)
    os.environ[JUDGE_SECONDS] = str(args.judge_ms / 1000)
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    steps = num_steps(range(20 * args.prompts * NUM_COMPLETIONS)).reshape(20, -1).max(axis=1)
    os.environ[LEARN_STEPS] = str(float(steps.mean()))
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    base = 0.0
    with tempfile.TemporaryDirectory() as folder:
        model = supervised(Path(folder))
        for mode in dict.fromkeys(["sync", *args.modes]):
            found = measure(mode, args, model)
            base = base or found["s_per_iteration"]
            told = {**found, "speed": round(base / found["s_per_iteration"], 2)}
            print(json.dumps(told), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
