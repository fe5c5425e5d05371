"""Where an iteration's time goes that is not generating, judging, forward, backward or optimiser.

    python -m benchmarks.loop.framework_time [--rows 256] [--tokens 64] [--iterations 5]
        [--no-store]

GRPO on a small Llama, sampler and learner in the driver's process, one thread, every completion of
full length, one optimiser step. JSON: CPU and wall milliseconds (medians) of each part; the
framework's own time is all but those five.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

import ray
import torch

from benchmarks.common import Stopwatch, add, full_length
from rllib_llm import GRPOConfig
from rllib_llm.algorithms.grpo import GRPO

WORK = ("generate", "judge", "forward", "backward", "optimiser")
LEARNER_SPANS = {
    "forward": "forward",
    "backward": "backward",
    "_step": "optimiser",
    "prepare": "advantages",
    "start_minibatch": "loss",
    "compute_loss_for_module": "loss",
    "told": "learner metrics",
    "update": "learner, rest",
}
ALGORITHM_SPANS = {"_log": "results", "training_step": "loop", "step": "RLlib's step"}


def make_config(args: argparse.Namespace, watch: Stopwatch) -> GRPOConfig:
    config = full_length(
        GRPOConfig(algo_class=watch.timed_class(GRPO, ALGORITHM_SPANS)), args.rows, args.tokens
    )
    config.sampling(log_samples_every=0).training(lr=1e-5).rollouts(store=not args.no_store)
    runner = watch.timed_runner(config.get_default_env_runner_class())
    config.env_runners(env_runner_cls=runner)
    learner = watch.timed_class(config.get_default_learner_class(), LEARNER_SPANS)
    return config.learners(learner_class=learner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=256, help="completions of an iteration")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--no-store", action="store_true", help="keep no rollouts")
    args = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "RAY_ADDRESS" not in os.environ:
        ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=2**27)
    torch.set_num_threads(1)
    watch = Stopwatch()
    algorithm = make_config(args, watch).build_algo()
    iterations = []
    for _ in range(args.iterations + 1):
        with watch.span("Tune's train()"):
            algorithm.train()
        spans = watch.take()
        spans["framework"] = add(*(span for name, span in spans.items() if name not in WORK))
        iterations.append(spans)
    algorithm.stop()
    parts = {
        name: [round(1e3 * statistics.median(i[name][k] for i in iterations[1:]), 1)
               for k in (1, 0)]
        for name in iterations[0]
    }  # fmt: skip
    line = {"rows": args.rows, "tokens": args.tokens, "[cpu, wall] ms": parts}
    print(json.dumps(line, indent=1))


if __name__ == "__main__":
    main()
