"""What the process of a trial tells of itself, and what it does when it is told something."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rllib_llm.cores import CpuClock
from rllib_llm.overseer import diagnosis
from rllib_llm.overseer.gauges import Gauges
from rllib_llm.overseer.link import Link
from rllib_llm.overseer.phases import PhaseClock, shares

NUM_RECENT = 10  # iterations that a diagnosis looks at
STOP_RUN = "stop_run"  # in a result: the run ends as at Ctrl-C
SHOULD_CHECKPOINT = "should_checkpoint"  # Tune's
# What judged batches and the receivers of weights call what a sampler did, and what that was for
# the learner, who waited.
WAITS: Mapping[str, str] = {
    "generate_seconds": diagnosis.FOR_COMPLETIONS,
    "judge_seconds": diagnosis.FOR_JUDGES,
    "tool_seconds": diagnosis.FOR_TOOLS,
    "transfer_seconds": diagnosis.FOR_WEIGHTS,
    "load_seconds": diagnosis.FOR_WEIGHTS,
}


class Overseen(Protocol):
    """What commands act on."""

    def scale_samplers(self, num_samplers: int) -> str:
        """Has so many samplers from the next request on, and says how.

        Raises:
            ValueError: that cannot be.
        """


class Oversight:
    """Phases of this process, and the commands it was given; it reports only once it is joined to
    a run's overseer."""

    def __init__(self) -> None:
        self.clock = PhaseClock(diagnosis.STARTING)
        self.paused = False
        self._cpu = CpuClock()
        self._activity, self._iteration = "", 0
        self._recent: deque[dict[str, float]] = deque(maxlen=NUM_RECENT)
        self._link: Link | None = None
        self._marks: dict[str, bool] = {}
        self._facts: dict[str, Any] = {}
        self._gauges: Gauges | None = None

    def join(self, folder: Path, part: str, **facts: Any) -> None:
        """Reports to the overseer of the Tune run in `folder` from now on."""
        self._facts = facts
        self._link = Link(folder, part, self._describe)
        self._gauges = Gauges(part)

    def close(self) -> None:
        """Ends the reports."""
        if self._link is not None:
            self._link.close()
            self._link = None

    # --- what it tells -----------------------------------------------------------------------

    def doing(self, activity: str, phase: str | None) -> None:
        """Notes what this process does from now on."""
        self._activity = activity
        if phase is not None:
            self.clock.enter(phase)

    def waited(self, seconds: float, of_samplers: Mapping[str, float]) -> None:
        """Says what the samplers did in the last `seconds` of waiting for them: `WAITS`."""
        parts: dict[str, float] = {}
        for name, phase in WAITS.items():
            value = float(of_samplers.get(name, 0.0))
            parts[phase] = parts.get(phase, 0.0) + max(0.0, value)
        # Tools run while a conversation is sampled.
        tools = parts[diagnosis.FOR_TOOLS]
        parts[diagnosis.FOR_COMPLETIONS] = max(0.0, parts[diagnosis.FOR_COMPLETIONS] - tools)
        self.clock.split(diagnosis.WAITING, seconds, parts)

    def end_iteration(self, iteration: int) -> dict[str, float]:
        """Shares of the time since the last call by phase, and `starved_share`."""
        lap = self.clock.lap()
        self._recent.append(lap)
        self._iteration = iteration
        found = {name.replace(" ", "_"): share for name, share in shares(lap).items()}
        found["starved"] = self._cpu.starved_share
        self._cpu.restart()
        if self._gauges is not None:
            self._gauges.set(iteration, found)
        return found

    def _describe(self) -> dict[str, Any]:
        recent: dict[str, float] = {}
        for lap in self._recent:
            for name, value in lap.items():
                recent[name] = recent.get(name, 0.0) + value
        return {
            "kind": "trial",
            **self._facts,
            "iteration": self._iteration,
            "phase": self.clock.phase,
            "activity": self._activity,
            "seconds_in_phase": self.clock.seconds_in_phase,
            "seconds": self.clock.seconds(),
            "recent_seconds": recent,
            "paused": self.paused,
        }

    # --- what it is told ---------------------------------------------------------------------

    def carry_out(self, algorithm: Overseen, say: Callable[[str], None]) -> dict[str, bool]:
        """Does what was commanded, between two iterations; while paused it stays here until it is
        resumed, or there is something for Tune to do. Gives the marks for the next result."""
        while self._link is not None:
            self._all_commands(algorithm)
            if not self.paused or self._marks:
                break
            if self.clock.phase != diagnosis.PAUSED:
                self.clock.enter(diagnosis.PAUSED)
                say(f"{diagnosis.PAUSED}: rllib resume goes on")
            self._carry_out_next(algorithm, timeout_s=1.0)
        marks, self._marks = self._marks, {}
        return marks

    def _all_commands(self, algorithm: Overseen) -> None:
        while self._link is not None and not self._link.commands.empty():
            self._carry_out_next(algorithm, timeout_s=0.0)

    def _carry_out_next(self, algorithm: Overseen, timeout_s: float) -> None:
        assert self._link is not None
        try:
            command = self._link.commands.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            return
        try:
            text = self._do(command, algorithm)
        except ValueError as error:
            self._link.answer(command, str(error), refused=True)
        else:
            self._link.answer(command, text)

    def _do(self, command: Mapping[str, Any], algorithm: Overseen) -> str:
        name = command["name"]
        at = f"after iteration {self._iteration}"
        if name == "pause":
            self.paused = True
            return f"paused {at}"
        if name == "resume":
            self.paused = False
            return f"goes on {at}"
        if name == "scale":
            return algorithm.scale_samplers(command["arguments"]["samplers"])
        if name == "checkpoint":
            self._marks[SHOULD_CHECKPOINT] = True
            return "a checkpoint is saved with the next result"
        self.paused = False
        self._marks |= {SHOULD_CHECKPOINT: True, STOP_RUN: True}
        return "a checkpoint is saved with the next result, and the run ends"
