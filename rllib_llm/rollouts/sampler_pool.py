"""The remote samplers as Ray actors: calls, health, and replacement."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_llm.rollouts.errors import BrokenSamplerError, Faults
from rllib_llm.shared.errors import require
from rllib_llm.shared.messages import last_error
from rllib_llm.shared.ray_compat import (
    new_sampler,
    processes_of,
    room_for_samplers,
    sampler_manager,
)  # fmt: skip

STOP_SECONDS = 5.0
LEAVE_SECONDS = 2.0  # to one that leaves alone, for its last report


class SamplerActors:
    """Handles of the samplers that RLlib's group has created, by worker (from 1, and never twice).

    A call belongs to its caller: an abandoned one blocks no other.
    RLlib learns who is dead and who is back, so that what it reports stays true.
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

    @property
    def are_gone(self) -> bool:
        """Whether Ray was shut down, which a call would start again."""
        return not ray.is_initialized()

    def healthy(self) -> list[int]:
        """Indices of those that are not known to be dead."""
        return self._manager.healthy_actor_ids()

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
        """The result of a call.

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
            Problems: the cluster has no place for all of them.
        """
        numbers = range(len(self._handles) + 1, len(self._handles) + num_samplers + 1)
        # Places of samplers that left are the trial's still.
        num_unreserved = sum(number > self._num_reserved for number in numbers)
        room = room_for_samplers(self._group) if num_unreserved else 0
        require(num_unreserved <= room, "further samplers", num_unreserved, f"be at most {room}",
                "free CPUs and GPUs suffice for no more", "Give Ray more nodes")  # fmt: skip
        workers = []
        for number in numbers:
            handle = new_sampler(self._group, number, is_reserved=number <= self._num_reserved)
            self._manager.add_actors([handle])
            workers.append(max(self._manager.actors()))
            self._handles[workers[-1]] = handle
        return workers

    def remove(self, worker: int) -> None:
        """Removes a sampler for good; its requests go to others."""
        self.ready([self.call(worker, "stop")], LEAVE_SECONDS)
        del self._handles[worker]
        ray.kill(self._manager.remove_actor(worker))

    def stop(self) -> None:
        """Ends all for good, those that do not answer as well."""
        self.ready([self.call(worker, "stop") for worker in self.healthy()], STOP_SECONDS)
        self._manager.clear()


logger = logging.getLogger(__name__)

START_FACTOR = 5.0  # times the start of all samplers: how long a restart may take
LEAST_START_SECONDS = 120.0  # a restarted one first imports everything and loads models
SECONDS_BETWEEN_TRIES = 0.5  # of samplers that are starting
SECONDS_TO_ANSWER = 5.0  # of Ray, when it is asked why a sampler is dead


