"""The overseen processes' side of the overseer: reports of a trial and of a sampler, and the
commands that a trial carries out.

A thread reports once a second and brings commands back. Nothing waits for it, and it waits for
nothing long: a run does not need its overseer, only its status and commands do. A trial carries
commands out between two iterations, and never within one:

    iteration ─▶ commands ─▶ result ─▶ Tune saves ─▶ iteration ...
                  └ paused: here, until it is resumed, or a result is wanted
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from rllib_llm.overseer import diagnosis
from rllib_llm.overseer.diagnosis import PhaseClock, shares
from rllib_llm.overseer.service import DONE, REFUSED, open_overseer
from rllib_llm.shared.process import CpuClock
from rllib_llm.shared.remote import NamedActor

INTERVAL_S = 1.0
ANSWER_S = 10.0  # that the overseer may take; one that owes two answers hangs
MAX_INTERVAL_S = 60.0  # between attempts to reach one that does not answer
SECONDS_TO_LEAVE = 1.0


class Link:
    """Reports of one part.

    Args:
        folder: of the Tune run.
        part: its name, unique in the run.
        describe: returns the part's facts, called in the link's thread.
        open: gives the overseer's handle.
        restarts_hung: whether an overseer that gives no answers any more is ended, so that Ray
            starts it anew.
    """

    def __init__(
        self, folder: Path, part: str, describe: Callable[[], Mapping[str, Any]],
        open: Callable[[Path], Any] = open_overseer, *, restarts_hung: bool = False,
    ) -> None:  # fmt: skip
        self._commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self._folder, self._part, self._describe, self._open = folder, part, describe, open
        self._incarnation = uuid.uuid4().hex
        self._seen: set[int] = set()
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ended, self._wake = threading.Event(), threading.Event()
        self._overseer: NamedActor | None = None
        self._restarts_hung = restarts_hung
        self._fixed = {
            "part": part, "incarnation": self._incarnation, "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id()[:8],
        }  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="overseer-link", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Until it is closed."""
        return not self._ended.is_set()

    def next_command(self, timeout_s: float = 0.0) -> dict[str, Any] | None:
        """The oldest command not yet fetched; None if none arrives in `timeout_s`."""
        try:
            return self._commands.get(block=timeout_s > 0, timeout=timeout_s or None)
        except queue.Empty:
            return None

    def answer(self, command: Mapping[str, Any], text: str, *, refused: bool = False) -> None:
        """Reports the result of a command, immediately if the overseer can be reached."""
        state = REFUSED if refused else DONE
        self._answers.put({"id": command["id"], "state": state, "answer": text})
        self._wake.set()

    def close(self) -> None:
        """Ends the thread, after it has sent the last answers."""
        self._ended.set()
        self._wake.set()
        self._thread.join(SECONDS_TO_LEAVE)

    def _run(self) -> None:
        pause = INTERVAL_S
        answers: list[dict[str, Any]] = []
        while True:
            is_last = self._ended.is_set()
            self._wake.clear()
            while not self._answers.empty():
                answers.append(self._answers.get_nowait())
            try:
                self._exchange(answers, is_last)
                answers, pause = [], INTERVAL_S
            except (RayError, ValueError, RuntimeError, ConnectionError) as error:
                # Ray ends an actor whose maker drops its handle: only a dead one is forgotten.
                if isinstance(error, ActorDiedError):
                    self._overseer = None
                pause = min(2 * pause, MAX_INTERVAL_S)
            if is_last:
                return
            self._wake.wait(pause)

    def _exchange(self, answers: list[dict[str, Any]], is_last: bool) -> None:
        if self._overseer is None:
            self._overseer = NamedActor(
                functools.partial(self._open, self._folder), answer_seconds=ANSWER_S,
                patience_seconds=0.0, restarts_hung=self._restarts_hung,
            )  # fmt: skip
        report = {**self._describe(), **self._fixed, "answers": answers}
        for command in self._overseer.call("report", report):
            if command["id"] not in self._seen:
                self._seen.add(command["id"])
                self._commands.put(command)
        if is_last:
            self._overseer.handle.leave.remote(self._part)


STOP_RUN = "stop_run"  # in a result: the run ends as at Ctrl-C
SHOULD_CHECKPOINT = "should_checkpoint"  # Tune's
POLL_S = 1.0  # of a paused trial, between looks whether its link is still there


