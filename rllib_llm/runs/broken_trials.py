"""A Tune callback that does not start a trial again and again whose reward function has a bug."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.exceptions import RayTaskError
from ray.tune import Callback

from rllib_llm.envs.judges.reward_functions import RewardError
from rllib_llm.rollouts.errors import BrokenSamplerError

logger = logging.getLogger(__name__)

BROKEN = (BrokenSamplerError, RewardError)  # in remote samplers, and in the trial's own process


class EndBrokenTrials(Callback):
    """Ends a trial in which what samplers run fails of itself twice at the same iteration. To Tune,
    whose `max_failures` is meant for processes that die, every error is worth a restart.
    """

    def __init__(self) -> None:
        # By trial id, since such an error: Tune's own limit, and iterations done before.
        self._failed: dict[str, tuple[int, int]] = {}
        self._to_reset: dict[str, int] = {}  # limits to give back to the trials of a resumed run

    def get_state(self) -> dict[str, Any] | None:
        """Limits as they were: Tune notes the lowered ones with its trials for a resumed run."""
        limits = {name: limit for name, (limit, _) in self._failed.items()}
        return {"max_failures": {**self._to_reset, **limits}}

    def set_state(self, state: dict[str, Any]) -> None:
        self._to_reset = dict(state["max_failures"])

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        for trial in trials if self._to_reset else ():
            trial.max_failures = self._to_reset.pop(trial.trial_id, trial.max_failures)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if not isinstance(_latest_error(trial), BROKEN):
            return
        done = (trial.last_result or {}).get("training_iteration", 0)
        self._failed.setdefault(trial.trial_id, (trial.max_failures, done))
        trial.max_failures = trial.run_metadata.num_failures  # the next is the last
        logger.error("Trial %s is started again once after an error in a sampler.", trial)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict, **info: Any
    ) -> None:
        max_failures, done = self._failed.get(trial.trial_id, (0, 0))
        if trial.trial_id in self._failed and result["training_iteration"] > done:
            trial.max_failures = max_failures
            del self._failed[trial.trial_id]


def _latest_error(trial: Any) -> Exception | None:
    """What ended the trial's process, from the file that Tune wrote just now; its copy among the
    results, which `trial.get_pickled_error` reads, comes later."""
    if trial.pickled_error_file is None:
        return None
    error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    return error.as_instanceof_cause() if isinstance(error, RayTaskError) else error