class SamplerPool:
    """The remote samplers of one kind. Ray restarts dead ones, which are polled here without
    waiting; those that do not respond are killed so that Ray restarts them too."""

    def __init__(
        self, actors: SamplerActors, faults: Faults, start_seconds: float = 0.0,
        num_parts: int | None = None,
    ):  # fmt: skip
        """
        Args:
            num_parts: that requests are cut into, however many samplers there are; as many as
                there are now by default.
        """
        self.actors = actors
        self.faults = faults
        self.lock = threading.RLock()  # of who changes them, or asks all of them
        self.start_limit = max(LEAST_START_SECONDS, START_FACTOR * start_seconds)
        self._down_since: dict[int, float] = {}  # monotonic seconds, by worker
        self._pings: dict[int, Any] = {}  # calls to those that are down
        self._revived: list[int] = []
        self._added: set[int] = set()  # those that are starting, not restarting
        self.num_parts = num_parts or len(actors.workers)

    @property
    def num_samplers(self) -> int:
        """How many there should be."""
        return len(self.actors.workers)

    def healthy(self) -> list[int]:
        """Indices of the samplers that can be asked, after a look at those that could not."""
        now = time.monotonic()
        for worker in self._down():
            since = self._down_since.setdefault(worker, now)
            if now - since > self.start_limit:
                self.replace(worker, f"it did not come back in {now - since:.0f} s")
        # Answers to earlier pings first: who answers is healthy again.
        answered = self.actors.ready(list(self._pings.values()), 0.0)
        for worker, call in list(self._pings.items()):
            if call not in answered:
                continue
            del self._pings[worker]
            try:
                self.actors.answer(call)
            except RayError:
                continue  # still down
            self.actors.mark(worker, healthy=True)
            self._down_since.pop(worker, None)
            if worker in self._added:
                self._added.remove(worker)
                continue
            self._revived.append(worker)
            self.faults.sampler_restarts += 1
        for worker in self._down():
            if worker not in self._pings:
                self._pings[worker] = self.actors.call(worker, "ping")
        return self.actors.healthy()

    def pop_revived(self) -> list[int]:
        """Indices of the samplers that were seen to come back since the last call."""
        with self.lock:
            revived, self._revived = self._revived, []
        return revived

    def scale(self, num_samplers: int, *, at_most: int | None) -> str:
        """Sets the number of samplers from the next request on and describes the change. Requests
        are split as before, so completions stay the same bit for bit.

        Args:
            at_most: how many are ever asked at once; None: all there are.

        Raises:
            Problems: no request would reach so many, there are none, or the cluster has no place.
        """
        have = self.num_samplers
        require(have, "samplers", num_samplers, "be left as they are",
                "this run samples in the learner's process", "Set num_env_runners")  # fmt: skip
        require(at_most is None or num_samplers <= at_most, "samplers", num_samplers,
                f"be at most {at_most}", "requests are cut into so many parts, which decide the "
                "round-off", "Set sampling_parts in runs that are to grow")  # fmt: skip
        with self.lock:
            for worker in self.actors.add(max(0, num_samplers - have)):
                self._added.add(worker)
                self.actors.mark(worker, healthy=False)  # until it answers
                self._down_since[worker] = time.monotonic()
            for worker in self.actors.workers[num_samplers:]:
                self.actors.remove(worker)
                self._down_since.pop(worker, None)
                self._pings.pop(worker, None)
                self._added.discard(worker)
        return f"{num_samplers} samplers instead of {have}"

    def replace(self, worker: int, reason: str) -> None:
        """Kills a sampler that does not answer; Ray starts it again."""
        logger.error("Sampler %d is killed and started again: %s.", worker, reason)
        self.faults.samplers_hung += 1
        self.actors.mark(worker, healthy=False)
        self.actors.kill(worker)
        self._down_since[worker] = time.monotonic()

    def require_built(self) -> None:
        """Raises BrokenSamplerError with what a sampler's constructor raised. RLlib only logs
        it, and Ray does not restart such an actor."""
        for worker, error in self._errors():
            if isinstance(error, ActorDiedError):
                what, _ = last_error(str(error))
                raise BrokenSamplerError(f"Sampler {worker} cannot be built: {what}") from error

    def ask(self, method: str, *args: Any, among: Collection[str] = ()) -> Any:
        """The answer of the first sampler that is there; one that is starting is waited for.
        `among`: names of those that may be asked; (): all.

        Raises:
            RuntimeError: none came in the time that a restart may take.
        """
        end = time.monotonic() + self.start_limit
        while time.monotonic() < end:
            for worker in (w for w in self.healthy() if not among or str(w) in among):
                try:
                    return self.actors.answer(self.actors.call(worker, method, *args))
                except RayTaskError as error:  # it is alive, and says why not
                    raise error.cause from error
                except RayError:
                    self.actors.mark(worker, healthy=False)
            time.sleep(SECONDS_BETWEEN_TRIES)
        raise RuntimeError(f"no sampler was there to be asked for {method}\n{self.last_words()}")

    def last_words(self) -> str:
        """Ray's error message about the first sampler that is down."""
        return next((f"Sampler {worker}: {error}" for worker, error in self._errors()), "")

    def _errors(self) -> Iterator[tuple[int, RayError]]:
        """The errors of those that are down, by worker."""
        for worker in self._down():
            try:
                self.actors.answer(self.actors.call(worker, "ping"), SECONDS_TO_ANSWER)
            except RayError as error:
                yield worker, error

    def _down(self) -> list[int]:
        healthy = set(self.actors.healthy())
        return [worker for worker in self.actors.workers if worker not in healthy]
