"""Population-based training that goes on after `--resume`, and after a failure of a trial."""

from __future__ import annotations

from typing import Any

from ray.tune.schedulers import PopulationBasedTraining
from ray.tune.utils import flatten_dict


class ResumablePBT(PopulationBasedTraining):
    """Tune's scheduler, which counts from the checkpoints that trials go on from. Tune's own begins
    at 0 in a resumed run: it perturbs at once, and where trials wait for each other (`synch`) and
    two intervals or more have passed, each then waits for a time that all have reached, for ever.
    """

    _next_perturbation_sync: float  # Tune's own

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        saved = trial.latest_checkpoint_result
        if saved is not None:
            interval = self._perturbation_interval
            time = flatten_dict(saved.metrics).get(self._time_attr, 0)
            self._trial_state[trial].last_perturbation_time = time // interval * interval

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        reached = [
            self._trial_state[live].last_train_time for live in tune_controller.get_live_trials()
        ]
        if self._synch and reached and min(reached) >= self._next_perturbation_sync:
            intervals = max(reached) // self._perturbation_interval + 1
            self._next_perturbation_sync = intervals * self._perturbation_interval
        return decision
