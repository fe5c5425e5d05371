"""Tune callbacks that decide when trials save checkpoints, which are kept, and where trials
continue.

A held-out result belongs to the weights that were evaluated, and stands in later results until the
next evaluation. So a trial is asked for a checkpoint with each result that is the best so far, and
a checkpoint counts only with a result that was measured on it.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyarrow.fs import copy_files
from ray.tune import Callback, Checkpoint
from ray.tune.experiment import Trial
from ray.tune.result import (
    EXPR_ERROR_PICKLE_FILE,
    SHOULD_CHECKPOINT,
    TIME_TOTAL_S,
    TRAINING_ITERATION,
)

from rllib_llm.checkpoints.folder import MANIFEST, CheckpointError, check
from rllib_llm.overseer.phases import STOP_RUN
from rllib_llm.runs.metrics import is_held_out
from rllib_llm.runs.results import HELD_OUT, flatten, number, read_json_lines
from rllib_llm.shared.ray_compat import (
    drop_decisions,
    own_ray_has_ended,
    set_checkpoints,
    training_result,
    trial_of_record,
)
from rllib_llm.shared.run_layout import RESULTS, RunFolder
from rllib_llm.shared.storage import (
    BestEffort,
    Place,
    local_copy,
    place_in,
    read_json,
    remove,
    replace_text,
)

logger = logging.getLogger(__name__)

INTERVAL_S = 300.0
MAX_SHARE = 0.02  # of the time, that saving may take


class TimedCheckpoints(Callback):
    """Asks for a checkpoint with the first result after the interval has passed. Tune counts
    iterations alone."""

    def __init__(self, interval_s: float | str = "auto"):
        """`interval_s`: seconds between checkpoints of a trial. "auto": five minutes, or more where
        saving would take over 2 % of the time; trials that save by iterations are left alone."""
        self._interval_s = interval_s
        self._since: dict[str, float] = {}  # monotonic seconds of the last checkpoint, by trial id
        self._asked: dict[str, float] = {}  # and of a checkpoint that is being saved
        self._slowest: dict[str, float] = {}  # seconds that saving took

    def on_trial_start(self, trial: Any, **info: Any) -> None:
        self._since[trial.trial_id] = time.monotonic()

    def on_trial_result(self, trial: Any, result: dict[str, Any], **info: Any) -> None:
        if self._interval_s == "auto" and trial.checkpoint_freq:
            return
        now = time.monotonic()
        if now - self._since.setdefault(trial.trial_id, now) >= self.seconds(trial.trial_id):
            result[SHOULD_CHECKPOINT] = True
            self._asked[trial.trial_id] = now

    def on_trial_save(self, trial: Any, **info: Any) -> None:
        name, now = trial.trial_id, time.monotonic()
        self._since[name] = now
        if (asked := self._asked.pop(name, None)) is None:
            return
        before = self.seconds(name)
        self._slowest[name] = max(now - asked, self._slowest.get(name, 0.0))
        if self.seconds(name) > before:
            text = "Saving %s takes %.0f s: once every %.0f min, or as checkpoint_interval_s says."
            logger.warning(text, trial, now - asked, self.seconds(name) / 60)

    def seconds(self, trial_id: str) -> float:
        """Seconds from one checkpoint of a trial to the next."""
        if not isinstance(self._interval_s, str):
            return self._interval_s
        return max(INTERVAL_S, self._slowest.get(trial_id, 0.0) / MAX_SHARE)


MEASURED = "eval/iteration"  # after which iteration what stands under eval/ was measured
BEST_CHECKPOINT = "best_checkpoint"
RECORD = "best_checkpoint.json"


class KeepBestCheckpoint(Callback):
    """Keeps `best_checkpoint` in a trial's folder equal to the checkpoint with the best held-out
    result, and `best_checkpoint.json` naming it. Takes no extra space while Tune keeps that
    checkpoint: files are linked; at a URL they are copied."""

    def __init__(self, metric: str | None = None, mode: str | None = None):
        """`metric`, `mode`: another result to go by, "max" or "min"."""
        self._rules = HELD_OUT if metric is None else ((metric, mode or "max"),)
        self._best: dict[str, dict[str, Any]] = {}  # by trial id, saved in this start
        self._copy = BestEffort(BEST_CHECKPOINT)

    def on_trial_result(self, trial: Any, result: dict[str, Any], **info: Any) -> None:
        record = self._record(flatten(result), "")
        if record is not None and _is_better(record, self._best.get(trial.trial_id, {})):
            result[SHOULD_CHECKPOINT] = True

    def on_checkpoint(self, trial: Any, checkpoint: Any, **info: Any) -> None:
        record = self._record(flatten(trial.last_result or {}), Path(checkpoint.path).name)
        if record is None:
            return
        # Only now: a trial that dies while it saves is asked again.
        if _is_better(record, self._best.get(trial.trial_id, {})):
            self._best[trial.trial_id] = record
        source = place_in(checkpoint.filesystem, checkpoint.path)
        target, file = source.parent / BEST_CHECKPOINT, source.parent / RECORD
        with self._copy.writing():
            before = read_json(file) if target.is_dir() else {}
            if not source.is_dir() or not _is_better(record, before):
                return
            if isinstance(source, Path):
                _link(source, source.parent / BEST_CHECKPOINT)
            else:  # files are copied, the record last: without it there is no best checkpoint
                file.unlink(missing_ok=True)
                if target.is_dir():
                    remove(target)
                target.mkdir()
                path = f"{source.parent.path}/{BEST_CHECKPOINT}"
                copy_files(source.path, path, source.filesystem, source.filesystem)
            file.write_text(json.dumps(record, indent=1), encoding="utf-8")

    def _record(self, result: Mapping[str, Any], name: str) -> dict[str, Any] | None:
        """The recorded value of a checkpoint: the first of the rules' results measured in this
        iteration, or None."""
        iteration = result.get("training_iteration")
        for metric, mode in self._rules:
            value = number(result.get(metric))
            measured = result.get(MEASURED, iteration) if is_held_out(metric) else iteration
            if value is not None and measured == iteration:
                return {"metric": metric, "mode": mode, "value": value, "checkpoint": name,
                        "training_iteration": iteration}  # fmt: skip
        return None


def _is_better(record: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    if before.get("metric") != record["metric"]:
        return True
    gain = record["value"] - before["value"]
    return gain > 0 if record["mode"] == "max" else gain < 0


def _link(source: Path, target: Path) -> None:
    """Makes `target` the same files as `source`, which may be deleted later."""

    def link_or_copy(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # a file system without links
            shutil.copy2(source, target)

    partial, replaced = (target.with_name(f".{target.name}.{it}") for it in ("partial", "replaced"))
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=link_or_copy)
    shutil.rmtree(replaced, ignore_errors=True)
    if target.is_dir():
        os.rename(target, replaced)
    os.rename(partial, target)
    shutil.rmtree(replaced, ignore_errors=True)


class UseFailureCheckpoints(Callback):
    """Tells Tune of checkpoints in a trial's folder that it does not know of, so that a restart, or
    `Tuner.restore`, continues from the newest: what `WholeCheckpoints.train` writes when an
    iteration fails, and what a run that was killed had saved since Tune's record."""

    _has_begun = False  # in this start; here, as Tune pickles the instance, and older ones lack it

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Brings restored trials up to date, before they start."""
        for trial in () if self._has_begun else trials:
            storage = trial.storage
            _bring_up_to_date(trial, place_in(storage.storage_filesystem, storage.trial_fs_path))
        self._has_begun = True

    def on_trial_recover(self, trial: Any, **info: Any) -> None:
        """Gives the trial the newest checkpoint in its folder, if that is of its last result."""
        filesystem = trial.storage.storage_filesystem
        folder = place_in(filesystem, trial.storage.trial_fs_path)
        newest = next(iter(RunFolder(folder).checkpoints()), None)
        if newest is None or not trial.has_reported_at_least_once:
            return
        path = f"{trial.storage.trial_fs_path}/{newest.name}"
        is_known = trial.checkpoint is not None and trial.checkpoint.path == path
        # A sum of measured times: no other state of this trial has the same.
        time_of_it = read_json(newest / MANIFEST).get(TIME_TOTAL_S)
        if not is_known and time_of_it == trial.last_result.get(TIME_TOTAL_S):
            checkpoint = Checkpoint(path, filesystem)
            trial.on_checkpoint(training_result(checkpoint, dict(trial.last_result)))

    on_trial_error = on_trial_recover


# Tune's files of a stage, each named by the time of the start that wrote it.
STATE_FILES = re.compile(
    r"(experiment_state|basic-variant-state|search_gen_state|searcher-state)-(.*)\.(json|pkl)"
)
CUT_SHORT = (ValueError, EOFError, pickle.UnpicklingError)


def note_saved(stage: Place) -> None:
    """Brings Tune's record of a stage up to what lies in the folders of its trials.

    Tune has no setting for it: its record is some seconds old (TUNE_GLOBAL_CHECKPOINT_S), so a run
    that was killed has perhaps saved checkpoints since, and deleted those that the record names: it
    could not be resumed, or would write under names that are taken, of which the older entry is
    deleted with the newer folder. And Tune begins anew, without an error, where its newest files
    are cut short, as by a full disk: those of later starts than the newest whole one are removed,
    and pickled errors, which error.txt tells as well.

    Raises:
        ValueError, EOFError, UnpicklingError: the record of the only start is cut short.
    """
    for error in RunFolder(stage).in_trials(EXPR_ERROR_PICKLE_FILE):
        error.unlink()
    starts: dict[str, list[Place]] = {}
    for file in stage.iterdir():
        if named := STATE_FILES.fullmatch(file.name):
            starts.setdefault(named[2], []).append(file)
    for start in sorted(starts, reverse=True):
        try:
            for file in starts[start]:
                _read_state(file)
            break
        except CUT_SHORT:
            if start == min(starts):
                raise
            for file in starts[start]:
                file.unlink()
    for file in stage.glob("callback-states-*.pkl"):
        try:
            _read_state(file)
        except CUT_SHORT:
            file.unlink()  # callbacks can do without
    records: list[Place] = [*stage.glob("experiment_state-*.json")]
    newest = max(records, key=lambda file: file.name)
    record = json.loads(newest.read_text(encoding="utf-8"))
    before = record["trial_data"]
    record["trial_data"] = []
    for states in before:  # each stays as it is where nothing of ours lies in its trial's folder
        trial = trial_of_record(states)
        if _bring_up_to_date(trial, stage / Path(trial.storage.trial_fs_path).name):
            trial.stub = False  # as it was until it was read
            states = [*trial.get_json_state()]
        record["trial_data"].append(states)
    if drop_decisions(record) or record["trial_data"] != before:
        replace_text(newest, json.dumps(record))


def _read_state(file: Place) -> None:
    (json if file.name.startswith("experiment_state") else pickle).loads(file.read_bytes())


def _bring_up_to_date(trial: Any, folder: Place) -> bool:
    """Whether a trial's checkpoints were not those in its folder, as they are now."""
    own, index = trial.storage.trial_fs_path, trial.storage.current_checkpoint_index
    manager = trial.run_metadata.checkpoint_manager
    latest = manager.latest_checkpoint_result
    if latest is not None and str(Path(latest.checkpoint.path).parent) != own:
        return False  # it goes on from another trial's
    known = {Path(one.checkpoint.path).name: one for one in manager.best_checkpoint_results}
    found = RunFolder(folder).checkpoints()
    while found and found[0].name not in known:
        try:
            check(local_copy(found[0]))
            break
        except CheckpointError:
            found.pop(0)  # saving it was interrupted
    if not found:
        return False
    number = int(found[0].name.partition("_")[2])
    if known.keys() == {path.name for path in found} and index >= number:
        return False
    results = []
    for path in reversed(found):
        about = read_json(path / MANIFEST)
        if path.name in known:
            results.append(known[path.name])
        elif about:  # the result that it was saved with, as far as it is known
            of_it = {key: about[key] for key in (TRAINING_ITERATION, TIME_TOTAL_S)}
            rows = read_json_lines(path.parent / RESULTS)
            result = next((row for row in rows if of_it.items() <= row.items()), of_it)
            checkpoint = Checkpoint(f"{own}/{path.name}", trial.storage.storage_filesystem)
            results.append(training_result(checkpoint, result))
    set_checkpoints(trial, results, number)
    return True


