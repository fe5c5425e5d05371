"""What a trial does when it is told something: between two iterations, and never within one.

iteration ─▶ commands ─▶ result ─▶ Tune saves ─▶ iteration ...
              └ paused: here, until it is resumed, or a result is wanted
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rllib_llm.overseer.link import Link

STOP_RUN = "stop_run"  # in a result: the run ends as at Ctrl-C
SHOULD_CHECKPOINT = "should_checkpoint"  # Tune's
POLL_S = 1.0  # of a paused trial, between looks whether its link is still there


class Scalable(Protocol):
    """What commands act on."""

    def scale_samplers(self, num_samplers: int) -> str:
        """Has so many samplers from the next request on, and says how.

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
