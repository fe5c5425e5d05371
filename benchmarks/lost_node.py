"""Trains with two samplers on two nodes, kills the raylet of one (SIGKILL), goes on with the other
sampler, adds a node, and waits until the lost sampler is back. What is learnt must be what it is
without all that.

    python -m benchmarks.lost_node
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time

import ray

from benchmarks import chaos_run
from benchmarks.chaos_cluster import Nodes
from rllib_llm.algorithms.grpo import GRPO

MAX_ITERATIONS = 2000  # until the sampler is back


def make_config():
    """Two samplers of two CPUs: the head has room for one, and each other node for one."""
    config = chaos_run.make_config(timeout_s=None)
    config.evaluation(evaluation_interval=None, evaluation_num_env_runners=0)
    config.learners(num_learners=0, learner_class=GRPO.get_default_config().learner_class)
    config.algo_class = GRPO
    return config.env_runners(num_cpus_per_env_runner=2).callbacks(on_environment_created=None)


def train(algorithm) -> dict:
    """The learner's part of one iteration's results."""
    result = algorithm.train()
    return {name: result[name] for name in ("objective", "policy", "train", "episode")}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n    ")[0]).parse_args()
    nodes = Nodes(1)
    algorithm = make_config().build_algo()
    results = [train(algorithm) for _ in range(3)]
    (raylet,) = nodes.pids()
    os.kill(raylet, signal.SIGKILL)
    start = time.monotonic()
    results.append(train(algorithm))
    seconds = time.monotonic() - start
    results += [train(algorithm) for _ in range(3)]
    alone = algorithm.env_runner_group.num_healthy_remote_workers()
    nodes.replace(raylet)
    while not algorithm.faults.sampler_restarts and len(results) < MAX_ITERATIONS:
        results.append(train(algorithm))
    faults = algorithm.faults.metrics()
    healthy = algorithm.env_runner_group.num_healthy_remote_workers()
    algorithm.stop()
    undisturbed = make_config().build_algo()
    expected = [train(undisturbed) for _ in results]
    undisturbed.stop()
    ray.shutdown()
    nodes.shutdown()
    print(json.dumps({
        "same_results_as_undisturbed": results == expected, "iterations": len(results),
        "samplers_after_the_kill": alone, "samplers_at_the_end": healthy,
        "seconds_of_the_iteration_after_the_kill": round(seconds, 1), "faults": faults,
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
