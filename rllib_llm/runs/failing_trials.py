"""Tune callbacks for trials that fail: broken ones end, hung and killed ones start again.

Tune does not know Ray's `OutOfMemoryError`: where Ray's memory monitor kills a trial's process,
`Tuner.fit` itself raises, whatever `max_failures` says. `fit` restores the run, as `--resume` does.
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayTaskError
from ray.tune import Callback

from rllib_llm.envs.judges.reward_functions import RewardError
from rllib_llm.overseer.diagnosis import PAUSED
from rllib_llm.rollouts.errors import BrokenSamplerError
from rllib_llm.runs.results import local_folder
from rllib_llm.shared.messages import TrialEar
from rllib_llm.shared.process import StarvedProcesses, TimeLimit
from rllib_llm.shared.ray_compat import processes_of

logger = logging.getLogger(__name__)

BROKEN = (BrokenSamplerError, RewardError)  # in remote samplers, and in the trial's own process


class EndBrokenTrials(Callback):
    """Ends a trial whose sampler code fails by itself twice at the same iteration. Tune's
    `max_failures` is meant for processes that die, but Tune retries any error."""

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
    """The error that ended the trial's process, from the file that Tune has just written;
    `trial.get_pickled_error` reads a copy that is made later."""
    if trial.pickled_error_file is None:
        return None
    error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    return error.as_instanceof_cause() if isinstance(error, RayTaskError) else error


RUNNING = "RUNNING"
STEP_SECONDS = 5.0  # that a step of Tune may take; more is Tune's own silence
FIRST_SECONDS = 6 * 3600.0  # models are loaded, the first iteration may be an evaluation as well
LOOK_FROM = 0.5  # of the limit: from then on it is looked at why a trial is silent
LOOK_SECONDS = 1.0  # between two looks
FIRST_SAVE_SECONDS = 3600.0  # nothing is known of the disk yet


class RestartHungTrials(Callback):
    """Kills a trial's process that reports nothing for too long, so that Tune's `FailureConfig`
    restarts it from its last checkpoint. Tune notices processes that die, but not those that hang.
    Saving a checkpoint has its own limit.

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
            is_waiting = _is_paused(trial)
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
        """Subtracts time in which Tune's process was busy elsewhere, such as in a logger, so that
        it could not read reports."""
        if self._stepped is not None:
            own = max(0.0, now - self._stepped - STEP_SECONDS)
            self._heard = {trial: min(now, at + own) for trial, at in self._heard.items()}
        self._stepped = now


USED = re.compile(r"was (?P<used>[\d.]+)GB used / (?P<total>[\d.]+)GB limit")
USER = re.compile(r"^(?P<pid>\d+)\t(?P<gigabytes>[\d.]+)\t(?P<command>.+)$", re.MULTILINE)
MAX_USERS = 3  # that are named
MAX_CHARS = 60  # of a command line
REMEDY = (
    "Lower num_env_runners, max_concurrent_trials, micro_batch_size or sampling_batch_size, use "
    "dtype='bfloat16' or lora, or close what else uses memory."
)


class KilledForMemory(RuntimeError):
    """Ray killed trials for memory more often than `max_failures` allows; the message says which
    processes used it and which settings to lower."""


def fit(
    tuner: Any,
    restored: Callable[[], Any],
    max_failures: int,
    tell: Callable[[str], None],
    saved: Callable[[], object] = lambda: None,
) -> Any:
    """Return `tuner.fit()`; where Ray kills a trial for memory, that of the run as it was saved.

    Args:
        restored: returns a Tuner that goes on from the trials' last checkpoints.
        max_failures: how often without a new checkpoint in between, -1 for always.
        saved: which checkpoints there are; where that has changed, the run has moved on.
        tell: takes a sentence on what happened.

    Raises:
        KilledForMemory: once more than `max_failures` times.
    """
    num_killed, before = 0, saved()
    while True:
        try:
            return tuner.fit()
        except RuntimeError as error:
            if not isinstance(error.__cause__, OutOfMemoryError):
                raise
            told = memory_text(str(error.__cause__))
        if (now := saved()) != before:
            num_killed, before = 0, now
        if 0 <= max_failures <= num_killed:
            raise KilledForMemory(f"{told} {REMEDY}")
        num_killed += 1
        tell(f"{told} It goes on from its last checkpoint. {REMEDY}")
        tuner = restored()


def memory_text(message: str) -> str:
    """Return Ray's explanation of a killed process in a sentence or two: the machine's memory use
    and its largest users."""
    used = USED.search(message)
    full = f" ({used['used']} of {used['total']} GB in use)" if used else ""
    text = f"Ray killed a trial's process because the machine's memory was full{full}."
    users = [
        f"{user['command'].strip()[:MAX_CHARS]} ({user['gigabytes']} GB, process {user['pid']})"
        for user in USER.finditer(message)
    ]
    return f"{text} Most was used by {', '.join(users[:MAX_USERS])}." if users else text


def _is_paused(trial: Any) -> bool:
    """Whether a trial on this machine has recorded that it is paused."""
    folder = local_folder(trial)
    said = None if folder is None else TrialEar(folder).activity()
    return said is not None and said[0].startswith(PAUSED)
