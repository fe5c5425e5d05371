"""A trial's side of the overseer: its reports, and the commands that it carries out.

It does so between two iterations, and never within one:

    iteration ─▶ commands ─▶ result ─▶ Tune saves ─▶ iteration ...
                  └ paused: here, until it is resumed, or a result is wanted
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ray.util.metrics import Gauge

from rllib_llm.overseer import diagnosis
from rllib_llm.overseer.diagnosis import PhaseClock, shares
from rllib_llm.overseer.link import Link
from rllib_llm.shared.process import CpuClock

STOP_RUN = "stop_run"  # in a result: the run ends as at Ctrl-C
SHOULD_CHECKPOINT = "should_checkpoint"  # Tune's
POLL_S = 1.0  # of a paused trial, between looks whether its link is still there


class Scalable(Protocol):
    """The interface on which commands act."""

    def scale_samplers(self, num_samplers: int) -> str:
        """Sets the number of samplers from the next request on; returns a description of the
        change.

        Raises:
            ValueError: that cannot be.
        """


class Orders:
    """The commands of one trial, as its link brings them.

    Args:
        algorithm: what they act on.
        link: brings them, and takes the answers.
        pausing: called when the trial begins to wait.
    """

    def __init__(self, algorithm: Scalable, link: Link, pausing: Callable[[], None]) -> None:
        self.paused = False
        self._algorithm, self._link, self._pausing = algorithm, link, pausing
        self._marks: dict[str, bool] = {}
        self._iteration = 0

    def after_iteration(self, iteration: int) -> dict[str, bool]:
        """Carries out what there is; a paused trial waits here, its result with it. Gives the marks
        for that result."""
        self._iteration = iteration
        while (command := self._link.next_command()) is not None:
            self._carry_out(command)
        if self.paused and not self._marks:
            self._pausing()
        while self.paused and not self._marks and self._link.is_open:
            self._wait()
        marks, self._marks = self._marks, {}
        return marks

    def before_iteration(self) -> dict[str, bool]:
        """Waits where the trial is paused, and gave its result away only to be saved. Gives the
        mark of a run that is to stop there: its last result is saved, no iteration is to follow."""
        if self.paused:
            self._pausing()
        while self.paused and self._link.is_open:
            self._wait()
        marks, self._marks = self._marks, {}  # the iteration before this is saved already
        return {STOP_RUN: True} if STOP_RUN in marks else {}

    def _wait(self) -> None:
        command = self._link.next_command(POLL_S)
        if command is not None:
            self._carry_out(command)

    def _carry_out(self, command: Mapping[str, Any]) -> None:
        try:
            text = self._do(command)
        except ValueError as error:
            self._link.answer(command, str(error), refused=True)
        else:
            self._link.answer(command, text)

    def _do(self, command: Mapping[str, Any]) -> str:
        name, iteration = command["name"], self._iteration
        if name == "pause":
            self.paused = True
            return f"paused after iteration {iteration}"
        if name == "resume":
            was_paused, self.paused = self.paused, False
            return f"goes on after iteration {iteration}" if was_paused else "it was not paused"
        if name == "scale":
            return self._algorithm.scale_samplers(command["arguments"]["samplers"])
        self._marks[SHOULD_CHECKPOINT] = True
        if name == "checkpoint":
            return f"iteration {iteration} is being saved"
        self.paused = False
        self._marks[STOP_RUN] = True
        return f"iteration {iteration} is being saved; then the run ends"


class Gauges:
    """Iterations of a part, and the shares of its time."""

    def __init__(self, part: str) -> None:
        tags = {"part": part}
        self._iteration = Gauge(
            "rllib_llm_iteration", "Iterations that a trial has learnt.", tag_keys=("part",)
        )
        self._iteration.set_default_tags(tags)
        self._share = Gauge(
            "rllib_llm_time_share", "Share of a trial's time.", tag_keys=("part", "phase")
        )
        self._share.set_default_tags(tags)

    def set(self, iteration: int, shares: Mapping[str, float]) -> None:
        """The values as they are now."""
        self._iteration.set(iteration)
        for phase, share in shares.items():
            self._share.set(share, tags={"phase": phase})


NUM_RECENT = 10  # iterations that a diagnosis looks at
# What judged batches and the receivers of weights call what a sampler did, and what that was for
# the learner, who waited.
WAITS: Mapping[str, str] = {
    "generate_seconds": diagnosis.FOR_COMPLETIONS,
    "judge_seconds": diagnosis.FOR_JUDGES,
    "tool_seconds": diagnosis.FOR_TOOLS,
    "transfer_seconds": diagnosis.FOR_WEIGHTS,
    "load_seconds": diagnosis.FOR_WEIGHTS,
}


class Oversight:
    """Phases of this process, and the commands it was given; it reports only once it is joined to
    a run's overseer."""

    def __init__(self) -> None:
        self.clock = PhaseClock(diagnosis.STARTING)
        self._cpu = CpuClock()
        self._samplers_starved = 0.0  # seconds, of those that this process waited for
        self._activity, self._iteration = "", 0
        self._recent: deque[dict[str, float]] = deque(maxlen=NUM_RECENT)
        self._link: Link | None = None
        self._orders: Orders | None = None
        self._facts: dict[str, Any] = {}
        self._gauges: Gauges | None = None

    def join(self, folder: Path, part: str, **facts: Any) -> None:
        """Reports to the overseer of the Tune run in `folder` from now on."""
        self._facts = facts
        self._link = Link(folder, part, self._describe, restarts_hung=True)
        self._gauges = Gauges(part)

    def obey(self, algorithm: Scalable, pausing: Callable[[], None]) -> None:
        """Starts carrying out the overseer's commands; see `Orders`."""
        assert self._link is not None, "join comes first"
        self._orders = Orders(algorithm, self._link, pausing)

    def close(self) -> None:
        """Ends the reports."""
        if self._link is not None:
            self._link.close()
            self._link = self._orders = None

    # --- what it tells -----------------------------------------------------------------------

    def doing(self, activity: str, phase: str | None) -> None:
        """Notes what this process does from now on."""
        self._activity = activity
        if phase is not None:
            self.clock.enter(phase)

    def waited(self, seconds: float, of_samplers: Mapping[str, float]) -> None:
        """Attributes the last `seconds` of waiting to the samplers' activities: `WAITS`."""
        parts: dict[str, float] = {}
        for name, phase in WAITS.items():
            value = float(of_samplers.get(name, 0.0))
            parts[phase] = parts.get(phase, 0.0) + max(0.0, value)
        # Tools run while a conversation is sampled.
        tools = parts[diagnosis.FOR_TOOLS]
        parts[diagnosis.FOR_COMPLETIONS] = max(0.0, parts[diagnosis.FOR_COMPLETIONS] - tools)
        self.clock.split(diagnosis.WAITING, seconds, parts)
        # Work that was done before anyone waited held nobody up.
        self._samplers_starved += min(seconds, float(of_samplers.get("starved_seconds", 0.0)))

    def end_iteration(self, iteration: int) -> dict[str, float]:
        """Shares of the time since the last call by phase, and `starved`: the share in which this
        process, or the sampler that it waited for, was ready to compute and had no core."""
        lap = self.clock.lap()
        self._recent.append(lap)
        self._iteration = iteration
        found = {name.replace(" ", "_"): share for name, share in shares(lap).items()}
        starved = self._cpu.starved_seconds + self._samplers_starved
        found["starved"] = min(1.0, starved / max(1e-9, self._cpu.wall_seconds))
        self._samplers_starved = 0.0
        self._cpu.restart()
        if self._gauges is not None:
            self._gauges.set(iteration, found)
        return found

    def recent_seconds(self) -> dict[str, float]:
        """Seconds by phase of the last iterations, from which a diagnosis is made."""
        recent: dict[str, float] = {}
        for lap in self._recent:
            for name, value in lap.items():
                recent[name] = recent.get(name, 0.0) + value
        return recent

    def _describe(self) -> dict[str, Any]:
        return {
            "kind": "trial",
            **self._facts,
            "iteration": self._iteration,
            "phase": self.clock.phase,
            "activity": self._activity,
            "seconds_in_phase": self.clock.seconds_in_phase,
            "seconds": self.clock.seconds(),
            "recent_seconds": self.recent_seconds(),
            "paused": self._orders is not None and self._orders.paused,
        }

    # --- what it is told ---------------------------------------------------------------------

    def before_iteration(self) -> dict[str, bool]:
        """See `Orders`."""
        return {} if self._orders is None else self._orders.before_iteration()

    def after_iteration(self) -> dict[str, bool]:
        """See `Orders`; what Tune is to do with the result."""
        return {} if self._orders is None else self._orders.after_iteration(self._iteration)
