"""RLlib's own weight sync beside ours: float32 weights to 4 samplers on one node.

    python -m benchmarks.weights.beside_rllib [--mb 1000] [--rounds 5]

One JSON line each for `EnvRunnerGroup.sync_weights` from a local learner, for ours aliased and ours
copied: medians of the ratio to a memcpy of the same bytes taken just before, of CPU seconds of all
processes likewise, and how many times faster than RLlib's ours are, by the clock and by that ratio.

The clock runs from the first byte that leaves the learner until all samplers hold new weights.
`sync_weights` itself does not wait for the samplers, whatever its `timeout_seconds`: that is for
the results of the call before. Weights are changed before every round, and looked at after it.
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

from benchmarks.weights.publish import (
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
        .rl_module(rl_module_spec=RLModuleSpec(Large, model_config={"num_bytes": num_bytes}))
        .env_runners(num_env_runners=NUM_RECEIVERS, create_local_env_runner=False)
        .build_algo()
    )

    group, learner = algorithm.env_runner_group, algorithm.learner_group._learner
    layers = learner.module["default_policy"].layers
    before = [0.0]

    def turn() -> tuple[float, float]:
        for layer in layers:
            layer.data += 1
        start, cpu = time.perf_counter(), time.process_time()
        group.sync_weights(
            from_worker_or_learner_group=algorithm.learner_group, inference_only=True
        )
        group.fetch_ready_async_reqs(tags="set_state", timeout_seconds=600)
        seconds, own = time.perf_counter() - start, time.process_time() - cpu
        looked_at = group.foreach_env_runner(_look_at, local_env_runner=False)
        found = {value for values, _ in looked_at for value in values}
        if len(looked_at) != NUM_RECEIVERS or found != {float(layers[0].data[0, 0])}:
            raise SystemExit(f"{len(looked_at)} samplers hold {found} after the sync.")
        theirs = sum(cpu for _, cpu in looked_at)
        theirs, before[0] = theirs - before[0], theirs
        return seconds, own + theirs

    result = compare(memcpy, turn, rounds)
    algorithm.stop()
    return result


def _look_at(runner: Any) -> tuple[set[float], float]:
    """First and last number of every matrix of a sampler; CPU seconds since it started."""
    ends = {float(layer.data[i, i]) for layer in runner.module.layers for i in (0, -1)}
    return ends, time.process_time()


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
