"""RLlib's LearnerGroup for learners that may hold shards: their state is read from all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.rllib.core import COMPONENT_LEARNER
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_llm.learners.learner_actors import LearnerActors

# A file that a learner writes after everything else of a checkpoint.
LEARNER_DONE = "learner_done"


class LanguageModelLearnerGroup(LearnerGroup):
    """As RLlib's, which asks only its first learner for the state, one that would wait for the
    others forever, and waits for all when one has failed."""

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

    def save_to_path(self, path=None, *, state=None, **kwargs: Any) -> str:
        """As RLlib's, with the state read from all learners, to a local path.

        Raises:
            OSError: the learner could not write; RLlib does not ask a remote one.
        """
        if state is None and self.is_remote:
            state = self.get_state()
        path = super().save_to_path(path, state=state, **kwargs)
        if not (Path(path) / COMPONENT_LEARNER / LEARNER_DONE).is_file():
            raise OSError(
                f"checkpoint={str(path)!r} must hold what the learner knows: it could not write "
                "all of it. The learner's log says why; usually its disk is full."
            )
        return path
