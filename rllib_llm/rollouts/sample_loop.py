"""The loop of a sampler: it leases groups, samples them, has them judged, and hands them in.

    lease ─▶ rows or batches (`in_flight.py`) ─▶ judges, MAX_JUDGING at most ─▶ push

`SampleLoop.turn` is all of it. The driver takes turns where the sampler is in its process, while a
batch is awaited. An actor takes them until a lease is done that it was dealt, or in a thread, where
it leases by itself (`SamplerThread`): it stays free for other calls, and the driver asks it every
second to be at work, which a sampler that was started again takes as its order to begin. Whether
the ledger is here or in an actor, or a lease was dealt, is known to its end alone.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from rllib_llm.rollouts.errors import SampleFailure
from rllib_llm.rollouts.groups import JudgedGroup, Lease
from rllib_llm.rollouts.in_flight import open_in_flight
from rllib_llm.rollouts.judged_batch import judged_groups, opened, pack
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.sampler import MAX_JUDGING, Sampler, UnjudgedBatch
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.shared.messages import Listener
from rllib_llm.weights.published import PublishedWeights

if TYPE_CHECKING:
    from rllib_llm.rollouts.filters import Filters

WAIT_SECONDS = 2.0  # for work, before it is asked for again
SECONDS_BETWEEN_RENEWALS = 0.2  # which bring news of weights
MAX_SECONDS_OF_A_TURN = 600.0
SECONDS_TO_END = 1.5  # a step of rows; not a batch


# --- a sampler's ends of a ledger --------------------------------------------------------------


class SamplerLedger:
    """A sampler's end of a ledger in an actor.

    Its calls wait for the actor as long as that is being started again; they fail only once it has
    ended for good, and so has the run. To look whether one is answered costs nothing, as a sampler
    does after every token.
    """

    def __init__(self, actor: Any, sampler: str) -> None:
        self._actor, self.sampler = actor, sampler

    def lease(self, num_groups: int, holding: Iterable[int], wait_s: float) -> Future[Any]:
        """See `LedgerActor.lease`."""
        call = self._actor.lease.remote(self.sampler, num_groups, list(holding), wait_s)
        return call.future()

    def call(self, name: str, *args: Any) -> Future[Any]:
        """One of `ledger_actor.CALLS`."""
        return self._actor.call.remote(name, *args).future()

    def packed(self, groups: Sequence[JudgedGroup]) -> list[JudgedGroup]:
        """Groups of one batch as they leave the process; messages go with the first."""
        found: list[JudgedGroup] = []
        for group in groups:
            rows = opened(group.payload)
            if found:
                rows.messages = []
            found.append(dataclasses.replace(group, payload=pack(rows)))
        return found

    def fail(self, lease: Lease, error: BaseException, positions: Collection[int]) -> Future[Any]:
        """Tells of an exception that concerns these groups of a lease."""
        failure = SampleFailure.from_exception(error)
        return self.call("fail", lease.id, failure, list(positions))

    def give_back(self, error: BaseException, holding: Iterable[int]) -> None:
        """Ends all leases but these, after an exception that none of their groups caused."""
        failure = SampleFailure.from_exception(error)
        self.call("give_back", self.sampler, failure, list(holding)).result()


class LocalLedger(SamplerLedger):
    """A sampler's end of a ledger in this process: calls are answered at once, groups stay where
    they are, and exceptions are raised, since no other sampler could do better."""

    def __init__(self, ledger: Ledger | DealtLease) -> None:
        super().__init__(None, "0")
        self._ledger = ledger

    def lease(self, num_groups: int, holding: Iterable[int], wait_s: float) -> Future[Any]:
        return self.call("lease", self.sampler, num_groups, holding)

    def call(self, name: str, *args: Any) -> Future[Any]:
        answered: Future[Any] = Future()
        answered.set_result(self._ledger.call(name, *args))
        return answered

    def packed(self, groups: Sequence[JudgedGroup]) -> list[JudgedGroup]:
        return list(groups)

    def fail(self, lease: Lease, error: BaseException, positions: Collection[int]) -> Future[Any]:
        raise error

    def give_back(self, error: BaseException, holding: Iterable[int]) -> None:
        raise error


# --- the loop ----------------------------------------------------------------------------------


class SampleLoop:
    """See the module."""

    def __init__(self, ledger: SamplerLedger, sampler: Sampler, settings: ServingSettings) -> None:
        self._ledger, self._sampler, self._settings = ledger, sampler, settings
        self.in_flight = open_in_flight(sampler, settings)

        def filters_of(env: int) -> Filters:
            from rllib_llm.rollouts.filters import Filters  # few runs need it

            return Filters(settings.filters_of(env))

        self._filters = functools.cache(filters_of)
        self._threads = ThreadPoolExecutor(MAX_JUDGING, thread_name_prefix="judging")
        self._judging: list[tuple[Lease, Sequence[int], Future[list[JudgedGroup]]]] = []
        self._asked: Future[list[Lease]] | None = None  # for leases
        self._pending: list[tuple[int, Future[Any]]] = []  # calls that are not answered, and leases
        self._renewing: tuple[set[int], Future[Any]] | None = None  # leases, and the call
        self._renewed = 0.0
        self._was_judged = True  # something, since the last renewal

    def turn(self) -> bool:
        """Takes leases while there is room, hands in what was judged, samples a step, and has
        judged what is finished; whether there was anything to do.

        Raises:
            RayActorError: the ledger has ended.
            RayTaskError: a call to it failed.
        """
        leases = self._leased()
        is_at_work = bool(leases or self._judging or self.in_flight.leases)
        self._hand_in()
        ended, newest, order = self._renewal()
        # What is raised from here on is the engine's: the ledger's answers were read.
        try:
            for lease in leases:
                self._begin(lease)
            for lease, made in self.in_flight.step():
                if isinstance(made, Exception):
                    self._tell(lease.id, self._ledger.fail(lease, made, lease.positions))
                else:
                    self._judge(lease, made)
            for lost in ended:
                self.in_flight.drop(lost)
            if newest is not None:
                for held, partial in self.in_flight.renewed(newest, order).items():
                    self._tell(held, self._ledger.call("keep_partial", held, partial))
        except Exception as error:  # noqa: BLE001  (the border of the process)
            # Caused by none of the groups in the engine, whose state can no longer be trusted.
            self._ledger.give_back(error, self._holding() - self.in_flight.leases)
            self.in_flight.close()
            self.in_flight = open_in_flight(self._sampler, self._settings)
        return is_at_work

    def _leased(self) -> list[Lease]:
        """Leases that have come; waits for them, or for a judge, where nothing is in flight."""
        in_flight, judging = self.in_flight, [call for _, _, call in self._judging]
        may_ask = in_flight.room > 0 and len(judging) < MAX_JUDGING + self._settings.max_groups
        if self._asked is None and may_ask:
            self._asked = self._ledger.lease(in_flight.room, self._holding(), WAIT_SECONDS)
        leases = self._answer()
        if not leases and not in_flight.leases:
            asked: list[Future[Any]] = [] if self._asked is None else [self._asked]
            seconds = SECONDS_BETWEEN_RENEWALS if judging else WAIT_SECONDS
            wait([*judging, *asked], seconds, FIRST_COMPLETED)
            leases = self._answer()
        return leases

    def _answer(self) -> list[Lease]:
        if self._asked is None or not self._asked.done():
            return []
        leases, self._asked = self._asked.result(), None
        return leases

    def _holding(self) -> set[int]:
        pending = {lease for lease, _ in self._pending}
        return self.in_flight.leases | self._judged_leases | pending

    @property
    def _judged_leases(self) -> set[int]:
        return {lease.id for lease, _, _ in self._judging}

    def _begin(self, lease: Lease) -> None:
        """Takes a lease's groups in, once its weights are there."""
        self.in_flight.load(lease.weights, lease.order)
        for error, positions in self.in_flight.add(lease):
            self._tell(lease.id, self._ledger.fail(lease, error, positions))
        if anew := self.in_flight.begun_anew(lease):
            kept = dict.fromkeys(anew, ())
            self._tell(lease.id, self._ledger.call("keep_partial", lease.id, kept))

    def _judge(self, lease: Lease, generated: UnjudgedBatch) -> None:
        """Starts judging the groups of a lease, or one of them; or judges them now."""
        call: Future[list[JudgedGroup]] = Future()
        if self._settings.judges_beside:
            call = self._threads.submit(self._judged, generated)
        else:
            call.set_result(self._judged(generated))
        self._judging.append((lease, generated.request.positions, call))

    def _judged(self, generated: UnjudgedBatch) -> list[JudgedGroup]:
        """The groups of a batch, judged and filtered."""
        request, keep = generated.request, self._settings.oversample_keep
        sampler = self._sampler.of(request)
        judged = sampler.judge(generated, beside=self._settings.judges_beside)
        min_valid = min(self._settings.min_valid, request.num_completions)
        groups = judged_groups(judged, min_valid=min_valid)
        if generated.continues:
            groups = [dataclasses.replace(group, continues=True) for group in groups]
        if keep != "first" or self._settings.filters_of(request.env):
            from rllib_llm.rollouts.filters import merit

            reason = self._filters(request.env).reason
            rows = (opened(group.payload).to("cpu") for group in groups)
            groups = [
                dataclasses.replace(
                    group, merit=merit(batch, keep), reason=group.reason or reason(batch)
                )
                for group, batch in zip(groups, rows, strict=True)
            ]  # fmt: skip
        return self._ledger.packed(groups)

    def _hand_in(self) -> None:
        """Hands judged groups to the ledger; a group whose judge raised fails alone."""
        done = [each for each in self._judging if each[2].done()]
        self._judging = [each for each in self._judging if each not in done]
        for lease, positions, call in done:
            self._was_judged = True
            if (error := call.exception()) is None:
                self._tell(lease.id, self._ledger.call("push", lease.id, call.result()))
            else:
                self._tell(lease.id, self._ledger.fail(lease, error, positions))
        for pending in [pending for pending in self._pending if pending[1].done()]:
            self._pending.remove(pending)
            pending[1].result()  # raises what became of the call

    def _tell(self, lease: int, call: Future[Any]) -> None:
        """Notes a call to the ledger about a lease; its answer is looked at in a later turn."""
        self._pending.append((lease, call))

    def _renewal(self) -> tuple[set[int], PublishedWeights | None, int]:
        """The answer to a renewal: leases that have ended, the newest weights and their order.

        Renewed are leases of groups being sampled, and of those being judged while their judges
        make progress: a judge that hangs costs its lease.
        """
        now = time.monotonic()
        if self._renewing is None and now - self._renewed >= SECONDS_BETWEEN_RENEWALS:
            leases = self.in_flight.leases | (self._judged_leases if self._was_judged else set())
            call = self._ledger.call("renew", self._ledger.sampler, list(leases))
            self._renewing, self._renewed, self._was_judged = (leases, call), now, False
        if self._renewing is None or not self._renewing[1].done():
            return set(), None, 0
        (asked, call), self._renewing = self._renewing, None
        held, newest, order = call.result()
        return asked - set(held), newest, order

    def close(self) -> None:
        """Frees its memory."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.in_flight.close()


class Workers:
    """Samplers of the groups that a ledger leases."""

    def work(self) -> None:
        """Keeps the samplers busy; called repeatedly while a batch is awaited.

        Raises:
            RuntimeError: no sampler can sample.
        """

    def replace(self, sampler: str, reason: str) -> None:
        """Starts a sampler again that gives no answer."""

    def note_progress(self) -> None:
        """Notes that a batch is waited for from now on, or that more of it is there."""

    def forget(self) -> None:
        """Notes that the ledger has restarted: work in flight is no longer needed."""

    def stop(self) -> None:
        """Ends their work."""


class LocalWorker(Workers):
    """The sampler of this process, which takes turns while a batch is awaited; its exceptions
    propagate.

    In lockstep it works off all there is before the learner continues: a module shared with the
    learner has older weights no more.
    """

    def __init__(self, sampler: Sampler, ledger: Ledger, settings: ServingSettings) -> None:
        self._loop = SampleLoop(LocalLedger(ledger), sampler, settings)
        self._is_eager = ledger.rules.schedule == "lockstep"

    def work(self) -> None:
        while self._loop.turn() and self._is_eager:
            pass

    def stop(self) -> None:
        self._loop.close()


class DealtLease:
    """A ledger's calls, of which a sampler knows one lease alone: the driver dealt it."""

    def __init__(self, lease: Lease) -> None:
        self._waiting, self.groups = [lease], list[JudgedGroup]()

    def call(self, name: str, *args: Any) -> Any:
        """A method of `Ledger`."""
        if name == "lease":
            waiting, self._waiting = self._waiting, []
            return waiting
        if name == "push":
            self.groups += args[1]
        return (args[1], None, 0) if name == "renew" else None


