"""An overseen process's side of the overseer: reports of a trial or a sampler, and what it is told.

A thread reports once a second and brings commands back. Nothing waits for it, and it waits for
nothing long: a run does not need its overseer, only its status and commands do.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from rllib_llm.overseer.service import DONE, REFUSED, open_overseer
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
