"""Where a process spends its time, what limits its run, and which setting helps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


class PhaseClock:
    """A process is in one phase at a time; entering one ends the one before. Any thread may ask.

    Args:
        phase: in which it begins.
        clock: gives seconds, monotonic.
    """

    def __init__(self, phase: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._phase, self._since = phase, clock()
        self._seconds: dict[str, float] = {}
        self._lap: dict[str, float] = {}

    @property
    def phase(self) -> str:
        """The phase it is in."""
        return self._phase

    @property
    def seconds_in_phase(self) -> float:
        """Since it entered the phase."""
        return self._clock() - self._since

    def enter(self, phase: str) -> float:
        """Ends the phase before, and gives the seconds it took."""
        with self._lock:
            now = self._clock()
            seconds = now - self._since
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + seconds
            self._phase, self._since = phase, now
            return seconds

    def split(self, phase: str, seconds: float, parts: Mapping[str, float]) -> None:
        """Attributes the last `seconds` of the finished phase `phase` to `parts`, in proportion if
        they exceed it. The remainder stays with the phase."""
        total = sum(parts.values())
        if total <= 0:
            return
        scale = min(1.0, seconds / total)
        with self._lock:
            for name, value in parts.items():
                self._seconds[name] = self._seconds.get(name, 0.0) + value * scale
                self._seconds[phase] = self._seconds.get(phase, 0.0) - value * scale

    def seconds(self) -> dict[str, float]:
        """Seconds of every phase since the start, the present one included: together the time
        that has passed."""
        with self._lock:
            now = self._clock() - self._since
            return {**self._seconds, self._phase: self._seconds.get(self._phase, 0.0) + now}

    def lap(self) -> dict[str, float]:
        """Seconds of every phase since the last call."""
        total = self.seconds()
        lap = {name: value - self._lap.get(name, 0.0) for name, value in total.items()}
        self._lap = total
        return {name: value for name, value in lap.items() if value > 0}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """`seconds` over their sum."""
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total > 0 else {}


# Phases of the process that learns.
LEARNING, PUBLISHING, EVALUATING = "learning", "publishing weights", "evaluating"
SAVING, BETWEEN, STARTING, PAUSED = "saving", "between iterations", "starting", "paused"
WAITING = "waiting for samplers"
FOR_COMPLETIONS, FOR_JUDGES = "waiting for completions", "waiting for judges"
FOR_TOOLS, FOR_WEIGHTS = "waiting for tools", "waiting for weights"
# Whose work each phase is; the others are of the run as a whole.
OWNERS: Mapping[str, str] = {
    LEARNING: "learner",
    WAITING: "sampler",
    FOR_COMPLETIONS: "sampler",
    FOR_JUDGES: "judge",
    FOR_TOOLS: "judge",
    FOR_WEIGHTS: "weights",
    PUBLISHING: "weights",
    EVALUATING: "evaluation",
    SAVING: "checkpoints",
}
REMEDIES: Mapping[str, str] = {
    "sampler": "raise num_env_runners or sampling_batch_size, or lower max_new_tokens",
    "judge": "make the reward function async or faster, quantise the reward model, or raise "
    "num_env_runners: each sampler judges its completions",
    "tools": "make the tools faster, or raise num_env_runners or the conversations run at once",
    "learner": "raise num_learners, lower num_epochs, use mixed_precision='bf16' or lora",
    "evaluation": "raise evaluation_interval or evaluation_num_env_runners, or lower "
    "evaluation_duration",
    "checkpoints": "raise checkpoint_interval_s, or store runs on a faster disk",
    "weights": "use lora, dtype='bfloat16' or another weights_transport; max_staleness hides it",
}  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on what limits a run's speed.

    bound: "sampler", "judge", "learner", "weights", "evaluation" or "checkpoints"; ""
        before there is anything to tell.
    share: of the time of iterations that it takes.
    """

    bound: str
    share: float
    text: str


def diagnose(seconds: Mapping[str, float], has_samplers: bool = False) -> Diagnosis:
    """The diagnosis of the learner's `seconds` by phase, of a few iterations; `has_samplers`: there
    are sampler processes, whose number can be changed."""
    by_owner = dict.fromkeys(OWNERS.values(), 0.0)
    for phase, owner in OWNERS.items():
        by_owner[owner] += seconds.get(phase, 0.0)
    total = sum(by_owner.values())
    if total <= 0:
        return Diagnosis("", 0.0, "nothing is known before the first iteration has ended")
    starting = seconds.get(STARTING, 0.0)
    if starting > total:
        took = f"({starting:.0f} s of {starting + total:.0f} s)"
        return Diagnosis("", 0.0, f"starting took most of the time so far {took}; what limits the "
                         "run shows some iterations later")  # fmt: skip
    bound = max(by_owner, key=by_owner.__getitem__)
    share = by_owner[bound] / total
    phases = [phase for phase, owner in OWNERS.items() if owner == bound]
    phases.sort(key=lambda phase: -seconds.get(phase, 0.0))
    remedy = REMEDIES["tools" if phases[0] == FOR_TOOLS else bound]
    if bound == "sampler" and has_samplers:
        remedy += "; rllib scale adds samplers at once, up to sampling_parts"
    # In the words of the phases, which `rllib status` lists with their shares.
    least = by_owner[bound] / 10
    most = " and ".join(phase for phase in phases if seconds.get(phase, 0.0) >= least)
    most_time = 2 * by_owner[bound] > total + seconds.get(BETWEEN, 0.0)
    part = "most time" if most_time else "the largest part of what can be changed"
    text = f"{bound}-bound: {part} goes into {most}; to change it, {remedy}"
    return Diagnosis(bound, share, text)