class Orders:
    """The commands of one trial, as its link brings them.

    Args:
        algorithm: what they act on; its `scale_samplers(num_samplers)` returns a description of the
            change, or raises ValueError.
        link: brings them, and takes the answers.
        pausing: called when the trial begins to wait.
    """

    def __init__(self, algorithm: Any, link: Link, pausing: Callable[[], None]) -> None:
        self.paused = False
        self._algorithm, self._link, self._pausing = algorithm, link, pausing
        self._marks: dict[str, bool] = {}
        self._iteration = 0

    def after_iteration(self, iteration: int) -> dict[str, bool]:
        """Carries out the commands; a paused trial waits here, its result with it. Returns the
        marks for that result."""
        self._iteration = iteration
        while (command := self._link.next_command()) is not None:
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
        if self.paused and not ends():
            self._pausing()
        while self.paused and not ends() and self._link.is_open:
            if (command := self._link.next_command(POLL_S)) is not None:
                self._carry_out(command)

    def _carry_out(self, command: Mapping[str, Any]) -> None:
        try:
            self._link.answer(command, self._result_of(command))
        except ValueError as error:
            self._link.answer(command, str(error), refused=True)

    def _result_of(self, command: Mapping[str, Any]) -> str:
        name, iteration = command["name"], self._iteration
        if name == "pause":
            self.paused = True
            return f"paused after iteration {iteration}"
        if name == "resume":
            was_paused, self.paused = self.paused, False
            return f"resumes after iteration {iteration}" if was_paused else "it was not paused"
        if name == "scale":
            return self._algorithm.scale_samplers(command["arguments"]["samplers"])
        self._marks[SHOULD_CHECKPOINT] = True
        if name == "checkpoint":
            return f"iteration {iteration} is being saved"
        self.paused = False
        self._marks[STOP_RUN] = True
        return f"iteration {iteration} is being saved; then the run ends"


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


class _Watched:
    """Phases of this process; it reports only once it is joined to a run's overseer.

    Args:
        kind: of process.
        restarts_hung: see `Link`.
    """

    def __init__(self, kind: str, *, restarts_hung: bool = False) -> None:
        self.clock = PhaseClock(diagnosis.STARTING)
        self._link: Link | None = None
        self._facts: dict[str, Any] = {"kind": kind}
        self._restarts_hung = restarts_hung

    def join(self, folder: Path, part: str, **facts: Any) -> None:
        """Reports to the overseer of the Tune run in `folder` from now on."""
        self._facts |= facts
        self._link = Link(folder, part, self._describe, restarts_hung=self._restarts_hung)

    def close(self) -> None:
        """Ends the reports."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _describe(self) -> dict[str, Any]:
        return {
            **self._facts,
            "phase": self.clock.phase,
            "seconds_in_phase": self.clock.seconds_in_phase,
            "seconds": self.clock.seconds(),
        }


class Oversight(_Watched):
    """A trial's process, and the commands it was given."""

    def __init__(self) -> None:
        super().__init__("trial", restarts_hung=True)
        self._cpu = CpuClock()
        self._samplers_starved = 0.0  # seconds, of those that this process waited for
        self._activity, self._iteration = "", 0
        self._recent: deque[dict[str, float]] = deque(maxlen=NUM_RECENT)
        self._orders: Orders | None = None

    def obey(self, algorithm: Any, pausing: Callable[[], None]) -> None:
        """Starts carrying out the overseer's commands; see `Orders`."""
        assert self._link is not None, "join comes first"
        self._orders = Orders(algorithm, self._link, pausing)

    def close(self) -> None:
        super().close()
        self._orders = None

    # --- reports -----------------------------------------------------------------------------

    def doing(self, activity: str, phase: str | None) -> None:
        """Sets this process's activity."""
        self._activity = activity
        if phase is not None:
            self.clock.enter(phase)

    def waited(self, seconds: float, of_samplers: Mapping[str, float]) -> None:
        """Attributes the last `seconds` of waiting to the samplers' activities: `WAITS`."""
        parts = dict.fromkeys(WAITS.values(), 0.0)
        for name, phase in WAITS.items():
            parts[phase] += max(0.0, float(of_samplers.get(name, 0.0)))
        # Tools run while a conversation is sampled.
        tools = parts[diagnosis.FOR_TOOLS]
        parts[diagnosis.FOR_COMPLETIONS] = max(0.0, parts[diagnosis.FOR_COMPLETIONS] - tools)
        self.clock.split(diagnosis.WAITING, seconds, parts)
        # Work that was done before the learner waited did not delay it.
        self._samplers_starved += min(seconds, float(of_samplers.get("starved_seconds", 0.0)))

    def end_iteration(self, iteration: int) -> dict[str, float]:
        """Shares of the time since the last call by phase, and `starved`: the share in which this
        process, or the sampler that it waited for, was ready to compute and had no core."""
        lap = self.clock.lap()
        self._recent.append(lap)
        self._iteration = iteration
        found = {name.replace(" ", "_"): share for name, share in shares(lap).items()}
        starved, seconds = self._cpu.lap()
        starved += self._samplers_starved
        found["starved"] = min(1.0, starved / max(1e-9, seconds))
        self._samplers_starved = 0.0
        return found

    def recent_seconds(self) -> dict[str, float]:
        """Seconds by phase of the last iterations, from which a diagnosis is made."""
        recent: Counter[str] = Counter()
        for lap in self._recent:
            recent.update(lap)  # type: ignore[arg-type]  # of seconds
        return dict(recent)  # type: ignore[arg-type]

    def _describe(self) -> dict[str, Any]:
        return {
            **super()._describe(), "iteration": self._iteration, "activity": self._activity,
            "recent_seconds": self.recent_seconds(),
            "paused": self._orders is not None and self._orders.paused,
        }  # fmt: skip

    # --- commands ----------------------------------------------------------------------------

    def before_iteration(self) -> dict[str, bool]:
        """See `Orders`."""
        return {} if self._orders is None else self._orders.before_iteration()

    def after_iteration(self) -> dict[str, bool]:
        """See `Orders`; what Tune is to do with the result."""
        return {} if self._orders is None else self._orders.after_iteration(self._iteration)


