"""Samplers in this process, and scripted groups of them."""

from __future__ import annotations

import ray
import torch

from rllib_llm.sampling.env_runner import RLHFEnvRunner
from rllib_llm.weights.broadcast import PublishedWeights


def build_sampler(config, worker_index: int = 0) -> RLHFEnvRunner:
    """A sampler as an actor would hold it, for `worker_index` above 0, but here."""
    config = config.copy(copy_frozen=False)
    config.validate()
    return RLHFEnvRunner(config=config, worker_index=worker_index, num_workers=2)


def publication(version: int = 0, key: str | None = None) -> PublishedWeights:
    """Weights that the samplers have already."""
    return PublishedWeights(version, key or f"weights {version}")


class ScriptedGroup:
    """An EnvRunnerGroup of samplers that live here. `dies`: for each call of a sampler, in order,
    whether it dies of it; `revives_after`: probes until a dead one is back."""

    def __init__(self, samplers, *, dies=(), revives_after: int = 1):
        self.samplers = {i + 1: sampler for i, sampler in enumerate(samplers)}
        self.dies = list(dies)
        self.revives_after = revives_after
        self.dead: dict[int, int] = {}
        self.served: list[tuple[int, int]] = []  # (worker, first prompt of its part)

    def num_remote_env_runners(self):
        return len(self.samplers)

    def healthy_worker_ids(self):
        return [i for i in self.samplers if i not in self.dead]

    def num_healthy_remote_workers(self):
        return len(self.healthy_worker_ids())

    def foreach_env_runner(self, calls, *, remote_worker_ids, local_env_runner, timeout_seconds):
        assert len(calls) == len(remote_worker_ids)
        assert timeout_seconds is None and not local_env_runner
        results = []
        for call, worker in zip(calls, remote_worker_ids, strict=True):
            if self.dies and self.dies.pop(0):
                self.dead[worker] = 0
                continue
            self.served.append((worker, call.keywords["start"]))
            results.append(call(self.samplers[worker]))
        return results

    def probe_unhealthy_env_runners(self, timeout_seconds):
        for worker in list(self.dead):
            self.dead[worker] += 1
            if self.dead[worker] >= self.revives_after:
                del self.dead[worker]


def assert_same_batch(one, other) -> None:
    assert one.columns.keys() == other.columns.keys()
    for name, column in one.columns.items():
        assert torch.equal(column, other.columns[name]), name
    assert torch.equal(one.rewards, other.rewards)


def put(flat) -> tuple[ray.ObjectRef, ...]:
    return (ray.put(flat),)
