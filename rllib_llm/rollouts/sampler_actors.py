"""The remote samplers as Ray knows them: calls to their actors, and who is held to be alive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_llm.ray_compat import sampler_manager

STOP_SECONDS = 5.0


class SamplerActors:
    """Handles of the samplers that RLlib's group has created, by worker index (from 1).

    A call belongs to whoever made it: one that nobody asks about any more is in nobody's way.
    RLlib is told who is dead and who is back, so that what it reports stays true.
    """

    def __init__(self, group: EnvRunnerGroup) -> None:
        self._manager = sampler_manager(group)
        self._handles = dict(self._manager.actors())

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

    def stop(self) -> None:
        """Ends all for good, those that do not answer as well."""
        self.ready([self.call(worker, "stop") for worker in self.healthy()], STOP_SECONDS)
        self._manager.clear()
