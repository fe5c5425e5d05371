"""Samplers in this process, and scripted groups of them."""

from __future__ import annotations

from collections.abc import Callable

import ray
import torch

from rllib_llm.rollouts.env_runner import RLHFEnvRunner
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
    """An EnvRunnerGroup of samplers that live here. `does`: what happens to each part that is
    asked for, in order: it "dies", "hangs" or (also behind the end) serves. `revives_after`: pings
    until a dead one is back."""

    def __init__(self, samplers, *, does=(), revives_after: int = 1):
        self.samplers = {i + 1: sampler for i, sampler in enumerate(samplers)}
        self.does = list(does)
        self.revives_after = revives_after
        self.dead: dict[int, int] = {}
        self.hung: set[int] = set()
        self.served: list[tuple[int, int]] = []  # (worker, first prompt of its part)
        self.flights: list[tuple[int, Callable, dict]] = []
        self._worker_manager = self
        self.killed: list[int] = []

    def num_remote_env_runners(self):
        return len(self.samplers)

    def healthy_worker_ids(self):
        return [i for i in self.samplers if i not in self.dead]

    def num_healthy_remote_workers(self):
        return len(self.healthy_worker_ids())

    def foreach_env_runner_async(self, func, *, tag, healthy_only, remote_worker_ids, kwargs=None):
        assert not healthy_only
        if tag == "ping":
            for worker in remote_worker_ids:
                self.dead[worker] += 1
            return
        (worker,) = remote_worker_ids
        assert worker not in self.dead and worker not in self.hung
        assert worker not in [flight[0] for flight in self.flights]
        self.flights.append((worker, func, kwargs))

    def fetch_ready_async_reqs(self, *, tags, timeout_seconds, mark_healthy=False):
        if tags == "ping":
            assert mark_healthy and timeout_seconds == 0
            for worker in [w for w, pings in self.dead.items() if pings >= self.revives_after]:
                del self.dead[worker]
            return []
        flights, self.flights, answers = self.flights, [], []
        for worker, func, kwargs in flights:
            happens = None if worker in self.hung else self.does.pop(0) if self.does else "serves"
            if happens == "dies":
                self.dead[worker] = 0
            elif happens == "hangs" or worker in self.hung:
                self.hung.add(worker)
                self.flights.append((worker, func, kwargs))
            else:
                self.served.append((worker, kwargs["start"]))
                answers.append((worker, func(self.samplers[worker], **kwargs)))
        return answers

    # Of the manager behind the group.

    def set_actor_state(self, worker, healthy):
        assert not healthy
        self.dead[worker] = 0
        self.hung.discard(worker)
        self.flights = [flight for flight in self.flights if flight[0] != worker]


def assert_same_batch(one, other) -> None:
    assert one.columns.keys() == other.columns.keys()
    for name, column in one.columns.items():
        assert torch.equal(column, other.columns[name]), name
    assert torch.equal(one.rewards, other.rewards)


def put(flat) -> tuple[ray.ObjectRef, ...]:
    return (ray.put(flat),)
