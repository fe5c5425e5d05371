"""Calls of a named actor: repeated while it is restarted, and it is killed where it hangs."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RaySystemError

from rllib_llm.shared.elsewhere import backoff_seconds
from rllib_llm.shared.process import StarvedProcesses
from rllib_llm.shared.ray_compat import processes_of

NAMESPACE = "rllib_llm"  # of all named actors, whichever driver asks
PASSING = (RayActorError, GetTimeoutError, RaySystemError)  # errors of a call that may be repeated
SHARE_OF_STARVED = 0.5  # of the time of an answer, in which it had no core, and is not hung


class NamedActor:
    """An actor as one process calls it, from any of its threads.

    Ray itself waits for an actor that is being restarted. Calls may be carried out twice.

    Args:
        connect: gives its handle.
        answer_seconds: that one attempt may take, beyond what the call itself waits for.
        patience_seconds: after which `call` gives up; 0: it tries once.
        restarts_hung: whether one that gives no answer is killed, for Ray to start it again.
        reconnects: whether another one is connected to when somebody has ended it for good.
        get, sleep, uniform: what stands for `ray.get`, `time.sleep` and `random.uniform`.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        answer_seconds: float,
        patience_seconds: float,
        restarts_hung: bool = True,
        reconnects: bool = True,
        get: Callable[..., Any] = ray.get,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._connect, self._reconnects = connect, reconnects
        self._answer_seconds, self._patience_seconds = answer_seconds, patience_seconds
        self._get, self._sleep, self._uniform = get, sleep, uniform
        self._restarts_hung = restarts_hung
        self.failures: Counter[str] = Counter()  # by the error's name
        self.handle = connect()
        self._silence = self._listen()

    def _listen(self) -> Silence:
        handle = self.handle
        return Silence(self._answer_seconds, lambda anywhere: processes_of(handle, anywhere))

    def call(self, method: str, *args: Any, waits: float = 0.0) -> Any:
        """The result of a method that itself waits for at most `waits` seconds.

        Raises:
            RayActorError, GetTimeoutError, RaySystemError: of the last attempt.
        """
        start = time.monotonic()
        for attempt in itertools.count():
            try:
                return self.ask(method, *args, timeout=waits + self._answer_seconds)
            except PASSING as error:
                has_ended = isinstance(error, ActorDiedError)
                is_late = time.monotonic() - start > self._patience_seconds
                if is_late or (has_ended and not self._reconnects):
                    raise
                self._sleep(backoff_seconds(attempt, self._uniform))
                if has_ended:
                    self.handle = self._connect()
                    self._silence = self._listen()
        raise AssertionError("unreachable")

    def ask(self, method: str, *args: Any, timeout: float) -> Any:
        """As `call`, one attempt."""
        silence = self._silence
        try:
            answer = self._get(getattr(self.handle, method).remote(*args), timeout=timeout)
        except PASSING as error:
            self.failures[type(error).__name__] += 1
            is_hung = isinstance(error, GetTimeoutError) and silence.is_that_of_hung()
            if is_hung and self._restarts_hung:
                ray.kill(self.handle, no_restart=False)
            raise
        silence.end()
        return answer

    def end(self) -> None:
        """Ends the actor, for everybody."""
        ray.kill(self.handle, no_restart=True)


class Silence:
    """Why an actor gives no answer: it is being started, it has no core, or it hangs.

    Args:
        limit: seconds after which an answer counts as missing.
        processes: ids of the actor's processes on this node, or on all if called with True; none
            while it is being started.
        starvation: watches processes of this node by their ids.
    """

    def __init__(
        self,
        limit: float,
        processes: Callable[[bool], list[int]],
        starvation: Callable[[list[int]], StarvedProcesses] = StarvedProcesses,
    ) -> None:
        self._limit, self._processes, self._starvation = limit, processes, starvation
        self._watched: tuple[list[int], StarvedProcesses] | None = None

    def is_that_of_hung(self) -> bool:
        """Called when an answer is missing: whether the same processes owed the one before as well,
        and had cores to work on since."""
        pids, before = self._processes(True), self._watched
        if not pids or before is None or before[0] != pids:
            self._watched = (pids, self._starvation(self._processes(False))) if pids else None
            return False
        if before[1].take() > SHARE_OF_STARVED * self._limit:
            return False
        self._watched = None
        return True

    def end(self) -> None:
        """Called when an answer has come."""
        self._watched = None
