"""The phases of a process: blocks of its code are its phases. What limits its run, by their times.

    with self.phase(LEARNING, "learning from 512 completions"):
        ...

Times, the live line, the overseer's status and the diagnosis are made from them. A trial sums them
up at the end of each iteration, and carries out commands there, never within one:

    iteration ─▶ commands ─▶ result ─▶ Tune saves ─▶ iteration ...
                  └ paused: here, until it is resumed, or a result is wanted
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rllib_llm.shared.process import CpuClock

# Phases of the process that learns.
LEARNING, PUBLISHING, EVALUATING = "learning", "publishing weights", "evaluating"
SAVING, BETWEEN, STARTING, PAUSED = "saving", "between iterations", "starting", "paused"
WAITING = "waiting for samplers"
FOR_COMPLETIONS, FOR_JUDGES = "waiting for completions", "waiting for judges"
FOR_TOOLS, FOR_WEIGHTS = "waiting for tools", "waiting for weights"
# Phases of a sampler.
IDLE, LOADING, GENERATING = "waiting for a request", "loading weights", "generating"
JUDGING = "judging"
SECONDS_BETWEEN_WORDS = 1.0  # of the progress of a phase


@dataclass(eq=False)
class _Phase:
    name: str
    activity: str
    progress: str = ""


class Phases:
    """The phases of a process; calling it gives the context of one.

    A phase within another says what that one is at, and its time counts as the outer one's. Any
    thread may ask; one at a time begins phases.

    Args:
        phase: the one outside of all contexts.
        tell: called with the activity when a phase begins, and once a second with its progress.
        clock: gives seconds, monotonic.
    """

    def __init__(
        self, phase: str, tell: Callable[[str], None] = lambda activity: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.took: dict[str, float] = {}  # seconds of the last context of each name
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._outside, self._open = _Phase(phase, phase), list[_Phase]()
        self._since, self._told = clock(), clock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lap: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, activity: str = "") -> Iterator[None]:
        """The phase `name` while a block runs; `activity`: in words."""
        start, phase = self._clock(), _Phase(name, activity or name)
        with self._counting():
            self._open.append(phase)
        self._say(at_once=self._current is phase)
        try:
            yield
        finally:
            with self._counting():
                self._open.remove(phase)
            self.took[name] = self._clock() - start

    def outside(self, name: str, activity: str = "") -> None:
        """Sets the phase outside of all contexts."""
        with self._counting():
            self._outside = _Phase(name, activity or name)
        if activity:
            self._say(at_once=True)

    def progress(self, text: str) -> None:
        """Says how far the innermost phase is."""
        for innermost in self._open[-1:]:
            innermost.progress = text
            self._say()

    def steps(self, of: str) -> Callable[[], None]:
        """A function that counts the steps of the innermost phase: "3 of 64 tokens"."""
        count = itertools.count(1)
        return lambda: self.progress(f"{next(count)} {of}")

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with self._lock:
            before = self._current
            yield
            if self._current is not before:
                now = self._clock()
                self._seconds[before.name] += now - self._since
                self._since = now

    @property
    def _current(self) -> _Phase:
        return next(iter(self._open), self._outside)

    def _say(self, at_once: bool = False) -> None:
        now = self._clock()
        if at_once or now - self._told >= SECONDS_BETWEEN_WORDS:
            self._told = now
            self._tell(self.activity)

    @property
    def activity(self) -> str:
        """ "evaluating 8 completions, generating for prompts 0-7, 3 of 64 tokens"."""
        phases = list(self._open) or [self._outside]
        return ", ".join(text for each in phases for text in (each.activity, each.progress) if text)

    def seconds(self) -> dict[str, float]:
        """Seconds of every phase since the start, the present one included: together the time
        that has passed."""
        with self._lock:
            seconds, name = dict(self._seconds), self._current.name
            seconds[name] = seconds.get(name, 0.0) + self._clock() - self._since
            return seconds

    def lap(self) -> dict[str, float]:
        """Seconds of every phase since the last call."""
        total = self.seconds()
        lap = {name: value - self._lap.get(name, 0.0) for name, value in total.items()}
        self._lap = total
        return {name: value for name, value in lap.items() if value > 0}

    def split(self, name: str, parts: Mapping[str, float]) -> None:
        """Attributes the seconds of the last phase `name` to `parts`, in proportion if they exceed
        it. The remainder stays with the phase."""
        total, seconds = sum(parts.values()), self.took.get(name, 0.0)
        if total <= 0:
            return
        scale = min(1.0, seconds / total)
        with self._lock:
            for part, value in parts.items():
                self._seconds[part] += value * scale
                self._seconds[name] -= value * scale

    def report(self) -> dict[str, object]:
        """The report to an overseer."""
        return {
            "phase": self._current.name, "activity": self.activity, "seconds": self.seconds(),
            "seconds_in_phase": self._clock() - self._since,
        }  # fmt: skip


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """`seconds` over their sum."""
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total > 0 else {}


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


# --- a trial's iterations ------------------------------------------------------------------------

STOP_RUN = "stop_run"  # in a result: the run ends as at Ctrl-C
SHOULD_CHECKPOINT = "should_checkpoint"  # Tune's
POLL_S = 1.0  # of a paused trial, between looks whether its link is still there
NUM_RECENT = 10  # iterations that a diagnosis looks at
# What judged batches and the receivers of weights call what a sampler did, and what that was for
# the learner, who waited.
WAITS: Mapping[str, str] = {
    "generate_seconds": FOR_COMPLETIONS,
    "judge_seconds": FOR_JUDGES,
    "tool_seconds": FOR_TOOLS,
    "transfer_seconds": FOR_WEIGHTS,
    "load_seconds": FOR_WEIGHTS,
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
        self.link: Any = None  # the `link.Link` of a run that has an overseer
        self._phase, self._scale_samplers = phase, scale_samplers
        self._cpu = CpuClock()
        self._samplers_starved = 0.0  # seconds, of those that this process waited for
        self._recent: deque[dict[str, float]] = deque(maxlen=NUM_RECENT)
        self._iteration = 0
        self._marks: dict[str, bool] = {}

    def report(self) -> dict[str, Any]:
        """The report to an overseer."""
        return {
            **self._phase.report(), "iteration": self._iteration,
            "recent_seconds": self.recent_seconds(), "paused": self.paused,
        }  # fmt: skip

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
        tools = parts[FOR_TOOLS]
        parts[FOR_COMPLETIONS] = max(0.0, parts[FOR_COMPLETIONS] - tools)
        self._phase.split(WAITING, parts)
        # Work that was done before the learner waited did not delay it.
        starved = float(of_samplers.get("starved_seconds", 0.0))
        self._samplers_starved += min(self._phase.took.get(WAITING, 0.0), starved)

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
        self._phase.outside(BETWEEN)
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
            self._carry_out(command)
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
        with self._phase(PAUSED, f"{PAUSED}: rllib resume goes on"):
            while self.paused and not ends() and link.is_open:
                if (command := link.next_command(POLL_S)) is not None:
                    self._carry_out(command)

    def _carry_out(self, command: Mapping[str, Any]) -> None:
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
        self.link.answer(command, text, refused=refused)
