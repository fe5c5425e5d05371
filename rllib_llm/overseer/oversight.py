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
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from rllib_llm.overseer import phases
from rllib_llm.overseer.phases import Phases, shares
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
        restarts_hung: whether an overseer that gives no answers any more is ended, so that Ray
            starts it anew.
    """

    def __init__(
        self, folder: Path, part: str, describe: Callable[[], Mapping[str, Any]], *,
        restarts_hung: bool = False,
    ) -> None:  # fmt: skip
        self._commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self._folder, self._part, self._describe = folder, part, describe
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
                functools.partial(open_overseer, self._folder), answer_seconds=ANSWER_S,
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
        try:
            link.answer(command, self._result_of(command))
        except ValueError as error:
            link.answer(command, str(error), refused=True)

    def _result_of(self, command: Mapping[str, Any]) -> str:
        name, iteration = command["name"], self._iteration
        if name == "pause":
            self.paused = True
            return f"paused after iteration {iteration}"
        if name == "resume":
            was_paused, self.paused = self.paused, False
            return f"resumes after iteration {iteration}" if was_paused else "it was not paused"
        if name == "scale":
            return self._scale_samplers(command["arguments"]["samplers"])
        self._marks[SHOULD_CHECKPOINT] = True
        if name == "checkpoint":
            return f"iteration {iteration} is being saved"
        self.paused = False
        self._marks[STOP_RUN] = True
        return f"iteration {iteration} is being saved; then the run ends"
