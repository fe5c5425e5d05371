"""Remote learners that stand and fall together: one error or one silence ends the call for all."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.rllib.utils.actor_manager import (
    FaultTolerantActorManager,
    RemoteCallResults,
    ResultOrError,
)

from rllib_llm.time_limit import TimeLimit

logger = logging.getLogger(__name__)

SECONDS_BEHIND = 1.0  # that an answer may be behind another before that one is looked at
ADVICE = (
    "The weights since the last checkpoint are lost. Under Tune, FailureConfig(max_failures=...) "
    "starts again from there; without it, build the algorithm again and restore_from_path."
)


class LearnerError(RuntimeError):
    """A learner died or hung, and with it what was learnt since the last checkpoint."""


class LearnerActors(FaultTolerantActorManager):
    """As RLlib's manager, which waits for all: learners that wait for one another's gradients
    never answer once one of them has failed."""

    def __init__(self, actors: list[Any], *, timeout_s: float | str | None, **kwargs: Any):
        super().__init__(actors, **kwargs)
        # By what is asked: a state is quickly given, and says nothing about an update.
        self.limits: dict[str, TimeLimit] = defaultdict(lambda: TimeLimit(timeout_s))

    def foreach_actor(
        self,
        func: Any,
        *,
        kwargs: Any = None,
        healthy_only: bool = True,
        remote_actor_ids: list[int] | None = None,
        timeout_seconds: float | None = None,
        return_obj_refs: bool = False,
        mark_healthy: bool = False,
    ) -> RemoteCallResults:
        """The results of all learners that were asked, in their order.

        Raises:
            LearnerError: one died, one gave no answer within `learner_timeout_s`, or the learners
                were ended by an earlier error.
            Exception: what a learner raised; if there are several, they are ended, since the
                others may wait for it.
        """
        ids = self.actor_ids() if remote_actor_ids is None else remote_actor_ids
        if not all(self.is_actor_healthy(actor_id) for actor_id in ids):
            raise LearnerError(f"The learners were ended by an earlier error. {ADVICE}")
        calls = self._call_actors(func, kwargs=kwargs, remote_actor_ids=ids)
        answers = self._wait(dict(zip(calls, ids, strict=True)), _name(func), return_obj_refs)
        results = RemoteCallResults()
        for ref, actor_id in zip(calls, ids, strict=True):
            answer = ref if return_obj_refs else answers[ref]
            results.add_result(actor_id, ResultOrError(result=answer), None)
        return results

    def _wait(
        self, learner_of: dict[ray.ObjectRef, int], what: str, only_refs: bool
    ) -> dict[ray.ObjectRef, Any]:
        """Answers by reference, when all are there (with `only_refs`: maybe none); raises when one
        cannot come."""
        start, limit = time.monotonic(), self.limits[what].seconds()
        waiting, ready, answers = list(learner_of), [], {}
        while waiting:
            arrived, waiting = ray.wait(
                waiting, num_returns=len(waiting), timeout=SECONDS_BEHIND, fetch_local=False
            )
            ready += arrived
            if waiting or not only_refs:  # one that failed would be what the others wait for
                for ref in ready:
                    answers[ref] = self._get(ref, learner_of[ref], what)
                ready = []
            if waiting and limit is not None and time.monotonic() - start > limit:
                self._end_silent([learner_of[ref] for ref in waiting], what, limit)
        self.limits[what].record(time.monotonic() - start)
        return answers

    def _end_silent(self, learners: list[int], what: str, limit: float) -> None:
        self.end()
        raise LearnerError(
            f"Of {self.num_actors()} learners, {sorted(learners)} gave no answer to {what} in "
            f"{limit:.0f} s and were killed (learner_timeout_s={self.limits[what].setting!r}, "
            f"slowest answer so far {self.limits[what].slowest:.1f} s). {ADVICE}"
        )

    def _get(self, ref: ray.ObjectRef, learner: int, what: str) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            logger.error("Learner %d raised in %s: %s", learner, what, error)
            if self.num_actors() > 1:
                self.end()
            raise error.as_instanceof_cause() from None
        except RayError as error:  # it died, could not be started, or lost the answer
            self.end()
            raise LearnerError(f"Learner {learner} died in {what}: {error} {ADVICE}") from error

    def end(self) -> None:
        """Kills all learners: also those that hang, or that wait for one that is gone."""
        for actor_id, actor in self.actors().items():
            self.set_actor_state(actor_id, healthy=False)
            ray.kill(actor)


def _name(func: Any) -> str:
    function = getattr(func, "func", func)  # what a functools.partial calls
    return f"{func}()" if isinstance(func, str) else f"{getattr(function, '__name__', function)}()"
