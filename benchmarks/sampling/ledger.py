"""How many prompt groups a second pass through the ledger.

    python -m benchmarks.sampling.ledger [--samplers 64] [--seconds 10] [--groups-per-lease 16]
                                [--group-bytes 4096] [--in-process]

Emulated samplers lease groups and hand them in at once; a learner takes batches and publishes
weights. By default the ledger is the actor of a run, with its journal, and the samplers are threads
of a few processes; `--in-process` calls the table itself. JSON: groups per second, CPU seconds of
the ledger's process per 1000 groups.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import ray

from rllib_llm.rollouts.groups import JudgedGroup, Lease
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.ledger_actor import RemoteLedger
from rllib_llm.rollouts.sample_loop import SamplerLedger
from rllib_llm.rollouts.schedule import StreamRules
from rllib_llm.weights.published import PublishedWeights

NUM_PROCESSES = 4  # that emulate samplers
WARM_UP_SECONDS = 2.0


def judged(lease: Lease, num_bytes: int) -> list[JudgedGroup]:
    """Groups of the lease, of so many bytes each."""
    span = range(lease.position, lease.position + lease.num_groups)
    return [JudgedGroup(p, b"x" * num_bytes, 100, 0, lease.weights.version) for p in span]


@ray.remote(num_cpus=0)
class Samplers:
    """Threads that each do what a sampler's does."""

    def is_there(self) -> bool:
        return True

    def run(self, actor: Any, names: list[str], size: int, num_bytes: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._sample, args=(actor, name, size, num_bytes, end))
            for name in names
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _sample(self, actor: Any, name: str, size: int, num_bytes: int, end: float) -> None:
        ledger = SamplerLedger(actor, name)
        while time.monotonic() < end:
            for lease in ledger.lease(size, [], 0.5).result():
                ledger.call("push", lease.id, judged(lease, num_bytes)).result()


def learn(ledger: RemoteLedger, version: int, end: float) -> int:
    """Takes batches until `end`, from the update `version` on; the one it has come to."""
    while time.monotonic() < end:
        if ledger.call("take", version, 0, 0).groups is not None:
            version += 1
            ledger.call("publish", PublishedWeights(version))
    return version


def with_actor(args: argparse.Namespace, rules: StreamRules) -> dict[str, float]:
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        ledger = RemoteLedger(f"ledger-{uuid.uuid4().hex}", rules, Path(folder) / "ledger")
        ledger.call("publish", PublishedWeights(0))
        names = [str(i) for i in range(args.samplers)]
        processes = [Samplers.remote() for _ in range(NUM_PROCESSES)]
        ray.get([process.is_there.remote() for process in processes])
        calls = [
            process.run.remote(
                ledger.actor, names[i::NUM_PROCESSES], args.groups_per_lease, args.group_bytes,
                args.seconds + WARM_UP_SECONDS,
            )
            for i, process in enumerate(processes)
        ]  # fmt: skip
        first = learn(ledger, 0, time.monotonic() + WARM_UP_SECONDS)
        cpu, start = ledger.call("look")["cpu_seconds"], time.monotonic()
        last = learn(ledger, first, start + args.seconds)
        num_groups = (last - first) * args.groups
        seconds = time.monotonic() - start
        cpu = ledger.call("look")["cpu_seconds"] - cpu
        ray.wait(calls, num_returns=len(calls), timeout=10)
        ledger.stop()
    ray.shutdown()
    return {"groups_per_s": num_groups / seconds, "cpu_s_per_1000": 1000 * cpu / num_groups}


def in_process(args: argparse.Namespace, rules: StreamRules) -> dict[str, float]:
    ledger = Ledger(rules)
    ledger.call("publish", PublishedWeights(0))
    version, num_groups = 0, 0
    start, cpu = time.monotonic(), time.process_time()
    while time.monotonic() - start < args.seconds:
        for name in range(args.samplers):
            for lease in ledger.call("lease", str(name), args.groups_per_lease, []):
                ledger.call("push", lease.id, judged(lease, args.group_bytes))
        while (answer := ledger.take(version)).groups is not None:
            num_groups += len(answer.groups)
            version += 1
            ledger.call("publish", PublishedWeights(version))
    cpu = time.process_time() - cpu
    return {
        "groups_per_s": num_groups / (time.monotonic() - start),
        "cpu_s_per_1000": 1000 * cpu / num_groups,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samplers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--groups-per-lease", type=int, default=16)
    parser.add_argument("--group-bytes", type=int, default=4096)
    parser.add_argument("--groups", type=int, default=512, help="of an iteration")
    parser.add_argument("--schedule", choices=("lockstep", "free"), default="free")
    parser.add_argument("--in-process", action="store_true")
    args = parser.parse_args()
    rules = StreamRules(
        num_groups=args.groups, max_staleness=2, schedule=args.schedule,
        groups_per_lease=args.groups_per_lease,
    )  # fmt: skip
    measure = in_process if args.in_process else with_actor
    found = {name: round(value, 2) for name, value in measure(args, rules).items()}
    print(json.dumps({**vars(args), **found}))


if __name__ == "__main__":
    main()
