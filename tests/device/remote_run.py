"""`python -m tests.device.remote_run store cuda_ipc`: what runs with actors on the pretend GPU say.

Prints one JSON object, by transport of the weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from tests.algorithms import tiny_runs as tiny
from tests.device import pretend

NUM_SAMPLERS = 2


def device_of_module(module: Any) -> str:
    return str(next(module.parameters()).device)


def run(transport: str) -> dict[str, Any]:
    config = (
        tiny.grpo(ref_kl_coeff=0.1)
        .learners(num_learners=1, num_gpus_per_learner=0.4)
        .env_runners(num_env_runners=NUM_SAMPLERS, num_gpus_per_env_runner=0.2)
        .weights(weights_transport=transport)
    )
    with tiny.built(config) as algorithm:
        results = [algorithm.train() for _ in range(3)]
        weights = results[-1]["weights"]
        learners = algorithm.learner_group.foreach_learner(
            lambda learner: device_of_module(learner.module[DEFAULT_MODULE_ID].unwrapped())
        )
        samplers = algorithm.env_runner_group.foreach_env_runner(
            lambda runner: (
                device_of_module(runner.module), str(runner.env.device),
                torch.cuda.get_per_process_memory_fraction(),
            ),
            local_env_runner=False,
        )  # fmt: skip
        assert all(module == env for module, env, _ in samplers)
        return {
            "devices": {
                "learner": [result.get() for result in learners],
                "samplers": [module for module, _, _ in samplers],
            },
            "shares": [share for _, _, share in samplers],
            "differing": algorithm.verify_weights(),
            "rewards": [result["train"]["rewards"] for result in results],
            "republished": weights["republished"],
            "version": weights["version"],
            "bytes": weights["bytes"],
        }


def main() -> None:
    pretend.install()
    root = str(Path(__file__).resolve().parents[2])
    ray.init(
        address="local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False,
        object_store_memory=256 * 1024**2,
        runtime_env={
            "worker_process_setup_hook": "tests.device.pretend.install",
            "env_vars": {"PYTHONPATH": root},
        },
    )  # fmt: skip
    try:
        found = {transport: run(transport) for transport in sys.argv[1:]}
    finally:
        ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
