"""The sampler's side of a stream: a thread that leases groups, samples them and hands them in.

    lease ─▶ completions (one thread) ─▶ judges (beside it, MAX_JUDGING at most) ─▶ push

The actor of a sampler stays free for other calls meanwhile: the driver asks it every second to be
at work, which a sampler that was started again takes as its order to begin.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import RayActorError

from rllib_llm.overseer.phases import GENERATING
from rllib_llm.rollouts.errors import SampleFailure
from rllib_llm.rollouts.filters import Filters
from rllib_llm.rollouts.groups import JudgedGroup, Lease
from rllib_llm.rollouts.judged_batch import (
    JudgedBatch,
    SampleRequest,
    judged_groups,
    opened,
    pack,
    request_of,
)
from rllib_llm.rollouts.ledger_actor import SamplerLedger
from rllib_llm.rollouts.row_stream import RowStream
from rllib_llm.rollouts.sampler import MAX_JUDGING, Sampler, UnjudgedBatch
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.shared.messages import Listener
from rllib_llm.weights.coordinator import PublishedWeights

WAIT_SECONDS = 2.0  # for work, before it is asked for again
SECONDS_BETWEEN_RENEWALS = 0.2  # which bring news of weights
MAX_SECONDS_OF_A_TURN = 600.0
SECONDS_TO_END = 1.5  # a step of rows; not a batch

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Judging:
    """Groups of a lease that are being judged, or were."""

    lease: Lease
    request: SampleRequest
    call: Future[list[JudgedGroup]]

    @property
    def positions(self) -> range:
        """The positions of its groups."""
        first = self.request.position
        return range(first, first + self.request.num_prompts)


class JudgeThreads:
    """Judges finished groups while others are sampled."""

    def __init__(
        self, judge: Callable[[UnjudgedBatch], JudgedBatch], settings: ServingSettings
    ) -> None:
        self._judge = judge
        self._min_valid = settings.min_valid
        self._filters = Filters(settings.filters)
        self._threads = ThreadPoolExecutor(MAX_JUDGING, thread_name_prefix="judging")
        self._under_way: list[Judging] = []

    def begin(self, lease: Lease, generated: UnjudgedBatch, *, continues: bool = False) -> None:
        """Starts judging the groups of a lease, or one of them."""
        call = self._threads.submit(self._groups, generated, continues)
        self._under_way.append(Judging(lease, generated.request, call))

    def _groups(self, generated: UnjudgedBatch, continues: bool) -> list[JudgedGroup]:
        # Groups leave the process: a column goes to the host once for all of them.
        judged = self._judge(generated).to("cpu")
        groups: list[JudgedGroup] = []
        for group in judged_groups(judged, min_valid=self._min_valid):
            rows = opened(group.payload)
            if groups:
                rows.messages = []  # they go with the first
            reason = group.reason or self._filters.reason(rows)
            groups.append(dataclasses.replace(
                group, payload=pack(rows), reason=reason, continues=continues
            ))  # fmt: skip
        return groups

    @property
    def leases(self) -> set[int]:
        """Ids of the leases whose groups are being judged."""
        return {each.lease.id for each in self._under_way}

    @property
    def is_full(self) -> bool:
        """Whether another group would have to wait for a thread."""
        return len(self._under_way) >= MAX_JUDGING

    @property
    def calls(self) -> list[Future[list[JudgedGroup]]]:
        """The futures to wait for."""
        return [each.call for each in self._under_way]

    def finished(self) -> list[Judging]:
        """Judged groups, each returned once; the future holds exceptions, too."""
        done = [each for each in self._under_way if each.call.done()]
        self._under_way = [each for each in self._under_way if each not in done]
        return done

    def close(self) -> None:
        """Begins no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Work:
    """A streaming sampler at work, turn by turn."""

    def __init__(self, ledger: SamplerLedger, sampler: Sampler, settings: ServingSettings) -> None:
        self._ledger, self._sampler, self._settings = ledger, sampler, settings
        self.listener = Listener(sampler.name)
        self._judges = JudgeThreads(self._judged, settings)
        self._asked: Future[list[Lease]] | None = None  # for leases
        self._pending: list[tuple[int, Future[Any]]] = []  # calls that are not answered, and leases
        self._renewing: Future[Any] | None = None
        self._renewed = 0.0
        self._was_judged = True  # something, since the last renewal
        self.key = ""  # of the stream
        self.failure: SampleFailure | None = None  # that ended the thread
        self._stopped = threading.Event()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        # A daemon: a process that ends does not wait for a lease.
        self._thread = threading.Thread(target=self._run, name="streaming", daemon=True)

    # --- its thread ----------------------------------------------------------------------------

    def start(self, key: str) -> None:
        """Leases, samples and hands in groups for a stream, in a thread, until stopped."""
        self.key = key
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
        """The result of a call made between two steps.

        Raises:
            TimeoutError: no turn came to its end in time.
        """
        future: Future[Result] = Future()
        self._calls.put((call, future))
        return future.result(MAX_SECONDS_OF_A_TURN)

    def _answer(self) -> None:
        """Makes the calls that were asked for."""
        while not self._calls.empty():
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  (the border of a thread; raised by who asked)
                future.set_exception(error)

    def _run(self) -> None:
        try:
            with self.listener:
                while not self._stopped.is_set():
                    self.turn()
                    self._answer()
        except RayActorError:
            # The ledger has ended, and the run with it; where it has not, the driver, which asks
            # every second, starts another thread.
            self._stopped.set()
        except BaseException as error:  # noqa: BLE001  (the border of the thread; reported to the driver)
            self.failure = SampleFailure.from_exception(error)
            self._stopped.set()
        finally:
            self._answer()
            self.close()

    # --- a turn --------------------------------------------------------------------------------

    def _judged(self, generated: UnjudgedBatch) -> JudgedBatch:
        batch = self._sampler.judge(generated)
        batch.messages = self.listener.take()
        return batch

    def turn(self) -> None:
        """One decoding step, then handles the ledger's answers.

        Raises:
            RayActorError: the ledger has ended.
            RayTaskError: a call to it failed.
        """
        raise NotImplementedError

    def _sampling(self) -> set[int]:
        """Ids of the leases that are being sampled."""
        return set()

    def _holding(self) -> set[int]:
        return self._sampling() | self._judges.leases | {lease for lease, _ in self._pending}

    def _ask(self, num_groups: int) -> None:
        if self._asked is None and num_groups > 0:
            self._asked = self._ledger.lease(num_groups, self._holding(), WAIT_SECONDS)

    def _leased(self) -> list[Lease]:
        """Leases that were asked for and have come."""
        if self._asked is None or not self._asked.done():
            return []
        leases, self._asked = self._asked.result(), None
        return leases

    def _renewal(self) -> Any:
        """The answer to a renewal, see `Ledger.renew`; None before it is there."""
        if self._renewing is None or not self._renewing.done():
            return None
        answer, self._renewing = self._renewing.result(), None
        return answer

    def _wait(self, seconds: float) -> None:
        """Waits for leases, or for a judge."""
        asked: list[Future[Any]] = [] if self._asked is None else [self._asked]
        wait([*self._judges.calls, *asked], seconds, FIRST_COMPLETED)

    def _hand_in(self) -> None:
        """Hands judged groups to the ledger; a group whose judge raised fails alone."""
        for each in self._judges.finished():
            self._was_judged = True
            error = each.call.exception()
            if error is None:
                self._tell("push", each.lease.id, each.call.result())
            else:
                self._report(each.lease, error, each.positions)
        for answered in [pending for pending in self._pending if pending[1].done()]:
            self._pending.remove(answered)
            answered[1].result()  # raises what became of the call

    def _tell(self, name: str, lease: int, *args: Any) -> None:
        """Calls the ledger about a lease; the answer is looked at in a later turn."""
        self._pending.append((lease, self._ledger.call(name, lease, *args)))

    def _report(self, lease: Lease, error: BaseException, positions: Collection[int]) -> None:
        """Tells the ledger of an exception that concerns these groups of a lease."""
        failure = SampleFailure.from_exception(error)
        self._tell("fail", lease.id, failure, list(positions))

    def _begin_renewal(self) -> None:
        """Renews leases of groups being sampled, and of those being judged while their judges make
        progress: a judge that hangs costs its lease."""
        now = time.monotonic()
        if self._renewing is not None or now - self._renewed < SECONDS_BETWEEN_RENEWALS:
            return
        leases = self._sampling()
        if self._was_judged:
            leases |= self._judges.leases
        self._renewing = self._ledger.call("renew", self._ledger.sampler, list(leases))
        self._renewed, self._was_judged = now, False

    def close(self) -> None:
        """Frees its memory."""
        self._judges.close()