IDLE, WEIGHTS, GENERATING = "waiting for a request", "loading weights", "generating"
JUDGING = "judging"
SECONDS_BETWEEN_WORDS = 1.0


class SamplerWatch(_Watched):
    """A sampler's process, and how far it is."""

    def __init__(self) -> None:
        super().__init__("sampler")
        self._prompts: tuple[int, int] | None = None
        self._tokens = self._max_tokens = 0
        self._version: int | None = None
        self._say: Callable[[str], None] | None = None
        self._said = 0.0  # monotonic seconds

    def tell(self, say: Callable[[str], None]) -> None:
        """Calls `say` once a second while the next request is generated, to report its progress."""
        self._say = say

    @property
    def on_step(self) -> Callable[[], None] | None:
        """The callback of a decode loop after each token; None without a listener."""
        return None if self._link is None and self._say is None else self._token

    def begin(self, position: int, num_prompts: int) -> None:
        """Prompts of a request."""
        self._prompts = (position, position + num_prompts - 1)
        self._tokens = self._max_tokens = 0
        self.clock.enter(WEIGHTS)

    def generating(self, version: int, max_tokens: int) -> None:
        """With these weights, so many tokens at most."""
        self._version, self._max_tokens = version, max_tokens
        self.clock.enter(GENERATING)

    def _token(self) -> None:
        """One more token of each completion in the batch."""
        self._tokens += 1
        if self._say is not None and time.monotonic() - self._said >= SECONDS_BETWEEN_WORDS:
            self._said = time.monotonic()
            self._say(f"{GENERATING} token {self._tokens} of {self._max_tokens}")

    def judging(self) -> None:
        """The completions are there."""
        self.clock.enter(JUDGING)

    def end(self) -> None:
        """The request is answered, or failed."""
        self._prompts = self._say = None
        self.clock.enter(IDLE)

    def text(self) -> str:
        """ "41 s generating for prompts 812-815, 380 of 512 tokens"."""
        text = f"{self.clock.seconds_in_phase:.0f} s {self.clock.phase}"
        prompts = self._prompts
        if prompts is not None:
            text += f" for prompts {prompts[0]}-{prompts[1]}"
        if self.clock.phase == GENERATING and self._tokens:
            text += f", {self._tokens} of {self._max_tokens} tokens"
        return text

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "version": self._version, "activity": self.text()}
