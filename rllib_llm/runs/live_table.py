"""The table that is alive while a stage runs: one row per trial."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.tune import Callback
from ray.tune.utils.log import Verbosity, has_verbosity, set_verbosity
from ray.util import placement_group_table
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rllib_llm.runs.metrics import Metric, columns, progress
from rllib_llm.runs.results import (
    as_shown,
    flatten,
    local_folder,
    number,
    older_evaluation,
    other_trials_checkpoint,
    read_results,
    setting,
)
from rllib_llm.runs.signs import Sign, Watch
from rllib_llm.shared.messages import TrialEar, is_verbose, same_key

LINE_INTERVAL_S = 10.0
WAITING_INTERVAL_S = 30.0  # between plain lines on what a trial does that has no result yet
MAX_WAITING = 3  # trials of which it is told
SILENT_S = 4.0  # without a result until it is shown what a trial does
POLL_S = 1.0
WAITS = {  # by whether the cluster gave the trial its CPUs
    None: "waiting for its process", True: "its process imports libraries",
    False: "waiting for CPUs or GPUs, of which the cluster has not enough free",
}  # fmt: skip
BAR_WIDTH = 8


class TrialRow:
    """The table's data about one trial."""

    def __init__(self, name: str, stop: Mapping[str, Any]) -> None:
        self.name = name
        self.stop = stop
        self.state = "starting"
        self.result: dict[str, Any] = {}
        self.share = 0.0
        self.ear: TrialEar | None = None
        self.source: Path | None = None  # another trial's checkpoint, from which it continues
        self.has_place: bool | None = None  # whether the cluster gave it its CPUs; None: not known
        self._placed_at = 0.0  # when that was heard
        self.watch = Watch()
        self.has_begun = False  # in this process: not so at the start of a resumed run
        self.begun_at = time.time()  # its process; earlier activities are outdated
        self._first: tuple[float, float] | None = None
        self._last_time = 0.0
        self._started = time.monotonic()

    def waits_for(self) -> str:
        """The trial's activity, once it has reported nothing for `SILENT_S`, else ""."""
        if self.state not in ("starting", "running"):
            return ""
        silent = time.monotonic() - (self._last_time or self._started)
        if silent < SILENT_S:
            return ""
        activity = self.ear.activity() if self.ear is not None else None
        # What a process before this one did is past.
        if activity is None or activity[1] < self.begun_at:
            if self._last_time:
                return ""
            silent = min(silent, time.monotonic() - self._placed_at)
            return f"{WAITS[self.has_place]}, for {_clock(silent)}"
        text, since = activity
        return f"{text}, for {_clock(max(0.0, time.time() - since))}"

    def place(self, has_place: bool | None) -> None:
        """Note whether the cluster has given the trial its CPUs."""
        if has_place != self.has_place:
            self.has_place, self._placed_at = has_place, time.monotonic()

    def update(self, result: Mapping[str, Any]) -> list[Sign]:
        """Take over a new result of the trial; return the signs that it shows first."""
        self.result = as_shown(flatten(result))
        self.share = progress(self.result, self.stop)
        self.state = "running"
        self._last_time = time.monotonic()
        if self._first is None:
            self._first = (self._last_time, self.share)
        return self.watch.new_signs(self.result)

    def eta_s(self) -> float | None:
        """Seconds to the end at the mean pace so far, None before two results."""
        if self._first is None or self.share <= self._first[1]:
            return None
        pace = (self.share - self._first[1]) / (self._last_time - self._first[0])
        return max(0.0, (1 - self.share) / pace - (time.monotonic() - self._last_time))