# The last is what Slurm is often told to send before a time limit.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SECONDS_TO_LOOK = 0.2  # between two looks whether Ray is there


class SaveOnStop(Callback):
    """On the first signal, has every running trial save a checkpoint after its iteration and then
    lets Tune end the run as Ctrl-C does; the second signal ends it immediately.

    Where the signal ends Ray as well, since it was sent to the whole group of processes, nothing
    can be saved, and the run ends at once.

    As a context manager around `Tuner.fit()` it leaves the handlers of the signals as they were.
    Tune alone ends a run in the middle of its iterations, saves nothing, and takes no notice of
    SIGTERM; with SIGUSR1 its trials are said to have ended.
    """

    def __init__(self) -> None:
        self.interrupted = self._has_said_so = self._ended = False
        self._handlers: dict[signal.Signals, Any] = {}  # those before
        self._end_run: Any = None  # Tune's handler

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles the run's callbacks next to its state; handlers belong to this process.
        return {**vars(self), "_handlers": {}, "_end_run": None}

    def __enter__(self) -> SaveOnStop:
        if threading.current_thread() is threading.main_thread():  # as Python wants it
            self._handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}

    def setup(self, *args: Any, **info: Any) -> None:
        """Installs its signal handlers over those that Tune has just set."""
        before = signal.getsignal(signal.SIGINT)
        if not self._handlers:
            self.__enter__()
        for signum in self._handlers:
            self._end_run = before
            signal.signal(signum, self._note)

    def on_trial_result(self, trial: Any, result: dict[str, Any], **info: Any) -> None:
        if result.get(STOP_RUN):  # `rllib stop`
            self.interrupted = True
        if self.interrupted and not _is_saved_at(trial, result):
            result[SHOULD_CHECKPOINT] = True

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if not self.interrupted or self._ended:
            return
        # Ending such trials now loses nothing but an iteration that has not ended.
        if all(
            trial.status != Trial.RUNNING or not trial.has_reported_at_least_once
            or _is_saved_at(trial, trial.last_result) for trial in trials
        ):  # fmt: skip
            self._ended = True
            if callable(self._end_run):
                self._end_run(signal.SIGINT, None)
                return
            for trial in trials:  # Tune handles no signals in other threads: each ends anyhow
                trial.stopping_criterion = {TRAINING_ITERATION: 1}
        elif not self._has_said_so:
            self._has_said_so = True
            text = "Stopping: a checkpoint is saved after this iteration. Once more stops at once."
            logger.warning(text)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self.__exit__()

    def _note(self, signum: int, frame: Any) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

        def end_with_ray() -> None:
            while self._handlers and not own_ray_has_ended():
                time.sleep(SECONDS_TO_LOOK)
            if self._handlers and (main := threading.main_thread().ident) is not None:
                signal.pthread_kill(main, signal.SIGINT)  # the second signal: it waits for Ray

        threading.Thread(target=end_with_ray, name="end-with-ray", daemon=True).start()


def _is_saved_at(trial: Any, result: dict[str, Any]) -> bool:
    """Whether the newest checkpoint is of the iteration of `result`."""
    saved, done = trial.latest_checkpoint_result, result.get(TRAINING_ITERATION)
    return saved is not None and done is not None and saved.metrics[TRAINING_ITERATION] == done