class LeaseWork(Work):
    """One lease after the other, each sampled as one batch."""

    def turn(self) -> None:
        """Waits for a lease, or for a judge, and samples a lease's groups."""
        if not self._judges.is_full:
            self._ask(self._settings.groups_per_lease)
        self._wait(WAIT_SECONDS)
        self._hand_in()
        self._begin_renewal()
        self._renewal()
        for lease in self._leased():
            self._sample(lease)

    def _sample(self, lease: Lease) -> None:
        try:
            generated = self._sampler.generate(request_of(lease, self._settings), lease.weights)
        except Exception as error:  # noqa: BLE001  (the border of the process)
            self._report(lease, error, lease.positions)
            return
        self._judges.begin(lease, generated)


class RowWork(Work):
    """Takes leases as it has room, samples a token for all rows, has finished groups judged."""

    def __init__(self, ledger: SamplerLedger, sampler: Sampler, settings: ServingSettings) -> None:
        super().__init__(ledger, sampler, settings)
        self._rows = self._begin()
        self._new: set[int] = set()  # leases that the renewal under way may not know of

    def _begin(self) -> RowStream:
        settings = self._settings
        return RowStream(
            self._sampler, settings.num_completions, in_flight=settings.in_flight,
            masks_stale_prefix=settings.masks_stale_prefix,
        )  # fmt: skip

    def _sampling(self) -> set[int]:
        return self._rows.leases

    def turn(self) -> None:
        self._take_leases()
        self._begin_renewal()
        renewal = self._renewal()
        # What is raised from here on is the engine's: the ledger's answers were read.
        try:
            if self._rows.num_groups:
                with self._sampler.phase(GENERATING):
                    ended = self._rows.step()
                for lease, generated in ended:
                    self._judges.begin(lease, generated, continues=True)
            if renewal is not None:
                self._renew(*renewal)
        except Exception as error:  # noqa: BLE001  (the border of the process)
            self._fail(error)
        self._hand_in()

    def _take_leases(self) -> None:
        room = self._settings.max_groups - self._rows.num_groups
        if len(self._judges.leases) < MAX_JUDGING + self._settings.max_groups:
            self._ask(room)
        if not self._rows.num_groups:
            self._wait(SECONDS_BETWEEN_RENEWALS)
        for lease in self._leased():
            if not self._begin_with(lease):
                return  # the leases after it have ended as well

    def _begin_with(self, lease: Lease) -> bool:
        """Whether its weights are there, and so the engine."""
        self._new.add(lease.id)
        try:
            self._rows.load(lease.weights, lease.order)
        except Exception as error:  # noqa: BLE001  (the border of the process)
            self._fail(error)
            return False
        for raised, positions in self._rows.add(lease):
            self._report(lease, raised, positions)
        if anew := self._rows.begun_anew(lease):
            self._tell("keep_partial", lease.id, dict.fromkeys(anew, ()))
        return True

    def _renew(self, held: Sequence[int], newest: PublishedWeights | None, order: int) -> None:
        """Gives up the leases that have ended, and loads the newest weights."""
        for lease in self._rows.leases - set(held) - self._new:
            self._rows.drop(lease)
        self._new.clear()
        if newest is not None and self._rows.is_news(newest, order):
            for lease, partial in self._rows.partial().items():
                self._tell("keep_partial", lease, partial)
            self._rows.load(newest, order)

    def _fail(self, error: Exception) -> None:
        """Returns all groups in the engine, whose state can no longer be trusted, after an
        exception that none of them caused."""
        failure = SampleFailure.from_exception(error)
        held = list(self._holding() - self._sampling())
        self._ledger.call("give_back", self._ledger.sampler, failure, held).result()
        self._rows.close()
        self._rows = self._begin()

    def close(self) -> None:
        super().close()
        self._rows.close()


def be_streaming(
    runner: Any, key: str, ledger: Any, name: str, settings: ServingSettings
) -> SampleFailure | None:
    """Makes a sampler work for a stream, and no other; returns the error that ended its thread
    since the last call, if any.

    Args:
        key: names the stream. ledger: its actor, which knows the sampler as `name`.
    """
    streamer, failure = runner.streamer, None
    if streamer is None or streamer.key != key or not streamer.is_at_work:
        stop_streaming(runner)
        if streamer is not None and streamer.key == key:
            failure = streamer.failure
        by_row = settings.by_row and runner.sampler.takes_rows
        end = SamplerLedger(ledger, name)
        runner.streamer = (RowWork if by_row else LeaseWork)(end, runner.sampler, settings)
        runner.streamer.start(key)
    return failure


def stop_streaming(runner: Any) -> None:
    """Makes a sampler stop leasing."""
    if runner.streamer is not None:
        runner.streamer.stop()
        runner.streamer = None
