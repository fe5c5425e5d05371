"""A Tune callback that restarts trials whose process has stopped answering."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import Any

import ray
from ray.tune import Callback

from rllib_llm.overseer.messages import is_paused
from rllib_llm.shared.process import StarvedProcesses, TimeLimit
from rllib_llm.shared.ray_compat import processes_of

logger = logging.getLogger(__name__)

RUNNING = "RUNNING"
STEP_SECONDS = 5.0  # that a step of Tune may take; more is Tune's own silence
FIRST_SECONDS = 6 * 3600.0  # models are loaded, the first iteration may be an evaluation as well
LOOK_FROM = 0.5  # of the limit: from then on it is looked at why a trial is silent
LOOK_SECONDS = 1.0  # between two looks
FIRST_SAVE_SECONDS = 3600.0  # nothing is known of the disk yet


class RestartHungTrials(Callback):
    """Kills a trial's process that reports nothing for too long; Tune's `FailureConfig` restarts it
    from its last checkpoint. Tune itself notices processes that die, but waits for those that hang.
    Saving a checkpoint has a limit of its own.

    Time in which a trial's processes were ready to compute and had no core does not count: one that
    is starved is not hung. Nor does time for which the trial was paused. (Cores of other machines
    than this are not looked at.)
    """

    def __init__(self, timeout_s: float | str | None = "auto"):
        """`timeout_s`: seconds without a result. "auto": ten times the longest time between two
        results of this trial and at least 120 s, six hours for the first. None: for ever."""
        self._limits: dict[str, TimeLimit] = defaultdict(
            lambda: TimeLimit(timeout_s, first=FIRST_SECONDS)
        )
        saving = "auto" if isinstance(timeout_s, float | int) else timeout_s
        self._save_limits: dict[str, TimeLimit] = defaultdict(
            lambda: TimeLimit(saving, first=FIRST_SAVE_SECONDS)
        )
        self._heard: dict[str, float] = {}  # monotonic seconds, by trial id
        self._stepped: float | None = None  # the last look
        self._starved: dict[str, StarvedProcesses] = {}  # of trials that are silent for long
        self._looked: dict[str, float] = {}  # monotonic seconds, at those

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._heard[trial.trial_id] = time.monotonic()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict, **info: Any
    ) -> None:
        self._hear(trial, self._limits)

    def on_trial_save(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._hear(trial, self._save_limits)

    def _hear(self, trial: Any, limits: dict[str, TimeLimit]) -> None:
        """Notes that a result or a checkpoint has come, and after what time."""
        now = time.monotonic()
        heard = self._heard.get(trial.trial_id)
        if heard is not None:
            limits[trial.trial_id].record(now - heard)
        self._heard[trial.trial_id] = now

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        now = time.monotonic()
        self._forgive_own_silence(now)
        for trial in trials:
            actor = trial.temporary_state.ray_actor
            if trial.status != RUNNING or actor is None:
                self._heard.pop(trial.trial_id, None)
                continue
            limits = self._save_limits if trial.is_saving else self._limits
            limit = limits[trial.trial_id].seconds()
            if limit is not None and self._silent(trial, now, limit) > limit:
                self._kill(trial, now, limits[trial.trial_id].slowest)

    def _silent(self, trial: Any, now: float, limit: float) -> float:
        """Seconds that a trial has been silent though it could have worked."""
        name = trial.trial_id
        silent = now - self._heard.setdefault(name, now)
        if silent < LOOK_FROM * limit:
            self._starved.pop(name, None)
            return silent
        if name not in self._starved:
            self._starved[name] = StarvedProcesses(
                processes_of(trial.temporary_state.ray_actor), time.monotonic
            )
            self._looked[name] = now
        if now - self._looked[name] >= LOOK_SECONDS or silent > limit:
            self._looked[name] = now
            is_waiting = is_paused(trial)
            starved = self._starved[name].take()
            self._heard[name] = now if is_waiting else min(now, self._heard[name] + starved)
        return now - self._heard[name]

    def _kill(self, trial: Any, now: float, slowest: float) -> None:
        logger.error(
            "Trial %s is killed: it has %s for %.0f s, in which it had cores to work on (slowest "
            "so far %.0f s).",
            trial, "been saving" if trial.is_saving else "reported nothing",
            now - self._heard[trial.trial_id], slowest,
        )  # fmt: skip
        self._heard[trial.trial_id] = now
        ray.kill(trial.temporary_state.ray_actor)

    def _forgive_own_silence(self, now: float) -> None:
        """Takes out time in which Tune's process did other things, such as waiting for a logger:
        what a trial reported meanwhile has not been read."""
        if self._stepped is not None:
            own = max(0.0, now - self._stepped - STEP_SECONDS)
            self._heard = {trial: min(now, at + own) for trial, at in self._heard.items()}
        self._stepped = now
