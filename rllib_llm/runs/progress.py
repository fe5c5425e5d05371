"""How a `Tuner` in Python tells of its trials: a line now and then, no tables of everything.

Tune adds `TunerProgress` to every run of a process that has imported `rllib_llm` (see `quiet.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ray.tune import Callback
from ray.tune.utils.log import Verbosity, has_verbosity, set_verbosity
from rich.console import Console

from rllib_llm.runs.live_table import LiveTable
from rllib_llm.shared.tracebacks import is_verbose


class Progress(LiveTable):
    """What `rllib train` shows, as plain lines, for a `Tuner` of one's own that Tune itself is to
    say nothing of:

    tune.RunConfig(verbose=0, callbacks=[Progress()])
    """

    def __init__(self, stop: Mapping[str, Any] | None = None) -> None:
        """`stop`: when a trial ends, to tell how far it is; by default that of the run."""
        super().__init__("trials", stop or {}, _plain_console())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._console = _plain_console()  # a resumed run's

    def setup(self, stop: Any = None, **info: Any) -> None:
        """Takes the run's stop criteria, where none were given."""
        if not self._stop and isinstance(stop, Mapping):
            self._stop.update(stop)

    def nameless(self, trial: Any) -> str:
        """Its name under Tune: trials of the same settings are not the same."""
        return str(trial)

    def begin(self, trial: Any, num_trials: int | None) -> None:
        """Say what is run, and where its results go."""
        count = f"{num_trials} trial{'s' * (num_trials != 1)}" if num_trials else "Trials"
        folder = trial.storage.experiment_fs_path
        self._say(f"{count} of {trial.trainable_name}, results in {folder}")

    def end(self) -> None:
        """Show the last results of all trials beside one another."""
        self._console.print(self.table())

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class TunerProgress(Callback):
    """`Progress` for a run of this package's algorithms whose `RunConfig` leaves open what is
    printed; with any other `verbose` than 3, what Tune takes for the default, it keeps silent, and
    so it does about others' algorithms."""

    def __init__(self) -> None:
        self._lines: Progress | None = None
        self._is_decided = False
        self._stop: Any = None
        self._num_trials: int | None = None

    def setup(
        self, stop: Any = None, num_samples: Any = None, total_num_samples: Any = None, **info: Any
    ) -> None:
        """Notes what the run is to be; whose algorithms it runs is not known yet."""
        self._lines, self._is_decided = None, False
        self._stop, self._num_trials = stop, total_num_samples

    def on_step_begin(self, iteration: int, trials: list, **info: Any) -> None:
        self._decide(trials)

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        self._decide(trials)
        if self._lines is not None:
            self._lines.on_step_end(iteration, trials)

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._decide(trials)
        if self._lines is not None:
            self._lines.on_trial_start(iteration, trials, trial)

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if self._lines is not None:
            self._lines.on_trial_result(iteration, trials, trial, result)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        if self._lines is not None:
            self._lines.on_trial_complete(iteration, trials, trial)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        if self._lines is not None:
            self._lines.on_trial_error(iteration, trials, trial)

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        if self._lines is not None:
            self._lines.end()

    def _decide(self, trials: list) -> None:
        """Once, when the first trials are known: whether to speak, and Tune not to."""
        if self._is_decided or not trials:
            return
        self._is_decided = True
        is_default = has_verbosity(Verbosity.V3_TRIAL_DETAILS) and not is_verbose()
        if is_default and any(_is_ours(trial) for trial in trials):
            set_verbosity(Verbosity.V0_MINIMAL)
            self._lines = Progress(self._stop if isinstance(self._stop, Mapping) else None)
            self._lines.begin(trials[0], self._num_trials)


def _is_ours(trial: Any) -> bool:
    """Whether a trial runs an algorithm of this package, or one made from it."""
    trainable = trial.get_trainable_cls()
    classes = getattr(trainable, "__mro__", ())
    return any(base.__module__.partition(".")[0] == "rllib_llm" for base in classes)


def _plain_console() -> Console:
    return Console(width=sys.maxsize, force_terminal=False)
