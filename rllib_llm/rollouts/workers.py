"""The samplers of a ledger in actors of their own, as the driver sees them: leases are dealt to
them, or they ask for leases while the learner trains."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError, RayTaskError

from rllib_llm.rollouts.errors import NoSamplersError, SampleFailure
from rllib_llm.rollouts.groups import JudgedGroup, Lease
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.sample_loop import Workers, be_streaming, stop_streaming
from rllib_llm.rollouts.sampler_pool import SamplerPool
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.shared.process import LEAST_SECONDS, StarvedProcesses

if TYPE_CHECKING:
    from rllib_llm.rollouts.ledger_actor import RemoteLedger

logger = logging.getLogger(__name__)

MAX_LOSSES_PER_SAMPLER = 3  # in a row, without an answer in between
POLL_SECONDS = 0.2  # for answers, between looks at who died
SECONDS_BETWEEN_LOOKS = 1.0
LEAST_STARVED_SECONDS = 0.2  # reported to the ledger
STOP_SECONDS = 2.0
SECONDS_GONE = 10.0  # in which the last call of a sampler that left may still be given a lease
ADVICE = "See the workers' logs; raise max_num_env_runner_restarts or sampler_timeout_s"


@dataclass(eq=False)
class _Call:
    """A call to a sampler that is under way.

    began: monotonic seconds, later by those without a core. lease: that was dealt; 0: none was.
    """

    call: Any  # the reference that becomes the answer
    began: float
    lease: int = 0
    is_wanted: bool = True


class RemoteWorkers(Workers):
    """Samplers in actors of their own: what becomes of those that die, hang, leave, or have no
    core. The ledger knows each by the number of its worker, which no other has later.

    What one held that died, or that left for good (`SamplerPool.scale`), is given to others; one
    that died is asked whether it is back, see `SamplerPool`.

    Args:
        are_enough: whether a batch can be sampled by these.
        starvation: watches processes by their ids. Time in which a sampler was ready to compute and
            other processes left it no core counts for no limit.
    """

    seconds_between_looks = 0.0

    def __init__(
        self, pool: SamplerPool, ledger: Ledger | RemoteLedger, settings: ServingSettings, *,
        are_enough: Callable[[Iterable[int]], bool] = any,
        starvation: Callable[[Iterable[int]], StarvedProcesses] = StarvedProcesses,
    ) -> None:  # fmt: skip
        self._are_enough = are_enough
        self._pool, self._actors = pool, pool.actors
        self._ledger, self._settings = ledger, settings
        self._starvation = starvation
        self._asked: dict[int, _Call] = {}  # by worker
        # Not asked again before the driver has heard why: what passes must not happen each second.
        self._failed: set[int] = set()
        self._known: set[int] = set()  # workers that there were at the last look
        self._gone: dict[int, float] = {}  # those that left, and when
        self._starved: dict[int, StarvedProcesses] = {}  # by worker
        self._num_losses = 0
        self._looked = self._looked_for_cores = self._someone_seen = time.monotonic()

    def work(self) -> None:
        """Waits a moment for answers. Raises what ends the run where all samplers die again and
        again, or are gone."""
        with self._pool.lock:
            self._failed.clear()
            if time.monotonic() - self._looked >= self.seconds_between_looks:
                self._look()
            pool, now = self._pool, time.monotonic()
            seen = {*self._asked, *self._actors.healthy()}
            if self._are_enough(seen):
                self._someone_seen = now
            lost = f"all samplers died or hung, {self._num_losses} times in a row"
            if self._num_losses >= MAX_LOSSES_PER_SAMPLER * pool.num_samplers:
                raise RuntimeError(f"{lost}. {ADVICE}\n{pool.last_words()}")
            of = " that open an environment" if seen else ""
            gone = f"all samplers{of} are gone, and none came back in {pool.start_limit:.0f} s"
            if now - self._someone_seen > pool.start_limit:
                raise NoSamplersError(f"{gone}. {ADVICE}\n{pool.last_words()}")

    def note_progress(self) -> None:
        """Samplers were not looked at while the learner learnt."""
        self._someone_seen = time.monotonic()
        self._num_losses = 0

    def replace(self, sampler: str, reason: str) -> None:
        with self._pool.lock:
            if int(sampler) in self._actors.workers:
                self._pool.replace(int(sampler), reason)
                self._lose(int(sampler))

    def _look(self) -> None:
        """Takes what all answered, and asks those that can be asked."""
        self._looked = time.monotonic()
        self._give_back_of_gone()
        self._allow_for_starvation()
        self._ask()

    def _ask(self) -> None:
        """See `_look`."""
        raise NotImplementedError

    def _healthy(self) -> list[int]:
        """Samplers that may be asked."""
        return [worker for worker in self._pool.healthy() if worker not in self._failed]

    def _take(self, worker: int, lease: int, answer: Any) -> None:
        """Gives the ledger what a sampler answered."""
        raise NotImplementedError

    def _take_answers(self, wait_seconds: float) -> None:
        """Gives the ledger the answers of all that have ended; waits for all of them a moment. The
        work of those that died is given to others."""
        workers = {asked.call: worker for worker, asked in self._asked.items()}
        for call in self._actors.ready(list(workers), wait_seconds):
            worker = workers[call]
            try:
                answer = self._actors.answer(call)
            except RayTaskError as error:  # it is alive: what it answered cannot be sent, say
                answer = SampleFailure.from_exception(error)
            except RayError as error:
                logger.warning("Sampler %d died; its prompts are sampled again: %s", worker, error)
                self._actors.mark(worker, healthy=False)
                self._lose(worker)
                continue
            asked = self._asked.pop(worker)
            if isinstance(answer, SampleFailure):
                self._failed.add(worker)
                if asked.is_wanted:
                    self._pool.faults.requests_retried += answer.may_pass
                    self._pool.faults.seconds_lost += time.monotonic() - asked.began
            self._take(worker, asked.lease, answer)
        for worker in self._asked.keys() - set(self._actors.healthy()):
            self._lose(worker)

    def _lose(self, worker: int) -> None:
        """Gives the work of a dead sampler to others."""
        asked = self._asked.pop(worker, None)
        self._starved.pop(worker, None)
        self._ledger.call("give_back", str(worker))
        if asked is None or asked.is_wanted:
            began = time.monotonic() if asked is None else asked.began
            self._pool.faults.seconds_lost += time.monotonic() - began
            self._pool.faults.requests_retried += 1
            self._num_losses += 1

    def _give_back_of_gone(self) -> None:
        """Requeues the leases of samplers that have left."""
        now = time.monotonic()
        for worker in self._known - set(self._actors.workers):
            self._gone[worker] = now
            self._asked.pop(worker, None)
            self._starved.pop(worker, None)
        self._known = set(self._actors.workers)
        self._gone = {w: since for w, since in self._gone.items() if now - since <= SECONDS_GONE}
        for worker in self._gone:
            self._ledger.call("give_back", str(worker))

    def _allow_for_starvation(self) -> None:
        """Gives samplers that had no core more time by so much."""
        if time.monotonic() - self._looked_for_cores < SECONDS_BETWEEN_LOOKS:
            return
        self._looked_for_cores = time.monotonic()
        for worker in self._actors.healthy():
            if worker not in self._starved:
                self._starved[worker] = self._starvation(self._actors.processes(worker))
            seconds = self._starved[worker].take()
            if seconds >= LEAST_STARVED_SECONDS:
                self._ledger.call("put_off", str(worker), seconds)
                if worker in self._asked:
                    self._asked[worker].began += seconds


class DealtLeases(RemoteWorkers):
    """Leases of a ledger in the driver's process: each sampler that is idle is dealt one, which it
    answers by one call.

    A sampler has no state: what one did not answer is given to the next that is idle, and the
    completions are the same. Which of them are late is known from their leases.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._nodes: dict[int, str] = {}  # by worker, as its last answer said

    def forget(self) -> None:
        """Such workers are asked again only if no other is free."""
        for asked in self._asked.values():
            asked.is_wanted = False

    def _ask(self) -> None:
        healthy = self._healthy()
        idle = [worker for worker in healthy if worker not in self._asked]
        if not idle and not any(asked.is_wanted for asked in self._asked.values()):
            idle = healthy
        began = time.monotonic()
        dealt: dict[int, Lease] = {}
        for worker in idle:
            leases = self._ledger.call("lease", str(worker), 1, [])
            if leases:  # others may open environments whose groups wait
                (dealt[worker],) = leases
        # Where they are on several nodes, these pull the weights in turns.
        nodes = dict.fromkeys(self._nodes.get(worker, "") for worker in (*self._asked, *dealt))
        for worker, lease in dealt.items():
            weights = dataclasses.replace(lease.weights, nodes=tuple(filter(None, nodes)))
            lease = dataclasses.replace(lease, weights=weights)
            call = self._actors.call(worker, "serve", lease, self._settings)
            self._asked[worker] = _Call(call, began, lease.id)
        if not self._asked:
            time.sleep(POLL_SECONDS)
        self._take_answers(POLL_SECONDS)

    def _take(self, worker: int, lease: int, answer: list[JudgedGroup] | SampleFailure) -> None:
        if isinstance(answer, SampleFailure):
            self._ledger.call("fail", lease, answer)
            return
        self._nodes[worker] = answer[0].payload.batch.node
        self._ledger.call("push", lease, answer)


