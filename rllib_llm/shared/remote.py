"""Calls to other processes and services that may be slow, dead or unreachable: retries, waits,
outages, and named actors of Ray that are restarted or hang.

    caller ─▶ what runs elsewhere, with a deadline ─┬─▶ answer
                                                    ├─▶ Late          it is there, and was late
                                                    └─▶ Away          it can answer no caller now

Sandboxed processes, servers of tools, judges and rewards keep to it. There is one deadline for each
kind of wait, since only its own can end it: `within` for what is awaited, `Contained.read` for a
process, which is killed, `OpenAIClient` for an HTTP request, `NamedActor` for an actor of Ray.
What is away is asked again after growing pauses, and its `Outage` logs it. The caller makes a row
that is not valid of `Away`, never a score: the policy has not caused it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import math
import queue
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RaySystemError

from rllib_llm.shared.messages import told
from rllib_llm.shared.process import StarvedProcesses
from rllib_llm.shared.ray_compat import processes_of

logger = logging.getLogger(__name__)

LOGGED_EVERY_S = 60.0


class Away(RuntimeError):
    """A remote service or process is unavailable now."""


class ServerError(Away):
    """The server gave no usable answer, however often it was asked."""


class Late(TimeoutError):
    """A remote service or process runs, and gave no answer by its deadline."""


class OutageError(Away):
    """A remote service has been unavailable for longer than callers wait."""


def backoff_seconds(
    attempt: int, uniform: Callable[[float, float], float], first: float = 0.05, longest: float = 5
) -> float:
    """min(longest, first * 2^attempt) * U(0.5, 1.5): many that failed together do not return
    together."""
    return min(longest, first * 2 ** min(attempt, 32)) * uniform(0.5, 1.5)


class Outage:
    """The duration of an outage over all callers, on one clock.

    Args:
        name: of what is asked.
        longest_s: that it is waited for; 0: it is not.
        meanwhile: what happens while it is away, a sentence, where that is to be logged at once.
        setting: what the user calls `longest_s`.
    """

    def __init__(
        self, name: str, longest_s: float = math.inf, meanwhile: str = "", *,
        setting: str = "outage_s",
    ) -> None:  # fmt: skip
        self._name, self._longest_s, self._meanwhile = name, longest_s, meanwhile
        self._setting = setting
        self._lock = threading.Lock()
        self._since: float | None = None
        self._logged: float | None = None  # when it was last logged

    def waits(self, reason: str) -> float:
        """Notes an attempt that found it away; the seconds that it is still waited for."""
        if not self._longest_s:
            return 0.0
        now = time.monotonic()
        with self._lock:
            self._since = now if self._since is None else self._since
            away = now - self._since
            is_first = self._logged is None and bool(self._meanwhile)
            logs = is_first or now - (self._logged or self._since) >= LOGGED_EVERY_S
            if logs:
                self._logged = now
        if logs and away < self._longest_s:
            then = self._meanwhile or f"It is waited for up to {self._longest_s:.0f} s."
            how_long = "went away" if is_first else f"has been away for {away:.0f} s"
            logger.warning("%s %s (%s). %s", self._name, how_long, reason, then)
        return max(0.0, self._longest_s - away)

    def give_up(self, reason: str) -> None:
        """Raises OutageError where it was waited for."""
        if self._longest_s:
            raise OutageError(
                f"{self._name} must come back within {self._setting}={self._longest_s:g}: it was "
                f"away (an outage; the last attempt gave {reason}). Restart it and resume the run."
            )

    def end(self) -> None:
        """Notes that it has answered."""
        with self._lock:
            since, logged, self._since, self._logged = self._since, self._logged, None, None
        if since is not None and logged is not None:
            logger.warning("%s is back after %.0f s.", self._name, time.monotonic() - since)


Result = TypeVar("Result")


class ExitedError(RuntimeError):
    """A user's code has ended what it runs in: by `SystemExit`, a cancellation or the like, which
    as it is would end the event loop, its process, or the rollouts beside it."""


def no_answer(seconds: float, setting: str = "") -> str:
    """The words of `Late`, with the setting that is the limit."""
    return f"no answer within {f'{setting}={seconds:g}' if setting else f'{seconds:g} s'}"


class EventLoop:
    """A running event loop; `run` waits for a coroutine from any other thread."""

    def __init__(self, name: str = "conversations") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                return self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # of a task that a user's code has begun
                continue  # the task's awaiter gets it, too

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result; an interruption here cancels it, and waits for its end."""
        over = threading.Event()

        async def run() -> Result:
            try:
                return await coroutine
            finally:
                over.set()

        future = self.submit(run())
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                over.wait(30.0)  # a user waits, and may interrupt again
            raise

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begins the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._loop.is_closed()

    def close(self) -> None:
        """Ends the loop and its thread."""
        if not self.is_closed:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of a user's function: coroutine functions run in the loop, others in a thread.

    Raises:
        ExitedError: see `harmless`. Callers that go on after the function's errors count on it,
            also those that give it no time limit (`within`).
    """
    return await _called(partial(function, *args, **kwargs), _begin_thread)


class OneThread:
    """A thread in which functions are called one after the other, for objects that only the thread
    may use which made them, such as connections of SQLite. It ends with the last reference to this
    object. A call whose caller has gone keeps its thread, and later ones get another.
    """

    def __init__(self) -> None:
        self._open()

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As `call`, but in this thread."""
        try:
            return await _called(partial(function, *args, **kwargs), self._works.put)
        except asyncio.CancelledError:
            self._open()
            raise

    def _open(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        works = self._works  # the thread must not hold this object

        def do_all() -> None:
            while (work := works.get()) is not None:
                work()

        _begin_thread(do_all)
        weakref.finalize(self, works.put, None)


def _begin_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="conversation-call", daemon=True).start()