class LiveTable(Callback):
    """Shows a stage's trials as Tune reports them: a live table, or plain lines without a terminal.

    Use it as a context manager around `Tuner.fit()`, and give it to the run's callbacks.
    """

    def __init__(
        self, title: str, stop: Mapping[str, Any], console: Console, told: Iterable[str] = ()
    ) -> None:
        """`told`: warnings that were already shown, so that they are not repeated."""
        self._title, self._stage, self._stop = title, title.partition(" ")[0], dict(stop)
        self._console = console
        self._rows: dict[str, TrialRow] = {}
        self._started = time.monotonic()
        self._last_line = -LINE_INTERVAL_S
        self._last_poll = 0.0
        self._told = {*map(same_key, told)}
        self._live: Live | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles the run's callbacks next to its state; threads and terminals stay out.
        return {**vars(self), "_console": None, "_live": None}

    def __enter__(self) -> LiveTable:
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self.view)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hear()
        if self._live is not None:
            self._live.stop()
            self._live = None

    # --- Tune's callbacks ---------------------------------------------------------------------

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        row = self._row(trial)
        before, row.name = row.name, self._name(trial)
        known, row.source = row.source, other_trials_checkpoint(trial)
        if row.has_begun and row.source not in (None, known):  # population-based training
            folder = row.source.parent
            others = (one for one in trials if Path(one.storage.trial_fs_path) == folder)
            other = next(map(self._name, others), folder.name)
            done = trial.latest_checkpoint_result.metrics["training_iteration"]
            text = f"{before} goes on from iteration {done} of {other}, as {row.name}"
            self._print("replaced", text)
        row.has_begun, row.begun_at = True, time.time()

    def on_trial_result(self, trial: Any, result: dict[str, Any], **info: Any) -> None:
        row, folder = self._row(trial), local_folder(trial)
        if not row.result and result.get("training_iteration", 1) > 1 and folder is not None:
            row.watch.remember(read_results(folder))
        for sign in row.update(result):
            self._print("look", f"{row.name}, iteration {sign.iteration}: {sign.text}")
        if not result.get("done"):  # its end has a line of its own
            self._print_line(row)

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        """Read, once a second, the messages and activities of the trials' processes: Tune passes on
        results alone."""
        now = time.monotonic()
        if now - self._last_poll < POLL_S:
            return
        self._last_poll = now
        for trial in trials:
            row = self._row(trial)
            if row.ear is None and (folder := local_folder(trial)) is not None:
                row.ear = TrialEar(folder)
        if ray.is_initialized() and any(row.state == "starting" for row in self._rows.values()):
            groups = placement_group_table().values()
            for trial_id, has_place in places(trials, groups).items():
                self._rows[trial_id].place(has_place)
        self._hear()
        if self._live is not None or now - self._last_line <= WAITING_INTERVAL_S:
            return
        for line in self._waiting("  "):
            self._last_line = now
            self._console.print(line, markup=False, highlight=False)

    def _waiting(self, separator: str) -> list[str]:
        """The activity of trials that have reported nothing for a while; of many, the first."""
        rows = self._rows.values()
        lines = [f"{row.name}{separator}{text}" for row in rows if (text := row.waits_for())]
        num_more = len(lines) - MAX_WAITING
        return [*lines[:MAX_WAITING], *([f"and {num_more} further trials"] if num_more > 0 else [])]

    def _print(self, label: str, text: str) -> None:
        """Print a line above the table."""
        line = Text.assemble((f"{label}: ", "yellow"), text)
        self._console.print(line, soft_wrap=True, highlight=False)

    def _hear(self) -> None:
        """Print the trials' warnings since the last step."""
        for row in self._rows.values():
            for text in row.ear.new_warnings() if row.ear is not None else ():
                self.warn(text)

    def warn(self, text: str) -> None:
        """Print a warning above the table, the same one of several trials once."""
        if same_key(text) not in self._told:
            self._told.add(same_key(text))
            self._print("warning", text)

    def on_trial_complete(self, trial: Any, **info: Any) -> None:
        row = self._row(trial)
        self._end(row, "done" if row.share >= 1.0 or not row.stop else "stopped")

    def on_trial_error(self, trial: Any, **info: Any) -> None:
        self._end(self._row(trial), "failed")

    def _end(self, row: TrialRow, state: str) -> None:
        row.state, self._last_line = state, -LINE_INTERVAL_S
        self._print_line(row)

    # --- rendering ----------------------------------------------------------------------------

    def view(self) -> Group:
        """Return the table and, below it, what trials do that have not reported for a while."""
        return Group(self.table(), *(Text(line, style="dim") for line in self._waiting(": ")))

    def table(self) -> Table:
        """Return the table as it stands now. It fits 80 columns for a single trial."""
        rows = list(self._rows.values()) or [TrialRow(self._stage or self._title, self._stop)]
        metrics = columns([row.result for row in rows])
        elapsed = _clock(time.monotonic() - self._started)
        table = Table(
            title=Text(f"{self._title}, {elapsed}", style="bold"), title_justify="left",
            box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
        )  # fmt: skip
        table.add_column("trial" if len(rows) > 1 else "stage", no_wrap=True)
        table.add_column("progress", width=BAR_WIDTH)
        for heading in ("left", "iter", *(metric.title for metric in metrics)):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            cells = (_cell(row.result, metric) for metric in metrics)
            bar: Any = Text(row.state, style="red" if row.state == "failed" else "dim")
            if row.state not in ("failed", "starting"):
                share = 1.0 if row.state == "done" else row.share  # a scheduler may have stopped it
                bar = ProgressBar(total=1.0, completed=share, width=BAR_WIDTH)
            table.add_row(Text(row.name), bar, _eta(row), _iteration(row), *cells)
        return table

    def _row(self, trial: Any) -> TrialRow:
        if trial.trial_id not in self._rows:
            self._rows[trial.trial_id] = TrialRow(self._name(trial), self._stop)
        return self._rows[trial.trial_id]

    def _name(self, trial: Any) -> str:
        """The settings in which trials differ, as this one has them now: schedulers change them."""
        now = flatten(trial.config or {})
        varied = (trial.evaluated_params or {}).items()
        settings = ", ".join(setting(key, now.get(key, drawn)) for key, drawn in varied)
        return settings or self._stage or str(trial)  # its name under Tune

    def _print_line(self, row: TrialRow) -> None:
        now = time.monotonic()
        if self._live is not None or now - self._last_line < LINE_INTERVAL_S:
            return
        self._last_line = now
        cells = [f"{m.title} {_cell(row.result, m)}" for m in columns([row.result])]
        state = row.state
        if state == "running":
            state = _eta(row) if row.eta_s() is None else f"{_eta(row)} left"
        text = [row.name, f"iteration {_iteration(row)}", *cells, state]
        self._console.print("  ".join(text), markup=False, highlight=False, soft_wrap=True)