class PulledLeases(RemoteWorkers):
    """Leases of a ledger in an actor, which samplers ask for by themselves. They are asked to be at
    work, and answer at once; from `watch` on in a thread, as they are at work while the learner
    trains, too.

    Args:
        answer_seconds: after which one that does not say that it is at work counts as hung.
    """

    seconds_between_looks = SECONDS_BETWEEN_LOOKS
    _ledger: RemoteLedger

    def __init__(
        self, pool: SamplerPool, ledger: RemoteLedger, settings: ServingSettings, *,
        answer_seconds: float = LEAST_SECONDS, **given: Any,
    ) -> None:  # fmt: skip
        super().__init__(pool, ledger, settings, **given)
        self._answer_seconds = answer_seconds
        self._stream = uuid.uuid4().hex, ledger.actor
        self._error: Exception | None = None  # that ended the watch
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._keep_looking, name="samplers", daemon=True)

    def watch(self) -> None:
        """Looks after the samplers in a thread from now on, until stopped."""
        self._look()
        self._watch.start()

    def _keep_looking(self) -> None:
        try:
            while not self._ended.wait(SECONDS_BETWEEN_LOOKS) and not self._actors.are_gone:
                with self._pool.lock:
                    self._look()
        except Exception as error:  # noqa: BLE001  (the border of the thread; raised by `work`)
            self._error = error

    def work(self) -> None:
        if self._error is not None:
            raise self._error
        super().work()

    def _ask(self) -> None:
        self._take_answers(0.0)  # who answered is asked again at once
        for worker in self._healthy():
            if worker not in self._asked:
                stream = *self._stream, str(worker), self._settings
                call = self._actors.call(worker, "apply", be_streaming, *stream)
                self._asked[worker] = _Call(call, time.monotonic())
        now = time.monotonic()
        for worker, asked in list(self._asked.items()):
            if (silent := now - asked.began) > self._answer_seconds:
                self.replace(str(worker), f"it was silent for {silent:.0f} s")

    def _take(self, worker: int, lease: int, answer: SampleFailure | None) -> None:
        if answer is not None:  # what ended its loop
            self._ledger.call("give_back", str(worker), answer)

    def stop(self) -> None:
        """Ends the watch, the samplers' turns, and the ledger after them: no call is in vain."""
        self._ledger.close()
        self._ended.set()
        if self._watch.is_alive():
            self._watch.join(STOP_SECONDS)
        calls = [self._actors.call(w, "apply", stop_streaming) for w in self._actors.healthy()]
        self._actors.ready(calls, STOP_SECONDS)
        self._ledger.stop()
