"""RLlib's own weight sync beside ours: float32 weights to 4 samplers on one node.

    python benchmarks/weights_rllib.py [--mb 1000] [--rounds 5]

One JSON line each for `EnvRunnerGroup.sync_weights` from a local learner, for ours aliased and ours
copied: medians of the ratio to a memcpy of the same bytes taken just before, and how many times
faster than RLlib's ours are, by the clock and by that ratio.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from weights import (
    MIB,
    NUM_RECEIVERS,
    Memcpy,
    broadcast,
    compare,
    payload_bytes,
    require_memory,
    start_ray,
)


class Large(TorchRLModule, ValueFunctionAPI):
    """32 matrices that nobody multiplies."""

    def setup(self) -> None:
        numbers = self.model_config["num_bytes"] // 4 // 32
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(torch.ones(numbers // 1024, 1024)) for _ in range(32)
        )

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        raise NotImplementedError("it is only sent around")

    def _forward(self, batch: dict[str, Any], **kwargs) -> dict[str, Any]:
        raise NotImplementedError("it is only sent around")


def rllib(num_bytes: int, rounds: int) -> dict[str, Any]:
    """`EnvRunnerGroup.sync_weights`."""
    start_ray(3 * num_bytes + 64 * MIB)
    memcpy = Memcpy(num_bytes)
    algorithm = (
        PPOConfig()
        .environment("CartPole-v1")
        .rl_module(
            rl_module_spec=RLModuleSpec(Large, model_config={"num_bytes": num_bytes})
        )
        .env_runners(num_env_runners=NUM_RECEIVERS, create_local_env_runner=False)
        .build_algo()
    )

    def turn() -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        algorithm.env_runner_group.sync_weights(
            from_worker_or_learner_group=algorithm.learner_group,
            inference_only=True,
            timeout_seconds=600,
        )
        return time.perf_counter() - start, time.process_time() - cpu

    result = compare(memcpy, turn, rounds)
    result.pop("cpu_ratio")  # of the driver alone
    algorithm.stop()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_bytes = payload_bytes(arguments.mb)
    require_memory(13 * num_bytes)
    theirs = rllib(num_bytes, arguments.rounds)
    print(json.dumps({"case": "rllib", "mb": arguments.mb, **theirs}), flush=True)
    for name, alias in (("aliased", True), ("copied", False)):
        ours = broadcast(num_bytes, arguments.rounds, alias=alias, dtype=torch.float32)
        faster = {f"times_faster_{k}": round(theirs[k] / ours[k], 1) for k in ("seconds", "ratio")}
        print(json.dumps({"case": name, "mb": arguments.mb, **ours, **faster}), flush=True)


if __name__ == "__main__":
    main()
