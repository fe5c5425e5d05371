"""What being overseen costs: CPU seconds per second of a run, in a trial, in a sampler, and in the
overseer's own process.

    python -m benchmarks.runs.overseer [--seconds 60] [--samplers 4]

A trial's and the samplers' parts report to a real overseer while their processes do nothing else;
what such a process of Ray's takes by itself is measured in one that reports nothing, and taken off.
JSON: shares of one core, and microseconds that the clocks of an iteration take; `costs` is what a
trial's process pays, which is to be below 0.005.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import psutil
import ray

from rllib_llm.overseer.link import Link
from rllib_llm.overseer.phases import LEARNING, STARTING, WAITING, Oversight, Phases
from rllib_llm.overseer.service import open_overseer

SETTLE_S = 5.0  # until connections stand


class Part:
    """A process that does nothing but report; an "idle" one not even that."""

    def __init__(self, folder: str, kind: str, number: int) -> None:
        self.number = number
        self.phase, part = Phases(STARTING), f"{kind} {number}"
        self.oversight = Oversight(self.phase, str)
        report = self.oversight.report if kind == "trial" else self.phase.report
        if kind in ("trial", "sampler"):
            facts = {"kind": kind, "trial": "t"}
            self.link = Link(
                Path(folder), part, lambda: {**facts, **report()}, restarts_hung=kind == "trial"
            )

    def cpu_seconds(self) -> float:
        """That its process has taken."""
        return time.process_time()

    def clocks_microseconds(self, iterations: int = 2000) -> float:
        """Of what a trial does in one iteration beside reporting."""
        start = time.process_time()
        for iteration in range(iterations):
            with self.phase(WAITING, "sampling"):
                pass
            with self.phase(LEARNING, "learning"):
                pass
            self.oversight.waited({"generate_seconds": 0.5, "judge_seconds": 0.2})
            self.oversight.end_iteration(iteration)
        return (time.process_time() - start) / iterations * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--samplers", type=int, default=4)
    args = parser.parse_args()
    ray.init(num_cpus=args.samplers + 3, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        actor = ray.remote(num_cpus=0)(Part)
        trial = actor.remote(folder, "trial", 0)
        samplers = [actor.remote(folder, "sampler", i) for i in range(1, args.samplers + 1)]
        parts = [actor.remote(folder, "idle", 0), trial, *samplers]
        ray.get([part.cpu_seconds.remote() for part in parts])
        time.sleep(SETTLE_S)
        overseer = psutil.Process(ray.get(open_overseer(Path(folder)).pid.remote()))
        before = ray.get([part.cpu_seconds.remote() for part in parts]), overseer.cpu_times()
        start = time.monotonic()
        time.sleep(args.seconds)
        wall = time.monotonic() - start
        after = ray.get([part.cpu_seconds.remote() for part in parts]), overseer.cpu_times()
        idle, *shares = [(b - a) / wall for a, b in zip(before[0], after[0], strict=True)]
        own = sum(after[1][:2]) - sum(before[1][:2])
        found = {
            "costs": shares[0] - idle,
            "sampler_share": max(shares[1:], default=idle) - idle,
            "idle_share": idle,
            "overseer_share": own / wall,
            "clocks_us_per_iteration": ray.get(trial.clocks_microseconds.remote()),
        }
        print(json.dumps(found, indent=1))
    ray.shutdown()


if __name__ == "__main__":
    main()
