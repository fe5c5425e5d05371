"""The remote samplers as Ray knows them: calls to their actors, and who is held to be alive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_llm.ray_compat import new_sampler, sampler_manager

STOP_SECONDS = 5.0


class SamplerActors:
    """Handles of the samplers that RLlib's group has created, by worker index (from 1).

    A call belongs to whoever made it: one that nobody asks about any more is in nobody's way.
    RLlib is told who is dead and who is back, so that what it reports stays true.
    """

    def __init__(self, group: EnvRunnerGroup) -> None:
        self._group = group
        self._manager = sampler_manager(group)
        self._handles = dict(self._manager.actors())
        self._num_reserved = len(self._handles)

    @property
    def workers(self) -> list[int]:
        """Index of every sampler there should be."""
        return list(self._handles)

    def healthy(self) -> list[int]:
        """Indices of those that are not known to be dead."""
        return self._manager.healthy_actor_ids()

    def mark(self, worker: int, *, healthy: bool) -> None:
        """Notes that a sampler died or came back."""
        self._manager.set_actor_state(worker, healthy=healthy)

    def call(self, worker: int, method: str, *args: Any) -> ray.ObjectRef:
        """Starts a call; a sampler works at one at a time, in order."""
        return getattr(self._handles[worker], method).remote(*args)

    def ready(self, calls: Sequence[ray.ObjectRef], timeout_s: float) -> list[ray.ObjectRef]:
        """Those of the calls that have ended; waits for all of them, at most `timeout_s`."""
        if not calls:
            return []
        return ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)[0]

    def answer(self, call: ray.ObjectRef, timeout_s: float | None = None) -> Any:
        """What a call returned.

        Raises:
            RayError: the sampler died, or its answer is lost.
        """
        return ray.get(call, timeout=timeout_s)

    def kill(self, worker: int) -> None:
        """Ends a sampler's process, a stopped one as well: Ray turns to SIGKILL in the end, and
        starts it again."""
        ray.kill(self._handles[worker], no_restart=False)

    def add(self, num_samplers: int) -> list[int]:
        """Starts so many more; their indices.

        Raises:
            ValueError: the cluster has no place for them.
        """
        added = []
        for _ in range(num_samplers):
            number = len(self._handles) + 1  # as the sampler calls itself
            is_reserved = number <= self._num_reserved  # by the trial, one of those that left
            handle = new_sampler(self._group, number, is_reserved=is_reserved)
            self._manager.add_actors([handle])
            worker = max(self._manager.actors())
            self._handles[worker] = handle
            added.append(worker)
        return added

    def remove(self, worker: int) -> None:
        """Ends a sampler for good; what it was asked is given to others."""
        del self._handles[worker]
        ray.kill(self._manager.remove_actor(worker))

    def stop(self) -> None:
        """Ends all for good, those that do not answer as well."""
        self.ready([self.call(worker, "stop") for worker in self.healthy()], STOP_SECONDS)
        self._manager.clear()
