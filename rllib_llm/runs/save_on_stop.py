"""A Tune callback for Ctrl-C and for SIGTERM, with which Slurm and Kubernetes stop a job."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

from ray.tune import Callback
from ray.tune.result import SHOULD_CHECKPOINT, TRAINING_ITERATION

from rllib_llm.overseer.orders import STOP_RUN

logger = logging.getLogger(__name__)

RUNNING = "RUNNING"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SaveOnStop(Callback):
    """At the first signal, has every trial that runs save a checkpoint when its iteration ends, and
    then lets Tune end the run as Ctrl-C does; the second one ends it at once.

    As a context manager around `Tuner.fit()` it leaves the handlers of the signals as they were.
    Tune alone ends a run in the middle of its iterations, saves nothing, and takes no notice of
    SIGTERM.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._told = self._ended = False
        self._handlers: dict[signal.Signals, Any] = {}  # those before
        self._end_run: Any = None  # Tune's handler

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles the run's callbacks next to its state; handlers belong to this process.
        return {**vars(self), "_handlers": {}, "_end_run": None}

    def __enter__(self) -> SaveOnStop:
        if _in_main_thread():
            self._handlers = {number: signal.getsignal(number) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def setup(self, *args: Any, **info: Any) -> None:
        """Takes over the signals, for which Tune has set its handlers just before."""
        if not _in_main_thread():
            return
        self._end_run = signal.getsignal(signal.SIGINT)
        if not self._handlers:
            self.__enter__()
        for number in SIGNALS:
            signal.signal(number, self._note)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if result.get(STOP_RUN):  # `rllib stop`
            self.interrupted = True
        if self.interrupted and not _is_saved_at(trial, result):
            result[SHOULD_CHECKPOINT] = True

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if not self.interrupted or self._ended:
            return
        if all(_is_saved(trial) for trial in trials):
            self._ended = True
            self._end(trials)
        elif not self._told:
            self._told = True
            logger.warning(
                "Stopping: a checkpoint is saved when this iteration ends. Once more stops at once."
            )

    def _end(self, trials: list[Any]) -> None:
        if callable(self._end_run):
            self._end_run(signal.SIGINT, None)
            return
        for trial in trials:  # Tune handles no signals in other threads: each ends with a result
            trial.stopping_criterion = {TRAINING_ITERATION: 1}

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self.__exit__()

    def _note(self, signum: int, frame: Any) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True


def _is_saved(trial: Any) -> bool:
    """Whether ending `trial` now loses nothing but an iteration that has not ended."""
    if trial.status != RUNNING or not trial.has_reported_at_least_once:
        return True
    return _is_saved_at(trial, trial.last_result)


def _is_saved_at(trial: Any, result: dict[str, Any]) -> bool:
    """Whether the newest checkpoint is of the iteration of `result`."""
    saved, done = trial.latest_checkpoint_result, result.get(TRAINING_ITERATION)
    return saved is not None and done is not None and saved.metrics[TRAINING_ITERATION] == done


def _in_main_thread() -> bool:
    """True where Python lets us handle signals."""
    return threading.current_thread() is threading.main_thread()