async def _called(function: partial, begin: Callable[[Callable[[], None]], None]) -> Any:
    """The result of a function, in a thread unless it is a coroutine's. One whose caller has gone
    cannot be ended; it continues in the background, and holds up neither the loop nor the end of
    the process."""
    if inspect.iscoroutinefunction(function.func):
        return await harmless(function())
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if waiting.done():
            return
        if error is None:
            waiting.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            waiting.set_exception(error)
        else:  # a future refuses StopIteration
            waiting.set_exception(ExitedError(told(error)))

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001  (the thread's border: the caller gets it)
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    begin(work)
    result = await waiting
    return await harmless(result) if inspect.isawaitable(result) else result


_END_SECONDS = 5.0  # that a cancelled task has to end


async def within(
    seconds: float | None,
    awaitable: Awaitable[Result],
    said: str = "",
    end_seconds: float = _END_SECONDS,
) -> Result:
    """The result of an awaitable, which is cancelled when its time is over (None: it has any). It
    has `end_seconds` to end; if that takes longer, it continues in the background.

    Raises:
        Late: it is, with the message `said`. What the awaitable itself raises is no `Late`.
        ExitedError: see `harmless`.
    """
    task = asyncio.ensure_future(harmless(awaitable))
    try:
        await asyncio.wait({task}, timeout=None if seconds == math.inf else seconds)
        if not task.done():
            await ended(task, end_seconds)
            raise Late(said or no_answer(seconds or 0.0))
        return task.result()
    except asyncio.CancelledError:  # its task must not outlive it
        await ended(task)
        raise


async def ended(task: asyncio.Future, seconds: float = _END_SECONDS) -> None:
    """Cancels a task, and waits for its end, but not for longer than `seconds`."""
    task.cancel()
    await asyncio.wait({task}, timeout=seconds)


async def harmless(awaitable: Awaitable[Any]) -> Any:
    """The result of an awaitable.

    Raises:
        ExitedError: it raised what is no `Exception`, and would end the loop, or all that waits
            for it; a cancellation from outside alone stays one.
    """
    task = asyncio.current_task()
    try:
        return await awaitable
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, GeneratorExit) and asyncio.current_task() is not task:
            raise  # the loop has ended, and this does not run any more
        asked_to_end = getattr(task, "cancelling", lambda: 1)  # from Python 3.11
        if isinstance(error, asyncio.CancelledError) and asked_to_end():
            raise
        raise ExitedError(told(error)) from error


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
        reconnects: whether another one is connected to when this one has been ended for good.
        get, sleep, uniform: what stands for `ray.get`, `time.sleep` and `random.uniform`.
    """

    def __init__(
        self, connect: Callable[[], Any], *, answer_seconds: float, patience_seconds: float,
        restarts_hung: bool = True, reconnects: bool = True, get: Callable[..., Any] = ray.get,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:  # fmt: skip
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
