"""Which samplers of a group can be asked, and the replacement of those that cannot."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_llm.ray_compat import sampler_manager
from rllib_llm.rollouts.errors import BrokenSamplerError
from rllib_llm.rollouts.faults import Faults

logger = logging.getLogger(__name__)

PING = "ping"
START_FACTOR = 5.0  # times the start of all samplers: how long a restart may take
LEAST_START_SECONDS = 120.0  # a restarted one first imports everything and loads models
STOP_SECONDS = 5.0
SECONDS_TO_ANSWER = 5.0  # of Ray, when it is asked why a sampler is dead


class Samplers:
    """The remote samplers of a group. Ray restarts the dead; here they are asked whether they are
    back, without waiting, and the silent are killed so that Ray restarts them too."""

    def __init__(self, group: EnvRunnerGroup, faults: Faults, start_seconds: float = 0.0):
        """`start_seconds`: how long the start of the group took."""
        self.group = group
        self.faults = faults
        self.start_limit = max(LEAST_START_SECONDS, START_FACTOR * start_seconds)
        self._down_since: dict[int, float] = {}  # monotonic seconds, by worker
        self._revived: list[int] = []

    @property
    def num_samplers(self) -> int:
        return self.group.num_remote_env_runners()

    def healthy(self) -> list[int]:
        """Ids of the samplers that can be asked, after a look at those that could not."""
        self._look_after_the_dead()
        return self.group.healthy_worker_ids()

    def pop_revived(self) -> list[int]:
        """Ids of the samplers that were seen to come back since the last call. It does not look
        itself: another thread may be asking them, and RLlib's manager is not made for two."""
        revived, self._revived = self._revived, []
        return revived

    def replace(self, worker: int, reason: str) -> None:
        """Kills a sampler that does not answer; Ray starts it again."""
        logger.error("Sampler %d is killed and started again: %s.", worker, reason)
        self.faults.samplers_hung += 1
        sampler_manager(self.group).set_actor_state(worker, healthy=False)
        self.kill(worker)
        self._down_since[worker] = time.monotonic()

    def kill(self, worker: int) -> None:
        """Ends a sampler's process, a stopped one as well: Ray turns to SIGKILL in the end."""
        ray.kill(sampler_manager(self.group).actors()[worker], no_restart=False)

    def require_built(self) -> None:
        """Raises BrokenSamplerError with the traceback of a sampler whose constructor failed; RLlib
        only logs it, and Ray does not start such an actor again."""
        for worker, error in self._errors():
            if isinstance(error, ActorDiedError):
                raise BrokenSamplerError(f"Sampler {worker} cannot be built: {error}")

    def last_words(self) -> str:
        """What Ray knows of the first sampler that is down."""
        return next((f"Sampler {worker}: {error}" for worker, error in self._errors()), "")

    def _errors(self) -> Iterator[tuple[int, RayError]]:
        """What those that are down answer with, by worker."""
        for worker in self._down():
            actor = sampler_manager(self.group).actors()[worker]
            try:
                ray.get(actor.ping.remote(), timeout=SECONDS_TO_ANSWER)
            except RayError as error:
                yield worker, error

    def _down(self) -> set[int]:
        return set(range(1, self.num_samplers + 1)) - set(self.group.healthy_worker_ids())

    def _look_after_the_dead(self) -> None:
        group, now = self.group, time.monotonic()
        dead = self._down()
        for worker in dead:
            since = self._down_since.setdefault(worker, now)
            if now - since > self.start_limit:
                self.replace(worker, f"it did not come back in {now - since:.0f} s")
        if not dead:
            return
        # Answers to earlier pings first: who answers is healthy again. The group's method of this
        # name would log each ping that a dead one did not answer as an error, every two seconds.
        sampler_manager(group).fetch_ready_async_reqs(
            tags=PING, timeout_seconds=0.0, mark_healthy=True
        )
        back = dead & set(group.healthy_worker_ids())
        for worker in back:
            self._down_since.pop(worker, None)
            self._revived.append(worker)
        self.faults.sampler_restarts += len(back)
        if dead - back:
            group.foreach_env_runner_async(
                _ping, tag=PING, healthy_only=False, remote_worker_ids=sorted(dead - back)
            )


def _ping(runner) -> str:
    return runner.ping()


def stop_samplers(group: EnvRunnerGroup) -> None:
    """Ends all samplers of a group, those that do not answer as well."""
    if group.num_remote_env_runners():
        group.foreach_env_runner(
            lambda runner: runner.stop(), local_env_runner=False, timeout_seconds=STOP_SECONDS
        )
        sampler_manager(group).clear()
