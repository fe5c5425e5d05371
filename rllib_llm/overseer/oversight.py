"""Where the time of a trial's iterations goes, and the commands that it carries out, between two
iterations and never within one:

    iteration ─▶ commands ─▶ result ─▶ Tune saves ─▶ iteration ...
                  └ paused: here, until it is resumed, or a result is wanted
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_llm.overseer import phases
from rllib_llm.overseer.phases import Phases, shares
from rllib_llm.shared.process import CpuClock

if TYPE_CHECKING:
    from rllib_llm.overseer.link import Link

STOP_RUN = "stop_run"  # in a result: the run ends as at Ctrl-C
SHOULD_CHECKPOINT = "should_checkpoint"  # Tune's
POLL_S = 1.0  # of a paused trial, between looks whether its link is still there


NUM_RECENT = 10  # iterations that a diagnosis looks at
# What judged batches and the receivers of weights call what a sampler did, and what that was for
# the learner, who waited.
WAITS: Mapping[str, str] = {
    "generate_seconds": phases.FOR_COMPLETIONS,
    "judge_seconds": phases.FOR_JUDGES,
    "tool_seconds": phases.FOR_TOOLS,
    "transfer_seconds": phases.FOR_WEIGHTS,
    "load_seconds": phases.FOR_WEIGHTS,
}


class Oversight:
    """A trial's side: where the time of its iterations goes, and the commands it is given.

    Args:
        phase: of its process.
        scale_samplers: sets their number; returns a description of the change, or raises
            ValueError.
    """

    def __init__(self, phase: Phases, scale_samplers: Callable[[int], str]) -> None:
        self.paused = False
        self.link: Link | None = None  # of a run that has an overseer
        self._phase, self._scale_samplers = phase, scale_samplers
        self._cpu = CpuClock()
        self._samplers_starved = 0.0  # seconds, of those that this process waited for
        self._recent: deque[dict[str, float]] = deque(maxlen=NUM_RECENT)
        self._iteration = 0
        self._marks: dict[str, bool] = {}

    def join(self, folder: Path, part: str, **facts: Any) -> None:
        """Reports to the overseer of the Tune run in `folder` from now on, and obeys it."""
        from rllib_llm.overseer.link import Link  # few runs are overseen

        self.link = Link(folder, part, lambda: {
            "kind": "trial", **facts, **self._phase.report(), "iteration": self._iteration,
            "recent_seconds": self.recent_seconds(), "paused": self.paused,
        }, restarts_hung=True)  # fmt: skip

    def close(self) -> None:
        """Ends the reports."""
        if self.link is not None:
            self.link.close()
            self.link = None

    # --- times -------------------------------------------------------------------------------

    def waited(self, of_samplers: Mapping[str, float]) -> None:
        """Attributes the last wait for samplers to what they did meanwhile: `WAITS`."""
        parts = dict.fromkeys(WAITS.values(), 0.0)
        for name, phase in WAITS.items():
            parts[phase] += max(0.0, float(of_samplers.get(name, 0.0)))
        # Tools run while a conversation is sampled.
        tools = parts[phases.FOR_TOOLS]
        parts[phases.FOR_COMPLETIONS] = max(0.0, parts[phases.FOR_COMPLETIONS] - tools)
        self._phase.split(phases.WAITING, parts)
        # Work that was done before the learner waited did not delay it.
        starved = float(of_samplers.get("starved_seconds", 0.0))
        self._samplers_starved += min(self._phase.took.get(phases.WAITING, 0.0), starved)

    def end_iteration(self, iteration: int) -> dict[str, float]:
        """Shares of the time since the last call by phase, and `starved`: the share in which this
        process, or the sampler that it waited for, was ready to compute and had no core."""
        lap = self._phase.lap()
        self._recent.append(lap)
        self._iteration = iteration
        found = {name.replace(" ", "_"): share for name, share in shares(lap).items()}
        starved, seconds = self._cpu.lap()
        found["starved"] = min(1.0, (starved + self._samplers_starved) / max(1e-9, seconds))
        self._samplers_starved = 0.0
        self._phase.outside(phases.BETWEEN)
        return found

    def recent_seconds(self) -> dict[str, float]:
        """Seconds by phase of the last iterations, from which a diagnosis is made."""
        recent: Counter[str] = Counter()
        for lap in self._recent:
            recent.update(lap)  # type: ignore[arg-type]  # of seconds
        return dict(recent)  # type: ignore[arg-type]

    # --- commands ----------------------------------------------------------------------------

    def after_iteration(self) -> dict[str, bool]:
        """Carries out the commands; a paused trial waits here, its result with it. Returns the
        marks for that result: what Tune is to do with it."""
        while self.link is not None and (command := self.link.next_command()) is not None:
            self._carry_out(self.link, command)
        self._wait(lambda: bool(self._marks))
        marks, self._marks = self._marks, {}
        return marks

    def before_iteration(self) -> dict[str, bool]:
        """Waits where the trial is paused, and returned its result only to be saved. Returns the
        mark of a run that is to stop there: its last result is saved, no iteration is to follow."""
        self._wait(lambda: False)
        marks, self._marks = self._marks, {}  # the iteration before this is saved already
        return {STOP_RUN: True} if STOP_RUN in marks else {}

    def _wait(self, ends: Callable[[], bool]) -> None:
        """Carries out commands while the trial is paused."""
        link = self.link
        if link is None or not self.paused or ends():
            return
        with self._phase(phases.PAUSED, f"{phases.PAUSED}: rllib resume goes on"):
            while self.paused and not ends() and link.is_open:
                if (command := link.next_command(POLL_S)) is not None:
                    self._carry_out(link, command)

    def _carry_out(self, link: Link, command: Mapping[str, Any]) -> None:
        name, iteration, refused = command["name"], self._iteration, False
        if name == "pause":
            self.paused = True
            text = f"paused after iteration {iteration}"
        elif name == "resume":
            text = f"resumes after iteration {iteration}" if self.paused else "it was not paused"
            self.paused = False
        elif name == "scale":
            try:
                text = self._scale_samplers(command["arguments"]["samplers"])
            except ValueError as error:
                text, refused = str(error), True
        else:
            self._marks[SHOULD_CHECKPOINT] = True
            text = f"iteration {iteration} is being saved"
            if name == "stop":
                self.paused, self._marks[STOP_RUN] = False, True
                text += "; then the run ends"
        link.answer(command, text, refused=refused)
