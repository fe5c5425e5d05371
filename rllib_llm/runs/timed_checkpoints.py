"""A Tune callback that has trials save a checkpoint every few minutes."""

from __future__ import annotations

import logging
import time
from typing import Any

from ray.tune import Callback
from ray.tune.result import SHOULD_CHECKPOINT

logger = logging.getLogger(__name__)

INTERVAL_S = 300.0
MAX_SHARE = 0.02  # of the time, that saving may take


class TimedCheckpoints(Callback):
    """Asks for a checkpoint with the first result after the interval has passed."""

    def __init__(self, interval_s: float | str = "auto"):
        """`interval_s`: seconds between checkpoints of a trial. "auto": five minutes, or more where
        saving would take over 2 % of the time; trials that save by iterations are left alone."""
        self._interval_s = interval_s
        self._since: dict[str, float] = {}  # monotonic seconds of the last checkpoint, by trial id
        self._asked: dict[str, float] = {}  # and of a checkpoint that is being saved
        self._slowest: dict[str, float] = {}  # seconds that saving took

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._since[trial.trial_id] = time.monotonic()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if self._interval_s == "auto" and trial.checkpoint_freq:
            return
        now = time.monotonic()
        if now - self._since.setdefault(trial.trial_id, now) >= self.seconds(trial.trial_id):
            result[SHOULD_CHECKPOINT] = True
            self._asked[trial.trial_id] = now

    def on_trial_save(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        now = time.monotonic()
        self._since[trial.trial_id] = now
        asked = self._asked.pop(trial.trial_id, None)
        if asked is not None:
            self._note_cost(trial, now - asked)

    def seconds(self, trial_id: str) -> float:
        """Seconds from one checkpoint of a trial to the next."""
        if not isinstance(self._interval_s, str):
            return self._interval_s
        return max(INTERVAL_S, self._slowest.get(trial_id, 0.0) / MAX_SHARE)

    def _note_cost(self, trial: Any, seconds: float) -> None:
        before = self.seconds(trial.trial_id)
        self._slowest[trial.trial_id] = max(seconds, self._slowest.get(trial.trial_id, 0.0))
        if self.seconds(trial.trial_id) > before:
            logger.warning(
                "A checkpoint of %s takes %.0f s: so that this costs no more than %.0f %% of the "
                "time, there is one every %.0f min. checkpoint_interval_s says otherwise.",
                trial, seconds, 100 * MAX_SHARE, self.seconds(trial.trial_id) / 60,
            )  # fmt: skip