# --- the loop in a thread of an actor ----------------------------------------------------------


class SamplerThread:
    """The turns of a loop, one after the other, until stopped.

    key: names the stream that it works for.
    """

    def __init__(self, loop: SampleLoop, listener: Listener, key: str) -> None:
        self.loop, self._listener, self.key = loop, listener, key
        self.failure: SampleFailure | None = None  # that ended the thread
        self._stopped = threading.Event()
        # A daemon: a process that ends does not wait for a lease.
        self._thread = threading.Thread(target=self._run, name="streaming", daemon=True)
        self._thread.start()

    @property
    def is_at_work(self) -> bool:
        """Whether it takes turns."""
        return self._thread.is_alive() and not self._stopped.is_set()

    def stop(self, seconds: float = SECONDS_TO_END) -> None:
        """Ends it; waits so long for the end of its turn."""
        self._stopped.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            with self._listener:
                while not self._stopped.is_set():
                    self.loop.turn()
        except RayActorError:
            # The ledger has ended, and the run with it; where it has not, the driver, which asks
            # every second, starts another thread.
            self._stopped.set()
        except BaseException as error:  # noqa: BLE001  (the border of the thread; reported to the driver)
            self.failure = SampleFailure.from_exception(error)
            self._stopped.set()
        finally:
            self.loop.close()


def be_streaming(
    runner: Any, key: str, actor: Any, name: str, settings: ServingSettings
) -> SampleFailure | None:
    """Makes a sampler work for a stream, and no other; returns the error that ended its thread
    since the last call, if any.

    Args:
        key: names the stream. actor: its ledger, which knows the sampler as `name`.
    """
    streamer, failure = runner.streamer, None
    if streamer is None or streamer.key != key or not streamer.is_at_work:
        stop_streaming(runner)
        if streamer is not None and streamer.key == key:
            failure = streamer.failure
        loop = SampleLoop(SamplerLedger(actor, name), runner.sampler, settings)
        runner.streamer = SamplerThread(loop, runner.listener, key)
    return failure


def stop_streaming(runner: Any, seconds: float = SECONDS_TO_END) -> None:
    """Makes a sampler stop leasing; waits so long for the end of its turn."""
    if runner.streamer is not None:
        runner.streamer.stop(seconds)
        runner.streamer = None
