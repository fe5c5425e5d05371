"""What the process of a trial tells of itself. What it does when it is told: `orders.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rllib_llm.overseer import diagnosis
from rllib_llm.overseer.gauges import Gauges
from rllib_llm.overseer.link import Link
from rllib_llm.overseer.orders import Orders, Scalable
from rllib_llm.overseer.phases import PhaseClock, shares
from rllib_llm.shared.process import CpuClock

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
        """Does what the overseer tells from now on; see `Orders`."""
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
        """Says what the samplers did in the last `seconds` of waiting for them: `WAITS`."""
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
        """By phase, of the last iterations: what a diagnosis is made from."""
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
