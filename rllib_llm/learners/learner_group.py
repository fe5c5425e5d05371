"""Several learners: one error or one silence ends a call for all, and state is read from all.

RLlib's LearnerGroup, for learners that may hold shards.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.rllib.core import COMPONENT_LEARNER
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.actor_manager import (
    FaultTolerantActorManager,
    RemoteCallResults,
    ResultOrError,
)

from rllib_llm.shared.process import TimeLimit

logger = logging.getLogger(__name__)

SECONDS_BEHIND = 1.0  # that an answer may be behind another before that one is looked at
ADVICE = (
    "What was learnt since the last checkpoint is lost: set Tune's FailureConfig(max_failures=...),"
    " or build the algorithm again and restore_from_path."
)


class LearnerError(RuntimeError):
    """A learner died or hung; training since the last checkpoint is lost."""


class CallOrderError(RuntimeError):
    """A call that learners refuse before they begin: all do alike, and none waits for another."""


class LearnerActors(FaultTolerantActorManager):
    """RLlib's actor manager, which waits for all learners, but ends the wait when one fails: the
    others would wait for its gradients for ever."""

    def __init__(self, actors: list[Any], *, timeout_s: float | str | None, **kwargs: Any):
        super().__init__(actors, **kwargs)
        # By what is asked: a state is quickly given, and says nothing about an update.
        self.limits: dict[str, TimeLimit] = defaultdict(lambda: TimeLimit(timeout_s))

    def foreach_actor(
        self, func: Any, *, kwargs: Any = None, healthy_only: bool = True,
        remote_actor_ids: list[int] | None = None, timeout_seconds: float | None = None,
        return_obj_refs: bool = False, mark_healthy: bool = False,
    ) -> RemoteCallResults:  # fmt: skip
        """The results of the called learners, in their order.

        Raises:
            LearnerError: one died, one gave no answer within `learner_timeout_s`, or the learners
                were ended by an earlier error.
            CallOrderError: what was called has to wait for another call.
            Exception: what else a learner raised; if there are several, they are ended, since the
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
                self.end()
                silent, known = sorted(learner_of[ref] for ref in waiting), self.limits[what]
                raise LearnerError(
                    f"Of {self.num_actors()} learners, {silent} gave no answer to {what} in "
                    f"{limit:.0f} s and were killed (learner_timeout_s={known.setting!r}, "
                    f"slowest answer so far {known.slowest:.1f} s). {ADVICE}"
                )
        self.limits[what].record(time.monotonic() - start)
        return answers

    def _get(self, ref: ray.ObjectRef, learner: int, what: str) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            logger.error("Learner %d raised in %s: %s", learner, what, error)
            cause = error.as_instanceof_cause()
            if self.num_actors() > 1 and not isinstance(cause, CallOrderError):
                self.end()
            raise cause from None
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


# A file that a learner writes after everything else of a checkpoint.
LEARNER_DONE = "learner_done"


class LanguageModelLearnerGroup(LearnerGroup):
    """As RLlib's, which asks only its first learner for the state, one that would wait for the
    others forever, and waits for all when one has failed."""

    publish: Callable[[], None] | None = None  # what gives out weights that were set

    def __init__(self, *, config, module_spec=None, placement_group=None):
        super().__init__(config=config, module_spec=module_spec, placement_group=placement_group)
        if self.is_remote:
            self._worker_manager = LearnerActors(
                self._workers,
                timeout_s=config.learner_timeout_s,
                max_remote_requests_in_flight_per_actor=config.max_requests_in_flight_per_learner,
            )

    def get_state(self, components=None, *, not_components=None, **kwargs: Any) -> dict[str, Any]:
        """The whole state, as any number of learners with or without shards can take it."""
        wanted = self._check_component(COMPONENT_LEARNER, components, not_components)
        if self.is_local or not wanted:
            return super().get_state(components, not_components=not_components, **kwargs)
        parts = self._get_subcomponents(COMPONENT_LEARNER, components)
        not_parts = self._get_subcomponents(COMPONENT_LEARNER, not_components)

        def read(learner):
            state = learner.get_state(parts, not_components=not_parts, **kwargs)
            return state if learner.rank == 0 else None

        states = self._get_results(self.foreach_learner(read))
        return {COMPONENT_LEARNER: next(state for state in states if state is not None)}

    @contextmanager
    def setting_weights(self) -> Iterator[None]:
        """Publishes the weights at the end of the outermost block of this kind."""
        publish, self.publish = self.publish, None
        try:
            yield
        finally:
            self.publish = publish
        if publish is not None:
            publish()

    def set_state(self, state: dict[str, Any]) -> None:
        """As RLlib's; the weights are published."""
        with self.setting_weights():
            super().set_state(state)

    def restore_from_path(self, path, **kwargs: Any) -> None:
        """As RLlib's; the weights are published."""
        with self.setting_weights():
            super().restore_from_path(path, **kwargs)

    def save_to_path(self, path=None, *, state=None, **kwargs: Any) -> str:
        """As RLlib's, with the state read from all learners, to a local path.

        Raises:
            OSError: the learner could not write; RLlib does not ask a remote one.
        """
        if state is None and self.is_remote:
            state = self.get_state()
        path = super().save_to_path(path, state=state, **kwargs)
        if not (Path(path) / COMPONENT_LEARNER / LEARNER_DONE).is_file():
            raise OSError(f"the learner did not write all of {path}; usually its disk is full")
        return path
