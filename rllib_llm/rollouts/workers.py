"""The samplers of a ledger as the driver sees them: in process, called by the driver, or
leasing work themselves while the learner trains."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError

from rllib_llm.rollouts.errors import NoSamplersError, NoServerError, SampleFailure
from rllib_llm.rollouts.groups import JudgedGroup, Lease
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.ledger_actor import STOP_SECONDS, LedgerCalls, RemoteLedger
from rllib_llm.rollouts.sample_loop import (
    LocalLedger,
    SampleLoop,
    be_streaming,
    stop_streaming,
)  # fmt: skip
from rllib_llm.rollouts.sampler import Sampler
from rllib_llm.rollouts.sampler_pool import SamplerPool
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.shared.process import LEAST_SECONDS, StarvedProcesses
from rllib_llm.shared.remote import ServerError

logger = logging.getLogger(__name__)

MAX_LOSSES_PER_SAMPLER = 3  # in a row, without an answer in between
POLL_SECONDS = 0.2  # for answers, between looks at who died; those of all are seen at once
SECONDS_BETWEEN_LOOKS = 1.0
LEAST_STARVED_SECONDS = 0.2  # reported to the ledger
SECONDS_GONE = 10.0  # in which the last call of a sampler that left may still be given a lease
ADVICE = "See the workers' logs; raise max_num_env_runner_restarts or sampler_timeout_s"


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
        try:
            while self._loop.turn() and self._is_eager:
                pass
        except ServerError as error:
            raise NoServerError(str(error)) from error

    def stop(self) -> None:
        self._loop.close()


@dataclass(eq=False)
class _Call:
    """A call to a sampler that is under way.

    began: monotonic seconds, later by those without a core.
    """

    call: Any  # the reference that becomes the answer
    began: float
    lease: int = 0
    is_wanted: bool = True


class RemoteWorkers(Workers):
    """Samplers in actors of their own: what becomes of those that die, hang, leave, or have no
    core. The ledger knows each by the number of its worker, which no other has later.

    Args:
        starvation: watches processes by their ids. Time in which a sampler was ready to compute and
            other processes left it no core counts for no limit.
    """

    def __init__(
        self,
        pool: SamplerPool,
        ledger: LedgerCalls,
        settings: ServingSettings,
        *,
        starvation: Callable[[Iterable[int]], StarvedProcesses] = StarvedProcesses,
    ) -> None:
        self._pool, self._actors, self._ledger = pool, pool.actors, ledger
        self._settings, self._starvation = settings, starvation
        self._asked: dict[int, _Call] = {}  # by worker
        self._gone: dict[int, float] = {}  # workers that left, and when
        self._starved: dict[int, StarvedProcesses] = {}  # by worker
        self._num_losses = 0
        self._looked = self._someone_seen = time.monotonic()

    def note_progress(self) -> None:
        """Samplers were not looked at while the learner learnt."""
        self._someone_seen = time.monotonic()
        self._num_losses = 0

    def replace(self, sampler: str, reason: str) -> None:
        if int(sampler) in self._actors.workers:
            self._pool.replace(int(sampler), reason)
            self._lose(int(sampler))

    def _answers(self, timeout_s: float) -> Iterator[tuple[int, _Call, Any]]:
        """The calls that have ended, with their workers and answers. Waits for all of them, at most
        `timeout_s`; the work of those that died is given to others."""
        workers = {asked.call: worker for worker, asked in self._asked.items()}
        for call in self._actors.ready(list(workers), timeout_s):
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
            yield worker, self._asked.pop(worker), answer

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
        for worker in self._asked.keys() - set(self._actors.workers):
            self._gone[worker] = now
            del self._asked[worker]
            self._starved.pop(worker, None)
        for worker, since in list(self._gone.items()):
            if now - since > SECONDS_GONE:
                del self._gone[worker]
            else:
                self._ledger.call("give_back", str(worker))

    def _allow_for_starvation(self) -> None:
        """Gives samplers that had no core more time by so much."""
        for worker in self._actors.healthy():
            if worker not in self._starved:
                self._starved[worker] = self._starvation(self._actors.processes(worker))
            seconds = self._starved[worker].take()
            if seconds >= LEAST_STARVED_SECONDS:
                self._ledger.call("put_off", str(worker), seconds)
                if worker in self._asked:
                    self._asked[worker].began += seconds

    def _require_progress(self, *, is_someone_there: bool) -> None:
        """Raises what ends the run where all samplers die again and again, or are gone."""
        pool, now = self._pool, time.monotonic()
        if is_someone_there:
            self._someone_seen = now
        lost = f"all samplers died or hung, {self._num_losses} times in a row"
        if self._num_losses >= MAX_LOSSES_PER_SAMPLER * pool.num_samplers:
            raise RuntimeError(f"{lost}. {ADVICE}\n{pool.last_words()}")
        gone = f"all samplers are gone, and none came back in {pool.start_limit:.0f} s"
        if now - self._someone_seen > pool.start_limit:
            raise NoSamplersError(f"{gone}. {ADVICE}\n{pool.last_words()}")


class SynchronousWorkers(RemoteWorkers):
    """Samplers that are dealt one lease each, and answer it by one call.

    A sampler has no state: what one did not answer is given to the next that is idle, and the
    completions are the same.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._nodes: dict[int, str] = {}  # by worker, as its last answer said

    def work(self) -> None:
        """Waits a moment for answers."""
        healthy = self._pool.healthy()
        self._ask(healthy)
        if not self._asked:
            time.sleep(POLL_SECONDS)
        for worker, asked, answer in self._answers(POLL_SECONDS):
            self._take(worker, asked, answer)
        self._give_back_of_gone()
        for worker in self._asked.keys() - set(self._actors.healthy()):
            self._lose(worker)
        if time.monotonic() - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            self._allow_for_starvation()
        self._require_progress(is_someone_there=bool(self._asked or healthy))

    def forget(self) -> None:
        """Marks pending answers as unneeded; such workers are asked again only if no other is
        free."""
        for asked in self._asked.values():
            asked.is_wanted = False

    def _ask(self, healthy: list[int]) -> None:
        idle = [worker for worker in healthy if worker not in self._asked]
        if not idle and not any(asked.is_wanted for asked in self._asked.values()):
            idle = healthy
        began = time.monotonic()
        dealt: dict[int, Lease] = {}
        for worker in idle:
            leases = self._ledger.call("lease", str(worker), 1, [])
            if not leases:
                break
            (dealt[worker],) = leases
        # Where they are on several nodes, these pull the weights in turns.
        nodes = dict.fromkeys(self._nodes.get(worker, "") for worker in (*self._asked, *dealt))
        for worker, lease in dealt.items():
            weights = dataclasses.replace(lease.weights, nodes=tuple(filter(None, nodes)))
            lease = dataclasses.replace(lease, weights=weights)
            call = self._actors.call(worker, "serve", lease, self._settings)
            self._asked[worker] = _Call(call, began, lease.id)

    def _take(self, worker: int, asked: _Call, answer: list[JudgedGroup] | SampleFailure) -> None:
        if isinstance(answer, SampleFailure):
            if asked.is_wanted:
                self._pool.faults.requests_retried += answer.may_pass
                self._pool.faults.seconds_lost += time.monotonic() - asked.began
            self._ledger.call("fail", asked.lease, answer)
            return
        self._nodes[worker] = answer[0].payload.batch.node
        self._num_losses = 0
        self._ledger.call("push", asked.lease, answer)


