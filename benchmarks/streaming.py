"""Wall time of synchronous and streaming runs where completions have lengths of a long tail.

    python benchmarks/streaming.py [--iterations 8] [--seeds 3] [--step-ms 4] [--mean-steps 40]
                                   [--modes sync lockstep-1 free-1 free-2-oversampled]

GRPO on one-digit sums with two samplers. Decode time is emulated, so that two cores can show it: a
step of a sampler takes `--step-ms`, however many rows are in its batch, and a completion is over
after a number of steps drawn from a log-normal distribution (sigma 1) by its prompt and its place,
which stands for long answers and for pauses of tools; the tokens themselves are sampled by the real
model. The learner's update is made to take as long as a synchronous batch takes to sample, measured
first. JSON, one line for each mode: seconds of an iteration (median over seeds), how many times
faster than synchronous, and the mean score of the last quarter of iterations, with its standard
deviation over seeds: all modes learn from equally many samples.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch

from rllib_llm import GRPOConfig
from rllib_llm.learners.critic_free_learners import GRPOLearner
from rllib_llm.rollouts.env_runner import RLHFEnvRunner
from rllib_llm.rollouts.policy import Generation, ModulePolicy

HERE = "benchmarks.streaming"
STEP_SECONDS, MEAN_STEPS, LEARN_SECONDS = "BENCH_STEP_S", "BENCH_MEAN_STEPS", "BENCH_LEARN_S"
MODES = {
    "sync": {},
    "lockstep-1": {"max_staleness": 1},
    "free-1": {"max_staleness": 1, "schedule": "free", "window": 8, "in_flight": "keep"},
    "free-2-oversampled": {
        "max_staleness": 2, "schedule": "free", "window": 8, "in_flight": "keep",
        "oversample": 1.25,
    },
}  # fmt: skip
NUM_PROMPTS, NUM_COMPLETIONS = 32, 8
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def num_steps(row_ids: Sequence[int]) -> np.ndarray:
    """Steps that completions take, log-normal with sigma 1, a function of their row ids."""
    mean = float(os.environ[MEAN_STEPS])
    drawn = [np.random.Generator(np.random.Philox(key=[7, row])).normal() for row in row_ids]
    return np.exp(np.array(drawn) + math.log(mean) - 0.5)


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
        time.sleep(float(os.environ[STEP_SECONDS]))
        self._steps += 1
        if self._engine.num_running:
            self._held.update({ended.id: ended for ended in self._engine.step()})
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
        time.sleep(float(os.environ[STEP_SECONDS]) * num_steps(asked.row_ids.tolist()).max())
        return super().generate(prompts, asked)

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
        time.sleep(float(os.environ[LEARN_SECONDS]))
        return super().update(*args, **kwargs)


def build_model() -> Any:
    from rllib_llm.envs.toys import arithmetic

    return arithmetic.build_model(3, hidden_size=32, num_layers=1, num_heads=2, max_len=32)


def near(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the answer, and a part of it for each right character at its place."""
    return [
        float(text == right) + 0.5 * sum(a == b for a, b in zip(text, right, strict=False))
        for text, right in zip(completions, answer, strict=True)
    ]


def make_config(mode: str, seed: int) -> GRPOConfig:
    config = (
        GRPOConfig()
        .language_model(model=f"{HERE}.build_model")
        .environment(
            "rllib_llm/RLHF-v0",
            env_config={"prompts": SUMS, "reward_functions": f"{HERE}.near", "max_prompt_len": 8},
        )
        .sampling(max_new_tokens=4, num_completions=NUM_COMPLETIONS, log_samples_every=0)
        .training(
            train_batch_size_per_learner=NUM_PROMPTS * NUM_COMPLETIONS, lr=3e-3,
            minibatch_size=NUM_PROMPTS * NUM_COMPLETIONS // 2, num_epochs=1, off_policy="bypass",
        )
        .env_runners(num_env_runners=2)
        .learners(num_learners=0, learner_class=SlowLearner)
        .debugging(seed=seed)
        .streaming(**MODES[mode], groups_per_lease=NUM_PROMPTS // 2)
    )  # fmt: skip
    config.env_runner_cls = SlowRunner
    return config


def run(mode: str, seed: int, num_iterations: int) -> dict[str, Any]:
    """Wall seconds of each iteration but the first, and the scores."""
    algorithm = make_config(mode, seed).build_algo()
    seconds, scores, ages = [], [], []
    for i in range(num_iterations + 1):
        start = time.perf_counter()
        result = algorithm.train()
        if i:
            seconds.append(time.perf_counter() - start)
            scores.append(result["objective"]["scores"])
            ages.append(result["train"]["staleness"])
    sample_seconds = result["throughput"]["sample_seconds"]
    algorithm.stop()
    last = scores[-max(1, len(scores) // 4) :]
    return {
        "total": sum(seconds), "score": statistics.mean(last), "age": max(ages),
        "sample": sample_seconds,
    }  # fmt: skip


def measure(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    runs = [run(mode, seed, args.iterations) for seed in range(args.seeds)]
    scores = [each["score"] for each in runs]
    return {
        "mode": mode,
        "s_per_iteration": round(
            statistics.median(each["total"] for each in runs) / args.iterations, 3
        ),
        "score": round(statistics.mean(scores), 3),
        "score_std": round(statistics.stdev(scores), 3) if len(scores) > 1 else 0.0,
        "mean_age_max": round(max(each["age"] for each in runs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--mean-steps", type=float, default=40.0)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args = parser.parse_args()
    # Ray's processes inherit them.
    os.environ[STEP_SECONDS] = str(args.step_ms / 1000)
    os.environ[MEAN_STEPS] = str(args.mean_steps)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ[LEARN_SECONDS] = "0"
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    steps = num_steps(range(20 * NUM_PROMPTS * NUM_COMPLETIONS)).reshape(20, -1).max(axis=1)
    os.environ[LEARN_SECONDS] = str(float(steps.mean()) * args.step_ms / 1000)
    found = {mode: measure(mode, args) for mode in dict.fromkeys(["sync", *args.modes])}
    base = found["sync"]["s_per_iteration"]
    for each in found.values():
        print(json.dumps({**each, "speed": round(base / each["s_per_iteration"], 2)}))
    ray.shutdown()


if __name__ == "__main__":
    main()
