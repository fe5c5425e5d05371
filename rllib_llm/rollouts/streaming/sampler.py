"""The sampler's side of a stream: a thread that leases groups, samples them and hands them in.

The actor of a sampler stays free for other calls meanwhile: the driver asks it every second to be
at work, which a sampler that was started again takes as its order to begin.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import RayError

from rllib_llm.rollouts.failure import SampleFailure
from rllib_llm.rollouts.streaming.client import SamplerLedger
from rllib_llm.rollouts.streaming.row_work import RowWork
from rllib_llm.rollouts.streaming.serving import LeaseServer, ServingSettings

WAIT_SECONDS = 2.0  # for work, before it is asked for again
MAX_SECONDS_OF_A_TURN = 600.0
SECONDS_TO_END = 1.5  # a step of rows; not a batch

Result = TypeVar("Result")


@dataclass(frozen=True)
class StreamOrder:
    """What a sampler is to do: `key` names the stream, `ledger` is the actor."""

    key: str
    ledger: Any
    settings: ServingSettings


class Streamer:
    """Leases, samples and hands in until it is stopped, in a thread of its own.

    Args:
        runner: the sampler's actor.
        order: what to do.
    """

    def __init__(self, runner: Any, order: StreamOrder) -> None:
        self.key = order.key
        ledger = SamplerLedger(order.ledger, str(runner.worker_index))
        self._stopped = threading.Event()
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        self._work: RowWork | LeaseWork
        if order.settings.by_row and runner.sampler.takes_rows:
            self._work = RowWork(ledger, runner.sampler, order.settings)
        else:
            self._work = LeaseWork(ledger, LeaseServer(runner.serve, order.settings))
        # A daemon: a process that ends does not wait for a lease.
        self._thread = threading.Thread(target=self._run, name="streaming", daemon=True)
        self._thread.start()

    @property
    def is_at_work(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive() and not self._stopped.is_set()

    def stop(self) -> None:
        """Asks for no more leases; waits for the end of what its thread does, if that is near."""
        self._stopped.set()
        self._thread.join(SECONDS_TO_END)

    def between_turns(self, call: Callable[[], Result]) -> Result:
        """What a call gives that is made while nothing is sampled.

        Raises:
            TimeoutError: no turn came to its end in time.
        """
        future: Future[Result] = Future()
        self._asked.put((call, future))
        return future.result(MAX_SECONDS_OF_A_TURN)

    def _answer(self) -> None:
        """Makes the calls that were asked for."""
        while not self._asked.empty():
            call, future = self._asked.get()
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001  (the border of a thread; raised by who asked)
                future.set_exception(error)

    def _run(self) -> None:
        try:
            with self._work.listening():
                while not self._stopped.is_set():
                    self._work.turn()
                    self._answer()
        except RayError:
            # The ledger has ended, and the run with it; where it has not, the driver, which asks
            # every second, starts another thread.
            self._stopped.set()
        finally:
            self._answer()
            self._work.close()


class LeaseWork:
    """One lease after the other, each as one batch."""

    def __init__(self, ledger: SamplerLedger, server: LeaseServer) -> None:
        self._ledger, self._server = ledger, server

    def listening(self) -> AbstractContextManager[Any]:
        """Nothing to be done: whatever serves a lease listens."""
        return nullcontext()

    def turn(self) -> None:
        """Waits for a lease, and works it off."""
        size = self._server.settings.groups_per_lease
        for lease in self._ledger.lease(size, [], WAIT_SECONDS).result():
            answer: Any
            try:
                answer = self._server.groups(lease)
            except Exception as error:  # noqa: BLE001  (a filter's; the border of the process)
                answer = SampleFailure.from_exception(error)
            if isinstance(answer, SampleFailure):
                self._ledger.fail(lease.id, answer).result()
            else:
                self._ledger.push(lease.id, answer).result()

    def close(self) -> None:
        """Nothing is held."""


def be_streaming(runner: Any, order: StreamOrder) -> str:
    """Has a sampler be at work for a stream, and not for another; the stream's key."""
    streamer = runner.streamer
    if streamer is None or streamer.key != order.key or not streamer.is_at_work:
        stop_streaming(runner)
        runner.streamer = Streamer(runner, order)
    return order.key


def stop_streaming(runner: Any) -> None:
    """Has a sampler lease nothing any more."""
    if runner.streamer is not None:
        runner.streamer.stop()
        runner.streamer = None
