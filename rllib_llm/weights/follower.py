"""Following a training run's weights from any process: a replica of a server, say.

follower = WeightsFollower(CoordinatorClient("my_run"), load)
follower.require(timeout=60)      # before the first generation
follower.start()                  # fetches newer weights beside the work
while serving:
    follower.swap()               # between batches: loads what has arrived
    generate(...)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rllib_llm.weights.coordinator import CoordinatorClient
from rllib_llm.weights.flat_buffer import FlatBuffer
from rllib_llm.weights.published import PublishedWeights, WeightsLostError
from rllib_llm.weights.receiver import PASSING_ERRORS, Transfer, WeightsReceiver, failure_metrics


class WeightsFollower:
    """Keeps one model at the newest weights of a run.

    load: makes the model use what `prepare` gave; called by `require` and `swap` only, never by the
        thread.
    prepare: what can be done with the bytes beside the work, in the thread; the buffer itself if
        left out. With `ModuleLoader.prepare` here, `load` has only to call what it gives.
    wait_seconds: of one question to the coordinator, and the longest that `stop` takes.

    At most two versions are held in the store for it: the one in use, if `load` aliases it, and
    the one that waits for the next swap. What `prepare` gives may use the buffer later: weights
    that are followed come through the store.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        load: Callable[[Any], None],
        *,
        prepare: Callable[[FlatBuffer], Any] = lambda flat: flat,
        transfer: Transfer | None = None,
        wait_seconds: float = 5.0,
    ):
        self._client, self._load, self._prepare = client, load, prepare
        self._receiver = WeightsReceiver(transfer)
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

    def require(self, min_version: int = 0, timeout: float = 60.0) -> PublishedWeights:
        """Loads the newest weights, waiting until there are some of at least `min_version`.

        Raises:
            TimeoutError: none came in `timeout` seconds.
            Exception: see `swap`.
        """
        deadline = time.monotonic() + timeout
        while self.in_use is None or self.in_use.version < min_version:
            rest = deadline - time.monotonic()
            if rest <= 0:
                have = None if self.in_use is None else self.in_use.version
                raise TimeoutError(
                    f"weights_version={have} must be at least {min_version}: nothing newer was "
                    f"published as {self._client.name!r} in {timeout} s. Is the run alive, and "
                    "its weights_name the same?"
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
        if in_use is not None:
            metrics["version"] = float(in_use.version)
            behind = 0
            if newest is not None and newest.epoch == in_use.epoch:
                behind = newest.version - in_use.version
            metrics["versions_behind"] = float(behind)
        else:
            del metrics["age_seconds"]
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

        def report(lost: PublishedWeights) -> None:
            self._client.report_lost(lost.key)

        try:
            with self._receiver.open(latest, report) as (published, flat):
                prepared = self._prepare(flat)
        except WeightsLostError:
            return  # reported; asked again in the next round
        with self._lock:
            self._arrived, self.newest = (published, flat.num_bytes, prepared), published
            self._news.set()
