"""The Tune callbacks that `rllib train` uses, for a `Tuner` in Python or in a file: results as JSON
Lines, one row per iteration, however often a trial is started again; what a resumed run takes from
its new start; and trials that fail: broken ones end, hung and killed ones start again. Tune calls
callbacks with names, and each takes those that it uses.

Tune does not know Ray's `OutOfMemoryError`: where Ray's memory monitor kills a trial's process,
`Tuner.fit` itself raises, whatever `max_failures` says. `fit` restores the run, as `--resume` does.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import errno
import json
import logging
import os
import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import ray
from pyarrow.fs import LocalFileSystem
from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayTaskError
from ray.tune import Callback, CheckpointConfig
from ray.tune.experiment import Trial
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback
from ray.tune.result import EXPR_PROGRESS_FILE, EXPR_RESULT_FILE, TRAINING_ITERATION
from ray.tune.utils.util import SafeFallbackEncoder

from rllib_llm.envs.judges.reward_functions import RewardError
from rllib_llm.overseer.phases import PAUSED, STOP_RUN
from rllib_llm.rollouts.errors import BrokenSamplerError
from rllib_llm.runs.results import local_folder, other_trials_checkpoint, read_results
from rllib_llm.runs.trackers import tracker_callbacks, wrong_trackers
from rllib_llm.runs.trial_checkpoints import (
    KeepBestCheckpoint,
    SaveOnStop,
    TimedCheckpoints,
    UseFailureCheckpoints,
)
from rllib_llm.shared.errors import report
from rllib_llm.shared.messages import TrialEar
from rllib_llm.shared.process import StarvedProcesses, TimeLimit
from rllib_llm.shared.ray_compat import processes_of
from rllib_llm.shared.storage import BestEffort, fetch_file, keep_json_rows

logger = logging.getLogger(__name__)

BROKEN = (BrokenSamplerError, RewardError)  # in remote samplers, and in the trial's own process


class EndBrokenTrials(Callback):
    """Ends a trial whose sampler code fails by itself twice at the same iteration. Tune's
    `max_failures` is meant for processes that die, but Tune retries any error."""

    def __init__(self) -> None:
        # By trial id, since such an error: Tune's own limit, and iterations done before.
        self._failed: dict[str, tuple[int, int]] = {}

    def on_trial_recover(self, trial: Any, **info: Any) -> None:
        # Tune has just written this file; `trial.get_pickled_error` reads a copy made later.
        if trial.pickled_error_file is None:
            return
        error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
        if not isinstance(error.cause if isinstance(error, RayTaskError) else error, BROKEN):
            return
        done = (trial.last_result or {}).get("training_iteration", 0)
        self._failed.setdefault(trial.trial_id, (trial.max_failures, done))
        trial.max_failures = trial.run_metadata.num_failures  # the next is the last
        logger.error("Trial %s is started again once after an error in a sampler.", trial)

    def on_trial_result(self, trial: Any, result: dict, **info: Any) -> None:
        max_failures, done = self._failed.get(trial.trial_id, (0, 0))
        if trial.trial_id in self._failed and result["training_iteration"] > done:
            trial.max_failures = max_failures
            del self._failed[trial.trial_id]


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
        saving = "auto" if isinstance(timeout_s, float | int) else timeout_s
        # By trial id: of results, and of checkpoints.
        self._limits: dict[str, tuple[TimeLimit, TimeLimit]] = defaultdict(lambda: (
            TimeLimit(timeout_s, first=FIRST_SECONDS), TimeLimit(saving, first=FIRST_SAVE_SECONDS),
        ))  # fmt: skip
        self._heard: dict[str, float] = {}  # monotonic seconds, by trial id
        self._stepped: float | None = None  # the last look
        self._starved: dict[str, StarvedProcesses] = {}  # of trials that are silent for long
        self._looked: dict[str, float] = {}  # monotonic seconds, at those

    def on_trial_start(self, trial: Any, **info: Any) -> None:
        self._heard[trial.trial_id] = time.monotonic()

    def on_trial_result(self, trial: Any, result: dict, **info: Any) -> None:
        self._hear(trial, 0)

    def on_trial_save(self, trial: Any, **info: Any) -> None:
        self._hear(trial, 1)

    def _hear(self, trial: Any, is_saved: int) -> None:
        """Notes that a result or a checkpoint has come, and after what time."""
        now, name = time.monotonic(), trial.trial_id
        if name in self._heard:
            self._limits[name][is_saved].record(now - self._heard[name])
        self._heard[name] = now

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        now = time.monotonic()
        if self._stepped is not None:
            # Time in which Tune's process was busy elsewhere, and could not read reports.
            own = max(0.0, now - self._stepped - STEP_SECONDS)
            self._heard = {trial: min(now, at + own) for trial, at in self._heard.items()}
        self._stepped = now
        for trial in trials:
            name, actor = trial.trial_id, trial.temporary_state.ray_actor
            if trial.status != Trial.RUNNING or actor is None:
                self._heard.pop(name, None)
                continue
            of_trial = self._limits[name][bool(trial.is_saving)]
            limit = of_trial.seconds()
            if limit is None or self._silent(trial, now, limit) <= limit:
                continue
            logger.error(
                "Trial %s is killed: it has %s for %.0f s, though it had cores (slowest: %.0f s).",
                trial, "been saving" if trial.is_saving else "reported nothing",
                now - self._heard[name], of_trial.slowest,
            )  # fmt: skip
            self._heard[name] = now
            ray.kill(actor)

    def _silent(self, trial: Any, now: float, limit: float) -> float:
        """Seconds that a trial has been silent though it could have worked. What its processes
        waited for (/proc) and whether it is paused (its file), nobody tells Tune: without, a trial
        of a busy machine, or a paused one, would be killed."""
        name = trial.trial_id
        silent = now - self._heard.setdefault(name, now)
        if silent < LOOK_FROM * limit:
            self._starved.pop(name, None)
            return silent
        if name not in self._starved:
            pids = processes_of(trial.temporary_state.ray_actor)
            self._starved[name] = StarvedProcesses(pids, time.monotonic)
            self._looked[name] = now
        if now - self._looked[name] >= LOOK_SECONDS or silent > limit:
            self._looked[name] = now
            starved, folder = self._starved[name].take(), local_folder(trial)
            activity = None if folder is None else TrialEar(folder).activity()
            is_paused = activity is not None and activity[0].startswith(PAUSED)
            self._heard[name] = now if is_paused else min(now, self._heard[name] + starved)
        return now - self._heard[name]


REMEDY = (
    "Lower num_env_runners, max_concurrent_trials, micro_batch_size or sampling_batch_size, use "
    "dtype='bfloat16' or lora, or close what else uses memory."
)


class NoRoomError(RuntimeError):
    """Ray killed trials for memory more often than `max_failures` allows, and its message says
    which processes used it; or a trial failed whose reason did not fit on the disk."""


def fit(
    tuner: Any, restored: Callable[[], Any], max_failures: int, tell: Callable[[str], None],
    saved: Callable[[], object] = lambda: None,
) -> Any:  # fmt: skip
    """Return `tuner.fit()`; where Ray kills a trial for memory, that of the run as it was saved.

    Args:
        restored: returns a Tuner that continues from the trials' last checkpoints.
        max_failures: how often without a new checkpoint in between, -1 for always.
        saved: which checkpoints there are; where that has changed, the run has moved on.
        tell: takes a sentence on what happened.

    Raises:
        NoRoomError: Ray kills once more than `max_failures` times, or Tune cannot read why a trial
            failed.
    """
    num_killed, before = 0, saved()
    while True:
        try:
            return tuner.fit()
        except (EOFError, pickle.UnpicklingError):
            why = f"its reason could not be written: {os.strerror(errno.ENOSPC)}"
            raise NoRoomError(f"a trial failed, and {why}") from None
        except RuntimeError as error:
            if not isinstance(error.__cause__, OutOfMemoryError):
                raise
            text = f"Ray killed a trial's process, since the memory was full: {error.__cause__}\n"
        if (now := saved()) != before:
            num_killed, before = 0, now
        if 0 <= max_failures <= num_killed:
            raise NoRoomError(f"{text}{REMEDY}")
        num_killed += 1
        tell(f"{text}It continues from its last checkpoint. {REMEDY}")
        tuner = restored()


class ResultLog(JsonLoggerCallback):
    """Writes each result to result.json in the trial's folder, which Tune's `ResultGrid` reads.

    A trial that continues from a checkpoint of its own, or from none, replaces the iterations after
    that. One that continues from the checkpoint of another trial of its run, as population-based
    training makes it, has its own rows as its past, whatever their iterations; only where it failed
    and continues from that checkpoint once more, the rows since then are replaced.

    To Tune it is a JSON logger, since Tune adds its own where it finds none; of that it takes only
    what writes params.json and params.pkl.
    """

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[Any, IO[bytes]] = {}
        self._sources: dict[Any, Path | None] = {}  # checkpoints of other trials
        self._num_rows: Counter[Any] = Counter()  # logged since the trial continued from there
        self._failed: set[Any] = set()
        self._disk = BestEffort(EXPR_RESULT_FILE)

    def log_trial_start(self, trial: Any) -> None:
        self._close(trial)
        source = other_trials_checkpoint(trial)
        if trial not in self._failed or source != self._sources.get(trial):
            self._num_rows[trial] = 0
        self._failed.discard(trial)
        self._sources[trial] = source
        with self._disk.writing():
            trial.init_local_path()
            self.update_config(trial, trial.config)

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        if result.get(STOP_RUN):
            before = (trial.last_result or {}).get(TRAINING_ITERATION)
            if before == result[TRAINING_ITERATION]:
                return  # stopped while it was paused: its last result once more
        with self._disk.writing():
            if trial not in self._files:  # its first result says what of the file to keep
                file, num_rows = _folder_of(trial) / EXPR_RESULT_FILE, self._num_rows.pop(trial, 0)
                is_own = self._sources.get(trial) is None
                replaced = (result[TRAINING_ITERATION], 0) if is_own else (None, num_rows)
                keep_json_rows(file, TRAINING_ITERATION, *replaced)
                # Unbuffered: what a full disk refuses must not stand before the next row.
                self._files[trial] = file.open("ab", buffering=0)
            row = json.dumps(result, cls=SafeFallbackEncoder) + "\n"
            append_whole(self._files[trial], row.encode())
            self._num_rows[trial] += 1

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        self._close(trial)

    def on_trial_recover(self, trial: Any, **info: Any) -> None:
        self._failed.add(trial)

    def _close(self, trial: Any) -> None:
        if trial in self._files:
            self._files.pop(trial).close()


class CsvAtEnd(CSVLoggerCallback):
    """Makes progress.csv from the result.json of a trial that ends: nested names joined by "/", the
    config left out, every column that some row has. Tune's own knows the first row's columns, and
    repeats rows that are computed anew."""

    def log_trial_start(self, *args: Any, **info: Any) -> None: ...

    log_trial_result = log_trial_start

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        with BestEffort(EXPR_PROGRESS_FILE).writing():
            folder = _folder_of(trial)
            rows = read_results(folder)
            names = dict.fromkeys(
                name for row in rows for name in row if not name.startswith("config/")
            )
            if not rows:
                return
            with (folder / EXPR_PROGRESS_FILE).open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, names, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)


def append_whole(file: IO[bytes], row: bytes) -> None:
    """Append the row, or nothing where it does not fit on the disk.

    Raises:
        OSError: it does not fit.
    """
    end = file.seek(0, os.SEEK_END)
    try:
        if file.write(row) != len(row):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


def _folder_of(trial: Any) -> Path:
    """The trial's folder; where that is not on this machine the one that Tune uploads there, with
    the results that a process before this one wrote."""
    filesystem, folder = trial.storage.storage_filesystem, trial.storage.trial_fs_path
    if isinstance(filesystem, LocalFileSystem):
        Path(folder).mkdir(parents=True, exist_ok=True)
        return Path(folder)
    staged = Path(trial.local_path)
    staged.mkdir(parents=True, exist_ok=True)
    source = f"{folder}/{EXPR_RESULT_FILE}"
    fetch_file(filesystem, source, staged / EXPR_RESULT_FILE)
    return staged


def default_callbacks(
    *, checkpoint_interval_s: float | str | None = "auto",
    hung_trial_timeout_s: float | str | None = "auto", metric: str | None = None,
    mode: str | None = None, trackers: Sequence[str] = (),
) -> list[Callback]:  # fmt: skip
    """Return new callbacks for one `tune.RunConfig(callbacks=...)`, whose storage is a folder.

    They write each result once, however often a trial is started again; have a checkpoint saved
    every few minutes, on Ctrl-C and SIGTERM, and before an iteration that failed; keep the best
    one; restart trials that hang, and end those whose reward function has a bug.

    Args:
        checkpoint_interval_s: see `TimedCheckpoints`; None: no checkpoints by time.
        hung_trial_timeout_s: see `RestartHungTrials`; None: a silent trial is waited for.
        metric, mode: the result that `best_checkpoint` goes by; see `KeepBestCheckpoint`.
        trackers: wandb, mlflow, tensorboard or trackio, which get every result.

    Raises:
        Problems: a tracker that is unknown, not installed, or lacks its key.
    """
    callbacks: list[Callback] = [ResultLog(), CsvAtEnd()]
    if checkpoint_interval_s is not None:
        callbacks.append(TimedCheckpoints(checkpoint_interval_s))
    callbacks += [KeepBestCheckpoint(metric, mode), UseFailureCheckpoints(), SaveOnStop()]
    callbacks += [RestartHungTrials(hung_trial_timeout_s), EndBrokenTrials()]
    report(wrong_trackers(trackers))
    callbacks += tracker_callbacks(trackers, "python", "trial")
    return callbacks


class NewTerms(Callback):
    """Gives every trial the stop criteria, the number of failures, the checkpoints to keep and the
    settings that follow from them of this start; a trial that `Tuner.restore` brings back has those
    of the first.

    Checkpoints beyond the number to keep are deleted at once: a full disk may be why it is lower.
    """

    def __init__(
        self, stop: Mapping[str, Any], max_failures: int, checkpoint_config: CheckpointConfig,
        settings: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self._stop, self._settings = dict(stop), dict(settings or {})
        self._max_failures, self._checkpoint_config = max_failures, checkpoint_config
        self._given: set[str] = set()  # trial ids

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        for trial in trials:
            if trial.trial_id not in self._given:
                self._given.add(trial.trial_id)
                trial.stopping_criterion = dict(self._stop)
                trial.max_failures = self._max_failures
                if self._settings:
                    trial.set_config({**trial.config, **self._settings})
                manager = trial.run_metadata.checkpoint_manager
                before = list(manager.best_checkpoint_results)
                for field in dataclasses.fields(self._checkpoint_config):
                    value = getattr(self._checkpoint_config, field.name)
                    setattr(manager.checkpoint_config, field.name, value)
                kept = [*manager.best_checkpoint_results, manager.latest_checkpoint_result]
                paths = {result.checkpoint.path for result in kept if result is not None}
                for path in {Path(result.checkpoint.path) for result in before}:
                    is_own = str(path.parent) == trial.storage.trial_fs_path
                    if str(path) not in paths and is_own and path.is_dir():
                        # Tune deletes the folder itself with the next checkpoint.
                        LocalFileSystem().delete_dir_contents(str(path))