class LeasingWorkers(RemoteWorkers):
    """Samplers that lease by themselves, whatever the driver does.

    Each is asked every second to be at work, also while the learner trains (`watch`). What one held
    that died, or that left for good (`SamplerPool.scale`), is given to others; one that died is
    asked whether it is back, see `SamplerPool`.

    Args:
        answer_seconds: after which a sampler that does not say that it is at work counts as hung.
    """

    def __init__(
        self,
        pool: SamplerPool,
        ledger: RemoteLedger,
        settings: ServingSettings,
        *,
        answer_seconds: float = LEAST_SECONDS,
        **given: Any,
    ) -> None:
        super().__init__(pool, ledger, settings, **given)
        self._answer_seconds = answer_seconds
        self._key, self._actor = uuid.uuid4().hex, ledger.actor  # of the stream
        # Not asked again before the driver has heard why: what passes must not happen each second.
        self._failed: set[int] = set()
        self._error: Exception | None = None  # that ended the watch
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._keep_looking, name="samplers", daemon=True)
        self._look()

    def watch(self) -> None:
        """Looks after the samplers in a thread from now on, until stopped."""
        self._watch.start()

    def _keep_looking(self) -> None:
        try:
            while not self._ended.wait(SECONDS_BETWEEN_LOOKS) and not self._actors.are_gone:
                with self._pool.lock:
                    self._look_if_due()
        except Exception as error:  # noqa: BLE001  (the border of the thread; raised by `work`)
            self._error = error

    def work(self) -> None:
        if self._error is not None:
            raise self._error
        with self._pool.lock:
            self._failed.clear()
            self._look_if_due()
            self._require_progress(is_someone_there=bool(self._actors.healthy()))

    def _look_if_due(self) -> None:
        if time.monotonic() - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._look()

    def _look(self) -> None:
        """Takes what all answered, and asks those that can be asked."""
        self._looked = time.monotonic()
        self._give_back_of_gone()
        self._allow_for_starvation()
        for worker, _, failure in self._answers(0.0):
            if failure is not None:
                self._ledger.call("give_back", str(worker), failure)
                self._failed.add(worker)
        for worker, asked in list(self._asked.items()):
            if (silent := self._looked - asked.began) > self._answer_seconds:
                self.replace(str(worker), f"it was silent for {silent:.0f} s")
        for worker in self._pool.healthy():
            if worker not in self._asked and worker not in self._failed:
                stream = self._key, self._actor, str(worker), self._settings
                call = self._actors.call(worker, "apply", be_streaming, *stream)
                self._asked[worker] = _Call(call, self._looked)

    def replace(self, sampler: str, reason: str) -> None:
        with self._pool.lock:
            super().replace(sampler, reason)

    def stop(self) -> None:
        self._ended.set()
        if self._watch.is_alive():
            self._watch.join(STOP_SECONDS)
        calls = [self._actors.call(w, "apply", stop_streaming) for w in self._actors.healthy()]
        self._actors.ready(calls, STOP_SECONDS)
