"""The receiving end: whichever way weights come, fetched, opened, loaded and counted.

    where from ── latest() ──▶ ticket ── transport ──▶ flat buffer ── load ──▶ the model

Each request says which weights a sampler uses (`receive`); who follows a run asks its
coordinator (`WeightsFollower`).
"""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RaySystemError

from rllib_llm.shared.remote import backoff_seconds
from rllib_llm.weights.flat_buffer import ChecksumError, FlatBuffer, TicketError, join, verify
from rllib_llm.weights.published import PublishedWeights, WeightsLostError
from rllib_llm.weights.transport import Transports

if TYPE_CHECKING:
    from rllib_llm.weights.coordinator import CoordinatorClient

# --- Nodes that want the same weights take turns: each that has them gives them to one more

POLL_SECONDS = 0.01
MAX_WAIT_SECONDS = 5.0  # a node before this one may have died


def may_pull(node: str, nodes: Sequence[str], holders: Collection[str]) -> bool:
    """Whether it is the turn of `node` among `nodes`, in order, while `holders` have whole copies.
    Nodes not in `nodes` need not wait."""
    lacking = [other for other in nodes if other not in holders]
    return node not in lacking or lacking.index(node) < max(1, len(holders))


def nodes_with_a_copy(ref: ray.ObjectRef) -> list[str]:
    """Ids of the nodes whose object store holds the whole object.

    Raises:
        GetTimeoutError: the owner of the object does not answer.
    """
    timeout_ms = int(1000 * MAX_WAIT_SECONDS)
    return ray.experimental.get_object_locations([ref], timeout_ms)[ref]["node_ids"]