def _eta(row: TrialRow) -> str:
    if row.state != "running":
        return ""
    eta = row.eta_s()
    return "…" if eta is None else _clock(eta)


def places(trials: Iterable[Any], groups: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """Whether each trial that runs or is to start has its resources, as far as known: Tune gives
    the ready placement groups of a kind to its trials in their order.

    groups: as Ray's `placement_group_table` has them, those of other jobs included.
    """
    ready = [_kind(each["bundles"].values()) for each in groups if each["state"] == "CREATED"]
    known = {}
    for trial in sorted(trials, key=lambda trial: trial.status != "RUNNING"):
        if trial.status in ("RUNNING", "PENDING"):
            kind = _kind(trial.placement_group_factory.bundles)
            known[trial.trial_id] = kind in ready
            if kind in ready:
                ready.remove(kind)
    return known


def _kind(bundles: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    return [{name: float(num) for name, num in bundle.items() if num} for bundle in bundles]


def _iteration(row: TrialRow) -> str:
    done = row.result.get("training_iteration", 0)
    limit = row.stop.get("training_iteration")
    return f"{done}/{limit}" if limit else str(done)


def _cell(result: Mapping[str, Any], metric: Metric) -> str:
    value, made = number(result.get(metric.key)), older_evaluation(result, metric.key)
    text = "" if value is None else metric.text(value)
    return f"{text} (at {made:.0f})" if text and made is not None else text


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class TunerProgress(LiveTable):
    """The progress lines of `rllib train`, for a `Tuner` of this package's algorithms with the
    default `verbose` of `RunConfig` (3); silent otherwise, and for other algorithms."""

    def __init__(self) -> None:
        super().__init__("trials", {}, Console(width=sys.maxsize, force_terminal=False))
        self._stage = ""  # trials of the same settings are not the same
        self.setup()

    def setup(self, stop: Any = None, total_num_samples: Any = None, **info: Any) -> None:
        """Stores the run's description; its algorithms are not known yet."""
        self._stop = dict(stop) if isinstance(stop, Mapping) else {}
        self._console = Console(width=sys.maxsize, force_terminal=False, quiet=True)
        self._is_decided, self._num_trials = False, total_num_samples

    def on_step_begin(self, iteration: int, trials: list, **info: Any) -> None:
        """Once, when the first trials are known, decides whether to speak, and Tune not to."""
        if self._is_decided or not trials:
            return
        self._is_decided = True
        is_default = has_verbosity(Verbosity.V3_TRIAL_DETAILS) and not is_verbose()
        bases = (base for one in trials for base in getattr(one.get_trainable_cls(), "__mro__", ()))
        if is_default and any(base.__module__.startswith("rllib_llm.") for base in bases):
            set_verbosity(Verbosity.V0_MINIMAL)
            self._console.quiet = False
            num, first = self._num_trials, trials[0]
            count = f"{num} trial{'s' * (num != 1)}" if num else "Trials"
            text = f"{count} of {first.trainable_name}, results in "
            text += str(first.storage.experiment_fs_path)
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self.on_step_begin(iteration, trials)
        super().on_trial_start(iteration, trials, trial, **info)

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        self.on_step_begin(iteration, trials)
        super().on_step_end(iteration, trials, **info)

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        self._console.print(self.table())
