"""What a fleet of samplers costs the ledger, on a simulated clock in one process.

    python -m benchmarks.sampling.fleet [--samplers 1 10 100 1000] [--slots 64] [--updates 30]
        [--schedule free | lockstep] [--plot FILE.png]
    python -m benchmarks.sampling.fleet --waits [--updates 20]
    python -m benchmarks.sampling.fleet --driver [--updates 6] [--folder FOLDER] [--plot FILE.png]

The ledger is the run's own; samplers are events: each has so many slots, asks for groups when half
of its slots are free, says every five seconds that it is alive, and takes a log-normal time for a
group (median 20 s, sigma 0.6). The learner takes 2 s for an update. Half of all groups in
flight make a batch. In the middle of the run one sampler in a hundred (at least one) dies: calls to
it fail a second later, as Ray tells, and its process is back after 30 s. The driver is the run's
own, too: it looks at all samplers each second in which it waits for a batch.

One JSON line each: `in_flight` groups; CPU microseconds of the ledger per group, whole
(`us_per_group`) and by call; `wait_s`: simulated seconds from a group's end to the update that
learns from it (median); from the deaths until the driver knew of all of them (`noticed_s`), until
all of their groups were leased again (`released_s`) and until all were at work again
(`replaced_s`); `ms_per_look`: CPU of a look of the driver; `bytes_per_group` in flight, without
payloads; `simulated_s`.

With `--waits`, what follows from the simulated clock alone, the same on every machine: `wait_s` and
`update_s` (simulated seconds of an update) of both schedules, of the free one with a window of one
and of two batches, and of groups that all take the same time; beside `slowest_s`, which is not
simulated: how much longer than the median group the slowest of a batch takes (median of the largest
of as many log-normals as a batch has groups).

With `--driver`, what the driver's thread takes for a group: its looks, joining the rows of a batch
(`driver_us`) and the real recorder, which gives a batch to the store at once and each rejected
group by itself, one group in ten (`recorder_us`); the CPU of the store's thread, which writes 8
completions of 32 tokens for a group into a temporary folder (`store_us`); and of a real overseer,
to which each sampler reports every second, for a group (`reports_us`) and for an answer to `rllib
status` (`ms_per_status`, median: some begin a collection of the whole simulation's garbage).
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import json
import math
import random
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from ray.exceptions import RayError

from rllib_llm.data.rollout_store import RolloutStore
from rllib_llm.overseer.link import INTERVAL_S
from rllib_llm.overseer.phases import IDLE, Phases
from rllib_llm.overseer.service import Overseer
from rllib_llm.rollouts import workers
from rllib_llm.rollouts.errors import Faults
from rllib_llm.rollouts.groups import Closed, JudgedGroup, Lease
from rllib_llm.rollouts.judged_batch import JudgedBatch, batch_of, pack, rows_of
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.recorder import AboutRun, RolloutRecorder
from rllib_llm.rollouts.schedule import StreamRules
from rllib_llm.shared import columns
from rllib_llm.weights.published import PublishedWeights

MEDIAN_S, SIGMA = 20.0, 0.6
UPDATE_S, RENEW_S, TOLD_S, BACK_S = 2.0, 5.0, 1.0, 30.0
TOKENS = 256
GROUP, GROUP_TOKENS, ONE_REJECTED_IN, STATUS_S = 8, 32, 10, 5.0


class NeverStarved:
    """Processes that always have a core."""

    def __init__(self, pids: Any) -> None:
        """Nothing to be done."""

    def take(self) -> float:
        return 0.0


Call = tuple[int, float | None, float]


class Pool:
    """`SamplerPool` and `SamplerActors` of emulated samplers. A call is (worker, died, asked):
    `died` is when the sampler died that it was made to; it is answered after the moment `asked`."""

    start_limit = float("inf")

    def __init__(self, fleet: Fleet, num_samplers: int) -> None:
        self._fleet, self.actors, self.faults = fleet, self, Faults()
        self.lock = threading.RLock()
        self.workers, self.num_samplers = list(range(num_samplers)), num_samplers
        self.died: dict[int, float] = {}  # seconds, by worker
        self._down: set[int] = set()  # as far as the driver knows

    def healthy(self) -> list[int]:
        back = {w for w in self._down if self._fleet.now - self.died[w] >= BACK_S}
        self._down -= back
        return [worker for worker in self.workers if worker not in self._down]

    def processes(self, worker: int) -> list[int]:
        return []

    def mark(self, worker: int, *, healthy: bool) -> None:
        self._down.add(worker)

    def call(self, worker: int, method: str, *args: Any) -> Call:
        self._fleet.order(worker)
        return worker, self.died.get(worker), self._fleet.now

    def ready(self, calls: Iterable[Call], timeout_s: float) -> list[Call]:
        now = self._fleet.now
        return [
            (worker, died, asked) for worker, died, asked in calls if asked < now
            and (self.died.get(worker) == died or now - self.died[worker] >= TOLD_S)
        ]  # fmt: skip

    def answer(self, call: Call) -> None:
        worker, died, _ = call
        if self.died.get(worker) != died:
            raise RayError("the sampler died")


class LedgerPort:
    """The ledger as the driver's looks call it."""

    actor = None

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def call(self, name: str, sampler: str) -> None:
        assert name == "give_back"
        self._fleet.give_back(sampler)