def wait_for_turn(
    published: PublishedWeights, *, node: str | None = None,
    holders: Callable[[ray.ObjectRef], Collection[str]] = nodes_with_a_copy,
    sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Returns when this node, or another, may pull, at the latest after `MAX_WAIT_SECONDS`."""
    node = node or ray.get_runtime_context().get_node_id()
    deadline = clock() + MAX_WAIT_SECONDS
    while clock() < deadline:
        copies = set.intersection(*(set(holders(ref)) for ref in published.ref))
        if may_pull(node, published.nodes, copies):
            return
        sleep(POLL_SECONDS)


# --- One transfer to a receiver: always with a timeout, tried again when it fails

# What passes: a node or an owner went, the store was full or slow, bytes were damaged on the way.
# ObjectLostError is also the base of OwnerDiedError, ObjectFetchTimedOutError and their kind.
LOST_ERRORS = (ObjectLostError, ChecksumError)
PASSING_ERRORS = (*LOST_ERRORS, GetTimeoutError, RayActorError, RaySystemError)
PAUSE_SECONDS = 0.1  # of a follower; a publisher looks as often for weights that were lost


def failure_metrics(failures: Counter[str]) -> dict[str, float]:
    """`failures/<kind>`; the usual kinds are always present, so that every result has the same
    columns."""
    counts = {kind.__name__: 0 for kind in PASSING_ERRORS} | dict(failures)
    return {f"failures/{kind}": float(count) for kind, count in counts.items()}


class WeightsReceiver:
    """Keeps one model at published weights: fetches, opens, verifies and counts them.

    `in_use`: what the model holds whole; None before the first, and after a load that failed
    midway: it may then hold parts of two versions.

    get: `ray.get` or what stands for it. sleep, uniform, wait_for_turn: likewise.
    timeout_seconds: of one attempt; a transfer slower than that counts as failed.
    max_attempts: after so many failures the weights count as lost.
    """

    def __init__(
        self, *, get: Callable[..., Any] = ray.get, sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
        wait_for_turn: Callable[[PublishedWeights], None] = wait_for_turn,
        timeout_seconds: float = 60.0, max_attempts: int = 5,
    ) -> None:  # fmt: skip
        self._get = functools.partial(get, timeout=timeout_seconds)
        self._sleep, self._uniform = sleep, uniform
        self._wait_for_turn, self._max_attempts = wait_for_turn, max_attempts
        self._transports = Transports(self._get)
        self.in_use: PublishedWeights | None = None
        self.failures: Counter[str] = Counter()  # by the error's name, over all transfers
        self.transfer_seconds = 0.0  # of the last transfer, its failed attempts included
        self.load_seconds = 0.0  # of the last load
        self.num_skipped = 0  # versions passed over
        self._num_bytes = 0

    @property
    def version(self) -> int:
        """The version in use; -1 without one."""
        return -1 if self.in_use is None else self.in_use.version

    def receive(self, published: PublishedWeights, load: Callable[[FlatBuffer], None]) -> None:
        """Calls `load` with the published weights unless they are the ones in use.

        A lower version than the one in use is loaded too: a restored run goes back.

        Raises:
            WeightsLostError: they are not where they were put any more, or cannot be read here.
        """
        if self.in_use is not None and published.key == self.in_use.key:
            return
        if not published.ref:  # sampler and learner share the module
            self._use(published, before=self.in_use)
            return
        with ExitStack() as opened:
            _, flat = opened.enter_context(self.open(lambda: published))

            def load_all() -> None:
                load(flat)
                opened.close()  # raises where memory of a device was written over meanwhile

            self.replace(published, flat.num_bytes, load_all)

    def replace(
        self, published: PublishedWeights, num_bytes: int, load: Callable[[], None]
    ) -> None:
        """Calls `load`, which gives the model these weights; until it has done so none count as in
        use: the model may hold parts of two versions."""
        before, self.in_use = self.in_use, None
        start = time.perf_counter()
        load()
        self.load_seconds, self._num_bytes = time.perf_counter() - start, num_bytes
        self._use(published, before)

    def _use(self, published: PublishedWeights, before: PublishedWeights | None) -> None:
        if before is not None and before.epoch == published.epoch:
            self.num_skipped += max(0, published.version - before.version - 1)
        self.in_use = published

    @contextmanager
    def open(
        self,
        latest: Callable[[], PublishedWeights],
        report: Callable[[PublishedWeights], None] = lambda published: None,
    ) -> Iterator[tuple[PublishedWeights, FlatBuffer]]:
        """Weights and their bytes, which are to be read within the block.

        latest: gives weights, and is called again at each attempt. report: receives weights whose
        bytes are lost or damaged.

        Raises:
            WeightsLostError: every attempt failed, or they cannot be read here; or, at the end of
                the block, they have changed while they were read.
        """
        start = time.perf_counter()
        with ExitStack() as opened:
            for attempt in range(self._max_attempts):
                published = latest()
                try:
                    flat = self._fetch(published, opened)
                    break
                except TicketError as error:
                    raise self._unreadable(published, error) from error
                except PASSING_ERRORS as error:
                    self.failures[type(error).__name__] += 1
                    if isinstance(error, LOST_ERRORS):
                        report(published)
                    last = error
                    if attempt + 1 < self._max_attempts:
                        self._sleep(backoff_seconds(attempt, self._uniform))
            else:
                text = (f"weights {published.version} are not in the object store: "
                        f"{self._max_attempts} attempts failed, the last with "
                        f"{type(last).__name__}: {last}")  # fmt: skip
                raise WeightsLostError(text, published.key) from last
            self.transfer_seconds = time.perf_counter() - start
            yield published, flat
            try:
                opened.close()
            except TicketError as error:
                raise self._unreadable(published, error) from error

    def _fetch(self, published: PublishedWeights, opened: ExitStack) -> FlatBuffer:
        """One attempt; what is open for it is closed with `opened`."""
        if len(published.nodes) > 1:
            self._wait_for_turn(published)
        refs = list(published.ref)
        tickets = self._get(refs) if len(refs) > 1 else [self._get(refs[0])]
        parts = [opened.enter_context(self._transports.open(ticket)) for ticket in tickets]
        for part in parts:
            verify(part)
        return join(parts)

    def _unreadable(self, published: PublishedWeights, error: TicketError) -> WeightsLostError:
        """The error for bytes that this process can never read, so that retrying is pointless."""
        self.failures[type(error).__name__] += 1
        text = f"weights {published.version} cannot be read where they were left: {error}"
        return WeightsLostError(text, published.key)

    def published_bytes(self) -> FlatBuffer:
        """The weights in use as they were published, on a device a copy of them.

        Raises:
            WeightsLostError: there are none, or they are not there any more.
        """
        in_use = self.in_use
        if in_use is None:
            raise WeightsLostError("no published weights are in use yet: none were loaded")
        with self.open(lambda: in_use) as (_, flat):
            if isinstance(flat.data, np.ndarray):
                return flat
            return dataclasses.replace(flat, data=torch.clone(flat.data))

    def metrics(self) -> dict[str, float]:
        """Bytes and seconds of the last transfer and load, age of the weights in use in seconds;
        versions passed over (`skips`) and failed transfers by kind so far."""
        transfer, load, num_bytes = self.transfer_seconds, self.load_seconds, self._num_bytes
        now = time.time()  # by this machine's clock, which may be behind the publisher's
        return {
            "bytes": float(num_bytes), "transfer_seconds": transfer, "load_seconds": load,
            "gb_per_s": num_bytes / 1e9 / (transfer + load) if transfer + load else 0.0,
            "age_seconds": max(0.0, now - self.in_use.published_at) if self.in_use else 0.0,
            "skips": float(self.num_skipped), **failure_metrics(self.failures),
        }  # fmt: skip


# --- Following a run from any process: a replica of a server, say


class WeightsFollower:
    """Keeps one model at the newest weights of a run.

        follower = WeightsFollower(CoordinatorClient("my_run"), load)
        follower.wait_for_weights(timeout=60)  # before the first generation
        follower.start()                       # fetches newer weights beside the work
        while serving:
            follower.swap()                    # between batches: loads what has arrived
            generate(...)

    load: makes the model use what `prepare` gave; called by `wait_for_weights` and `swap` only,
        never by the thread.
    prepare: what can be done with the bytes beside the work, in the thread; the buffer itself if
        left out. With `ModuleLoader.prepare` here, `load` has only to call what it gives.
    wait_seconds: of one question to the coordinator, and the longest that `stop` takes.

    At most two versions are held in the store for it: the one in use, if `load` aliases it, and
    the one that waits for the next swap. What `prepare` gives may use the buffer later: weights
    that are followed come through the store.
    """

    def __init__(
        self, client: CoordinatorClient, load: Callable[[Any], None], *,
        prepare: Callable[[FlatBuffer], Any] = lambda flat: flat,
        receiver: WeightsReceiver | None = None, wait_seconds: float = 5.0,
    ):  # fmt: skip
        self._client, self._load, self._prepare = client, load, prepare
        self._receiver = receiver or WeightsReceiver()
        self._wait_seconds = wait_seconds
        self._lock = threading.Lock()
        self._arrived: tuple[PublishedWeights, int, Any] | None = None  # with bytes, as prepared
        self._stop, self._news = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None  # that ended the thread
        self.newest: PublishedWeights | None = None  # fetched, whether loaded or not

    @property
    def in_use(self) -> PublishedWeights | None:
        """The weights that the model holds completely; None before the first and after a failed
        load."""
        return self._receiver.in_use

    def wait_for_weights(self, min_version: int = 0, timeout: float = 60.0) -> PublishedWeights:
        """Loads the newest weights, waiting until there are some of at least `min_version`.

        Raises:
            TimeoutError: none came in `timeout` seconds.
            Exception: see `swap`.
        """
        deadline = time.monotonic() + timeout
        while self.in_use is None or self.in_use.version < min_version:
            rest = deadline - time.monotonic()
            if rest <= 0:
                raise TimeoutError(
                    f"no weights of version {min_version} or newer were published as "
                    f"{self._client.name!r} in {timeout} s: is the run alive, under this name?"
                )
            if self._thread is None:
                self._fetch(min_version, min(rest, self._wait_seconds))
            else:
                self._stop.wait(min(rest, 0.01))
            self.swap()
        return self.in_use

    def start(self) -> None:
        """Fetches newer weights in a thread from now on; nothing where one does already."""
        if self._thread is not None and self._thread.is_alive():
            if self._error is None:
                return
            self._thread.join()  # it has said why it ends
        self._stop.clear()
        self._error = None
        if self._arrived is None:
            self._news.clear()  # of the error
        self._thread = threading.Thread(target=self._run, name="fetch-weights", daemon=True)
        self._thread.start()

    def swap(self) -> bool:
        """Loads weights that have arrived; whether there were any. Call it between batches.

        Raises:
            Exception: what ended the thread, such as the export's own error or one of `prepare`;
                `start` begins anew. Or what `load` raised: those weights wait for the next swap.
        """
        if self._error is not None:
            raise self._error
        with self._lock:
            arrived, self._arrived = self._arrived, None
        if arrived is None:
            return False
        published, num_bytes, prepared = arrived
        try:
            self._receiver.replace(published, num_bytes, lambda: self._load(prepared))
        except BaseException:
            with self._lock:
                self._arrived = self._arrived or arrived
            raise
        return True

    def wait(self, timeout: float) -> bool:
        """Whether there is something for `swap`, weights or an error, in so many seconds."""
        arrived = self._news.wait(timeout)
        self._news.clear()
        return arrived

    def stop(self) -> None:
        """Ends the thread; the weights in use stay."""
        self._stop.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def metrics(self) -> dict[str, float]:
        """`version`, `bytes`, `transfer_seconds`, `load_seconds`, `gb_per_s`, `age_seconds`,
        `versions_behind` (of those fetched), `skips` and `failures/<kind>`."""
        metrics = self._receiver.metrics()
        in_use, newest = self.in_use, self.newest
        if in_use is None:
            del metrics["age_seconds"]
        else:
            same = newest is not None and newest.epoch == in_use.epoch
            latest = newest.version if newest is not None and same else in_use.version
            metrics["version"] = float(in_use.version)
            metrics["versions_behind"] = float(latest - in_use.version)
        return metrics | failure_metrics(self._receiver.failures + self._client.failures)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._fetch(0, self._wait_seconds)
            except PASSING_ERRORS:  # counted by the client: the coordinator is away for long
                self._stop.wait(self._wait_seconds)
            except Exception as error:  # noqa: BLE001  (the border of the thread; raised by swap)
                self._error = error
                self._news.set()
                return

    def _fetch(self, min_version: int, timeout: float) -> None:
        """Fetches weights newer than the last ones fetched, if some come in `timeout` seconds."""
        after = None if self.newest is None else self.newest.order
        if self._client.wait_for(min_version, timeout, after=after) is None:
            return

        def latest() -> PublishedWeights:
            found = self._client.wait_for(min_version, self._wait_seconds, after=after)
            if found is None:
                raise WeightsLostError("nothing was published in place of weights that are lost")
            return found

        try:
            report_lost = self._client.report_lost
            with self._receiver.open(latest, lambda lost: report_lost(lost.key)) as opened:
                published, flat = opened
                prepared = self._prepare(flat)
        except WeightsLostError:  # asked again in the next round
            self._stop.wait(PAUSE_SECONDS)
            return
        with self._lock:
            self._arrived, self.newest = (published, flat.num_bytes, prepared), published
            self._news.set()
