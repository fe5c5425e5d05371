"""The remote samplers as Ray knows them: calls to their actors, and who is held to be alive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_llm.shared.ray_compat import (
    new_sampler,
    processes_of,
    room_for_samplers,
    sampler_manager,
)

STOP_SECONDS = 5.0
LEAVE_SECONDS = 2.0  # to one that leaves alone, for its last report


class SamplerActors:
    """Handles of the samplers that RLlib's group has created, by worker (from 1, and never twice).

    A call belongs to whoever made it: one that nobody asks about any more is in nobody's way.
    RLlib is told who is dead and who is back, so that what it reports stays true.
    """

    def __init__(self, group: EnvRunnerGroup) -> None:
        self._group = group
        self._manager = sampler_manager(group)
        self._handles = dict(self._manager.actors())
        self._numbers = {worker: worker for worker in self._handles}
        self._num_reserved = len(self._handles)

    @property
    def workers(self) -> list[int]:
        """Index of every sampler there should be."""
        return list(self._handles)

    def healthy(self) -> list[int]:
        """Indices of those that are not known to be dead."""
        return self._manager.healthy_actor_ids()

    def worker_called(self, number: int) -> int | None:
        """The worker that calls itself so (`worker_index`), None where it has left: of those that
        are added each has the number of one that left."""
        return next((w for w, known in self._numbers.items() if known == number), None)

    def number(self, worker: int) -> int:
        """What a worker calls itself."""
        return self._numbers[worker]

    def mark(self, worker: int, *, healthy: bool) -> None:
        """Notes that a sampler died or came back; nothing of one that has left."""
        if worker in self._handles:
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

    def processes(self, worker: int) -> list[int]:
        """Ids of a sampler's processes, where it is on this node."""
        return processes_of(self._handles[worker])

    def kill(self, worker: int) -> None:
        """Ends a sampler's process, a stopped one as well: Ray turns to SIGKILL in the end, and
        starts it again."""
        ray.kill(self._handles[worker], no_restart=False)

    def add(self, num_samplers: int) -> list[int]:
        """Starts so many more; their workers.

        Raises:
            ValueError: the cluster has no place for all of them.
        """
        numbers = range(len(self._handles) + 1, len(self._handles) + num_samplers + 1)
        # Places of samplers that left are the trial's still.
        num_unreserved = sum(number > self._num_reserved for number in numbers)
        room = room_for_samplers(self._group) if num_unreserved else 0
        if num_unreserved > room:
            raise ValueError(
                f"{num_unreserved} more samplers must find CPUs and GPUs that nobody has reserved: "
                f"there is room for {room}. Give Ray more (--ray-num-cpus, more nodes)."
            )
        return [self._add(number) for number in numbers]

    def _add(self, number: int) -> int:
        handle = new_sampler(self._group, number, is_reserved=number <= self._num_reserved)
        self._manager.add_actors([handle])
        worker = max(self._manager.actors())
        self._handles[worker], self._numbers[worker] = handle, number
        return worker

    def remove(self, worker: int) -> None:
        """Ends a sampler for good; what it was asked is given to others."""
        self.ready([self.call(worker, "stop")], LEAVE_SECONDS)
        del self._handles[worker], self._numbers[worker]
        ray.kill(self._manager.remove_actor(worker))

    def stop(self) -> None:
        """Ends all for good, those that do not answer as well."""
        self.ready([self.call(worker, "stop") for worker in self.healthy()], STOP_SECONDS)
        self._manager.clear()