def group_of_rows() -> bytes:
    """A judged group of `GROUP` completions, as a sampler hands it in."""
    ids = torch.randint(
        0, 50_000, (GROUP, GROUP_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    logprobs, mask = -(ids / 50_000), torch.ones_like(ids, dtype=torch.bool)
    return pack(
        JudgedBatch(
            columns={
                columns.PROMPT_IDS: ids,
                columns.PROMPT_MASK: mask,
                columns.COMPLETION_IDS: ids,
                columns.COMPLETION_MASK: mask,
                columns.SAMPLER_LOGPROBS: logprobs,
                columns.WEIGHTS_VERSION: torch.zeros_like(ids, dtype=torch.int32),
                columns.SCORES: logprobs[:, 0],
                columns.VALID: mask[:, 0],
                columns.GROUP: torch.zeros(GROUP, dtype=torch.int64),
                columns.ROW_ID: torch.arange(GROUP),
            },
            rewards=logprobs[:, 0],
        )
    )


class Books:
    """What the driver does with groups beside learning, and the overseer with reports."""

    def __init__(self, folder: str, fleet: Fleet) -> None:
        about = AboutRun("fleet", "fleet", GROUP, 1, 1.0, 1.0, 0, 0)
        self.payload, self._fleet = group_of_rows(), fleet
        self.store = RolloutStore(folder, on_error="stop")
        self._recorder = RolloutRecorder(self.store, about)
        self._overseer = Overseer(clock=lambda: fleet.now)
        self._report = {
            **Phases(IDLE).report(),
            "kind": "sampler",
            "trial": "t",
            "incarnation": "",
            "answers": [],
        }
        self._num_closed = 0
        self.statuses: list[float] = []  # CPU-seconds of each
        self.cpu: dict[str, float] = defaultdict(float)
        self._status()

    @property
    def num_closed(self) -> int:
        """Rejected groups recorded so far."""
        return self._num_closed

    def reason(self, position: int) -> str:
        """Why a group is rejected, "" where it is not."""
        return "reward_spread" if position % ONE_REJECTED_IN == 0 else ""

    def close(self, closed: Sequence[Closed], num_closed: int, iteration: int) -> None:
        """Records rejected groups, each by itself as the run's driver does."""
        self._num_closed = num_closed
        for each in closed:
            batch = self._timed("driver", rows_of, each)
            self._timed("recorder", self._recorder.record, batch, each.status,
                        iteration=iteration, reason=each.reason)  # fmt: skip

    def train(self, groups: Sequence[JudgedGroup], iteration: int) -> None:
        """Joins the rows of a batch and records them."""
        batch = self._timed("driver", batch_of, groups)
        self._timed("recorder", self._recorder.record, batch, "trained", iteration=iteration)

    def report(self, name: str) -> None:
        """A sampler's report to the overseer."""
        self._timed("reports", self._overseer.report, {**self._report, "part": name})

    def _status(self) -> None:
        before = self.cpu["status"]
        self._timed("status", self._overseer.status)
        self.statuses.append(self.cpu["status"] - before)
        self._fleet.later(STATUS_S, self._status)

    def _timed(self, name: str, what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        answer = what(*args, **kwargs)
        self.cpu[name] += time.thread_time() - start
        return answer


class Fleet:
    """Samplers, a learner and the ledger between them.

    Args:
        num_samplers, slots: groups in flight are their product.
        schedule: of the ledger; `window` in batches.
        sigma: of the log-normal time of a group.
        folder: of a rollout store; see `Books`.
    """

    def __init__(
        self,
        num_samplers: int,
        slots: int,
        schedule: Any,
        *,
        window: int = 1,
        sigma: float = SIGMA,
        folder: str | None = None,
    ) -> None:
        self.now = 0.0
        self.slots, self.sigma = slots, sigma
        self.rules = StreamRules(
            num_groups=max(1, num_samplers * slots // 2),
            max_staleness=1,
            schedule=schedule,
            window=window * max(1, num_samplers * slots // 2) if schedule == "free" else 1,
            timeout_s=600.0,
        )
        keeps = folder is not None
        self.ledger = Ledger(self.rules, keeps_rejected=keeps, clock=lambda: self.now)
        self.cpu: dict[str, float] = defaultdict(float)
        self.num_updates = self.num_groups = 0
        self.waits: list[float] = []
        self.noticed_s = self.released_s = self.replaced_s = 0.0
        self.num_looks, self.cpu_of_looks = 0, 0.0
        self._random = random.Random(0)
        self._events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._numbers = itertools.count()
        self._held: dict[str, dict[int, int]] = {str(i): {} for i in range(num_samplers)}
        self._ended: dict[int, float] = {}
        self._orphans: set[int] = set()
        self._dead: set[str] = set()
        self._idle: dict[str, None] = {}  # samplers that wait for work, in their order
        self._died_at = 0.0
        self._is_learning = False
        self._call("publish", PublishedWeights(0))
        for name in self._held:
            self.later(0.0, self._fill, name)
            self.later(self._random.uniform(0, RENEW_S), self._renew, name)
        self.books = Books(folder, self) if folder is not None else None
        for name in self._held if self.books else ():
            self.later(self._random.uniform(0, INTERVAL_S), self._report, name)
        workers.time = self  # type: ignore[assignment]  # the driver's clock is this one's
        self.pool = Pool(self, num_samplers)
        self._driver = workers.PulledLeases(
            self.pool,
            LedgerPort(self),
            None,
            starvation=NeverStarved,  # type: ignore[arg-type]
        )
        self.later(0.0, self._look)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Passes no time: the driver looks again when it is due."""

    def _call(self, name: str, *arguments: Any) -> Any:
        start = time.thread_time()
        answer = getattr(self.ledger, name)(*arguments)
        self.cpu[name] += time.thread_time() - start
        return answer

    def later(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        event = (self.now + seconds, next(self._numbers), what, arguments)
        heapq.heappush(self._events, event)

    def run(self, num_updates: int) -> None:
        """Until so many updates were made, with deaths in their middle."""
        while self.num_updates < num_updates and self._events:
            self.now, _, what, arguments = heapq.heappop(self._events)
            what(*arguments)
            if self.num_updates == num_updates // 2 and not self._died_at:
                self._die(max(1, len(self._held) // 100))

    # --- samplers ------------------------------------------------------------------------------

    def _fill(self, name: str) -> None:
        held = self._held.get(name)
        if held is None:
            return
        room = self.slots - sum(held.values())
        if room * 2 < self.slots or name in self._idle:
            return
        leases: list[Lease] = self._call("lease", name, room, list(held))
        for lease in leases:
            held[lease.id] = lease.num_groups
            for position in lease.positions:
                self._orphans.discard(position)
                seconds = MEDIAN_S * self._random.lognormvariate(0.0, self.sigma)
                self.later(seconds, self._finish, name, lease, position)
        if self._died_at and not self._orphans and not self.released_s:
            self.released_s = self.now - self._died_at
        if not leases:
            self._idle[name] = None

    def _finish(self, name: str, lease: Lease, position: int) -> None:
        held = self._held.get(name)
        if held is None or lease.id not in held:
            return
        books, version = self.books, lease.weights.version
        payload, reason = (books.payload, books.reason(position)) if books else (b"", "")
        group = JudgedGroup(position, payload, TOKENS, 0, version, reason)
        self._call("push", lease.id, [group])
        self._ended[position] = self.now
        held[lease.id] -= 1
        if not held[lease.id]:
            del held[lease.id]
        self._fill(name)
        self._take()
        self._wake()

    def _wake(self) -> None:
        """Samplers that wait are answered as long as there is work, as the ledger's actor does."""
        while self._idle and self._call("has_work"):
            name = next(iter(self._idle))
            del self._idle[name]
            self._fill(name)

    def _renew(self, name: str) -> None:
        held = self._held.get(name)
        if held is not None:
            self._call("renew", name, list(held))
            self.later(RENEW_S, self._renew, name)

    def _report(self, name: str) -> None:
        assert self.books is not None
        if name in self._held:
            self.books.report(name)
        self.later(INTERVAL_S, self._report, name)

    def _die(self, count: int) -> None:
        self._died_at = self.now
        self._dead = set(list(self._held)[:count])
        for name in self._dead:
            del self._held[name]
            self._orphans |= {
                entry.position for entry in self.ledger.table
                if entry.state == "leased" and entry.sampler == name
            }  # fmt: skip
            self._idle.pop(name, None)
            self.pool.died[int(name)] = self.now

    def _look(self) -> None:
        if not self._is_learning:
            start = time.thread_time()
            self._driver.work()
            self.cpu_of_looks += time.thread_time() - start
            self.num_looks += 1
        self.later(workers.SECONDS_BETWEEN_LOOKS, self._look)

    def give_back(self, name: str) -> None:
        """The driver knows that a sampler died."""
        self.noticed_s = self.now - self._died_at
        self._call("give_back", name)
        self.later(0.0, self._wake)

    def order(self, worker: int) -> None:
        """The driver asks a sampler to be at work, which starts one that is back."""
        name = str(worker)
        if name in self._held:
            return
        self._dead.discard(name)
        if not self._dead:
            self.replaced_s = self.now - self._died_at
        self._held[name] = {}
        self.later(0.0, self._fill, name)
        self.later(0.0, self._renew, name)

    # --- the learner ---------------------------------------------------------------------------

    def _take(self) -> None:
        if self._is_learning or not self._call("has_answer", 0):
            return
        answer = self._call("take", self.num_updates, self.books.num_closed if self.books else 0)
        if self.books:
            self.books.close(answer.closed, answer.num_closed, self.num_updates + 1)
        if answer.groups is None:
            return
        self._is_learning = True
        if self.books:
            self.books.train(answer.groups, self.num_updates + 1)
        for group in answer.groups:
            self.waits.append(self.now - self._ended.pop(group.position))
        self.num_groups += len(answer.groups)
        self.later(UPDATE_S, self._publish)

    def _publish(self) -> None:
        self.num_updates += 1
        self._is_learning = False
        self._call("publish", PublishedWeights(self.num_updates))
        self._take()
        self._wake()


def measure(num_samplers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    gc.collect()
    before = psutil.Process().memory_info().rss
    fleet = Fleet(num_samplers, arguments.slots, arguments.schedule)
    in_flight = len(fleet.ledger.table)
    memory = psutil.Process().memory_info().rss - before
    fleet.run(arguments.updates)
    by_call = {name: 1e6 * seconds / fleet.num_groups for name, seconds in fleet.cpu.items()}
    return {
        "samplers": num_samplers,
        "schedule": arguments.schedule,
        "in_flight": in_flight,
        "groups": fleet.num_groups,
        "us_per_group": round(sum(by_call.values()), 1),
        "wait_s": round(statistics.median(fleet.waits), 1),
        "noticed_s": round(fleet.noticed_s, 1),
        "released_s": round(fleet.released_s, 1),
        "replaced_s": round(fleet.replaced_s, 1),
        "ms_per_look": round(1e3 * fleet.cpu_of_looks / max(1, fleet.num_looks), 2),
        "bytes_per_group": round(memory / in_flight),
        "simulated_s": round(fleet.now, 1),
        "us_by_call": {name: round(value, 1) for name, value in sorted(by_call.items())},
    }


WAITS = (("lockstep", 1, SIGMA), ("free", 1, SIGMA), ("free", 2, SIGMA), ("free", 1, 0.0))


def waits(num_samplers: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """How long groups wait on the simulated clock, in each of the cases of `WAITS`."""
    found = []
    for schedule, window, sigma in WAITS:
        fleet = Fleet(num_samplers, arguments.slots, schedule, window=window, sigma=sigma)
        fleet.run(arguments.updates)
        largest = statistics.NormalDist().inv_cdf(0.5 ** (1 / fleet.rules.num_groups))
        found.append({
            "samplers": num_samplers,
            "batch": fleet.rules.num_groups,
            "schedule": schedule if window == 1 else f"{schedule}, window of {window} batches",
            "lengths": "log-normal" if sigma else "equal",
            "wait_s": round(statistics.median(fleet.waits), 1),
            "slowest_s": round(MEDIAN_S * (math.exp(sigma * largest) - 1), 1),
            "update_s": round(fleet.now / arguments.updates, 1),
        })  # fmt: skip
    return found


def measure_driver(num_samplers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """CPU of the driver's thread, of the store's and of the overseer."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        fleet = Fleet(num_samplers, arguments.slots, arguments.schedule, folder=folder)
        assert fleet.books is not None
        whole, own = time.process_time(), time.thread_time()
        fleet.run(arguments.updates)
        own = time.thread_time() - own
        fleet.books.store.stop()
        whole = time.process_time() - whole
        rows = fleet.books.store.metrics()["rows"]
    num_groups = fleet.num_groups + fleet.books.num_closed
    cpu = fleet.books.cpu | {"store": whole - own}
    cpu["driver"] += fleet.cpu_of_looks
    return {
        "samplers": num_samplers,
        "schedule": arguments.schedule,
        "in_flight": num_samplers * arguments.slots,
        "groups": num_groups,
        "rows": round(rows),
        **{f"{name}_us": round(1e6 * cpu[name] / num_groups, 1)
           for name in ("driver", "recorder", "store", "reports")},
        "ms_per_status": round(1e3 * statistics.median(fleet.books.statuses), 2),
    }  # fmt: skip


def draw_driver(points: list[dict[str, Any]], path: Path) -> None:
    """CPU for a group over samplers."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    numbers = [point["samplers"] for point in points]
    for name, label in (
        ("driver_us", "the driver without a store"),
        ("recorder_us", "recording, in the driver"),
        ("store_us", "the store's thread"),
        ("reports_us", "the overseer"),
    ):
        axes.plot(numbers, [point[name] for point in points], "o-", label=label)
    axes.set(xscale="log", yscale="log", xlabel="samplers", ylabel="µs of CPU per group")
    axes.legend()
    figure.savefig(path, dpi=150)


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """CPU of the ledger per group over samplers."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for schedule in dict.fromkeys(point["schedule"] for point in points):
        chosen = [point for point in points if point["schedule"] == schedule]
        numbers = [point["samplers"] for point in chosen]
        axes.plot(numbers, [p["us_per_group"] for p in chosen], "o-", label=schedule)
    axes.set(xscale="log", xlabel="samplers", ylabel="µs of the ledger's CPU per group", ylim=0)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samplers", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--schedule", choices=("free", "lockstep"), default="free")
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--driver", action="store_true")
    parser.add_argument("--folder", help="for the store's files; they are removed")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    points = []
    for num_samplers in arguments.samplers if arguments.waits else ():
        for line in waits(num_samplers, arguments):
            print(json.dumps(line), flush=True)
    if arguments.waits:
        return
    for num_samplers in arguments.samplers:
        points.append((measure_driver if arguments.driver else measure)(num_samplers, arguments))
        print(json.dumps(points[-1]), flush=True)
    if arguments.plot:
        (draw_driver if arguments.driver else draw)(points, arguments.plot)


if __name__ == "__main__":
    main()
