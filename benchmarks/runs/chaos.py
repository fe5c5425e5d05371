"""Trains under Tune while processes are killed (SIGKILL) or stopped (SIGSTOP) at random, and
accounts for every prompt; at the end the weights are compared with those of an undisturbed run.

    python -m benchmarks.runs.chaos --kills 100 --seed 0 --out chaos.json
    python -m benchmarks.runs.chaos --kills 10 --nodes 2 --victims node
    python -m benchmarks.runs.chaos --kills 100 --staleness 1 --schedule free --no-evaluation

With `--staleness` above 0 groups stream, and the ledger is among the victims; every token is
accounted for. With `--schedule free` the weights depend on time, and are not compared.
`--no-evaluation` leaves evaluation and its sampler out, which makes a trial start sooner;
`--at-once` is the share of signals that do not wait until the run has recovered.

With `--nodes` the run is on a cluster of a head and so many other nodes, all of them processes of
this machine; a node dies with its raylet, and a new one takes its place.
"""

from __future__ import annotations

import _thread
import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from benchmarks.runs import chaos_run
from benchmarks.runs.chaos_account import kill_account, prompt_account, token_account
from rllib_llm.weights.coordinator import NAMESPACE, CoordinatorClient

# How often each is the victim.
WEIGHTS = {
    "sampler": 5, "evaluation": 2, "learner": 2, "driver": 1, "coordinator": 1, "node": 1,
    "ledger": 2,
}  # fmt: skip
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
ENOUGH = "enough"  # file with which a person ends it before all signals were sent
NODE_CPUS = 3  # of each node: the run's five processes need two nodes
OBJECT_STORE_BYTES = 128 * 1024**2
MAX_SECONDS_TO_RECOVER = 1800.0
MAX_SECONDS_TO_ANSWER = 5.0  # of a coordinator that is asked for its process id


class NotRecoveredError(RuntimeError):
    """The run did not go on after a signal."""


class Nodes:
    """A cluster of processes of this machine: a head, where the script runs, and others to kill."""

    def __init__(self, num_nodes: int):
        self._dead: set[int] = set()
        self._cluster = Cluster(
            initialize_head=True, head_node_args=self._settings(num_cpus=2),
            shutdown_at_exit=False,  # by signal handlers, which a thread cannot set
        )  # fmt: skip
        for _ in range(num_nodes):
            self.add()
        ray.init(address=self._cluster.address, log_to_driver=False)

    def add(self) -> None:
        """One more node; nobody waits for it."""
        self._cluster.add_node(wait=False, **self._settings(num_cpus=NODE_CPUS))

    @staticmethod
    def _settings(num_cpus: int) -> dict[str, Any]:
        return {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False}  # fmt: skip

    def pids(self) -> list[int]:
        """Of the raylets of all nodes but the head that were not replaced."""
        pids = {_raylet_pid(node) for node in self._cluster.worker_nodes}
        return sorted(pids - self._dead)

    def replace(self, pid: int) -> None:
        """Starts another node for the one whose raylet was killed or stopped."""
        self._dead.add(pid)
        self.add()

    def bury(self) -> None:
        """Ends what is left of the replaced ones."""
        for node in list(self._cluster.worker_nodes):
            if _raylet_pid(node) in self._dead:
                self._cluster.remove_node(node, allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


def _raylet_pid(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


class Killer(threading.Thread):
    """Sends signals until there were enough of them, then lets the run end."""

    def __init__(
        self,
        ledger: Path,
        num_kills: int,
        seed: int,
        victims: list[str],
        nodes: Nodes | None,
        share_at_once: float,
    ):
        super().__init__(daemon=True)
        self.ledger, self.num_kills = ledger, num_kills
        self.weights = {kind: WEIGHTS[kind] for kind in victims}
        self.nodes, self.share_at_once = nodes, share_at_once
        self.random = random.Random(seed)
        self.kills: list[dict[str, Any]] = []
        self.error = ""  # what ended it before its time

    def run(self) -> None:
        self.error = "the sending of signals failed: its traceback is in the output"
        try:
            self._send_signals()
            self.error = ""
        except NotRecoveredError as error:
            self.error = str(error)
        finally:
            (self.ledger / chaos_run.STOP).touch()
            if self.error:  # the trial may never come to look for the file
                _thread.interrupt_main()

    def _send_signals(self) -> None:
        self._wait_until_beyond(1)
        while len(self.kills) < self.num_kills and not (self.ledger / ENOUGH).exists():
            version = self.version()
            kill = self._kill_one(version)
            if kill is None:
                time.sleep(0.5)
                continue
            self.kills.append(kill)
            print(f"{len(self.kills):4d} iteration {version:4d}: {kill['what']}", flush=True)
            if self.random.random() < self.share_at_once:
                time.sleep(self.random.uniform(1.0, 5.0))
            else:
                self._wait_until_beyond(version)
                if self.nodes is not None:
                    self.nodes.bury()
                time.sleep(self.random.uniform(0.0, 3.0))
        version = self.version()
        self._wait_until_beyond(version)
        client = CoordinatorClient(chaos_run.WEIGHTS_NAME)
        if client.wait_for(version + 1, MAX_SECONDS_TO_RECOVER) is None:
            raise NotRecoveredError(f"the coordinator was not told of weights beyond {version}")

    def version(self) -> int:
        """Iterations done, of the driver that reported last."""
        return max((e["version"] for e in self._events("iteration", "restored")[-1:]), default=0)

    def _events(self, *names: str) -> list[dict[str, Any]]:
        return [e for e in chaos_run.read_ledgers(self.ledger) if e["event"] in names]

    def _wait_until_beyond(self, version: int) -> None:
        start = time.monotonic()
        while self.version() <= version:
            if time.monotonic() - start > MAX_SECONDS_TO_RECOVER:
                raise NotRecoveredError(
                    f"no iteration beyond {version} in {MAX_SECONDS_TO_RECOVER:.0f} s"
                )
            time.sleep(0.3)

    def _kill_one(self, version: int) -> dict[str, Any] | None:
        (kind,) = self.random.choices(list(self.weights), list(self.weights.values()))
        how = self.random.choice(list(SIGNALS))
        pids = self._victims(kind)
        if not pids:
            return None
        pid = self.random.choice(pids)
        os.kill(pid, SIGNALS[how])
        if kind == "node":
            self.nodes.replace(pid)
        return {"what": f"{kind} {how}", "pid": pid, "time": time.time(), "version": version}

    def _victims(self, kind: str) -> list[int]:
        if kind == "node":
            return [] if self.nodes is None else self.nodes.pids()
        if kind == "coordinator":
            pids = coordinator_pids()
        else:
            pids = [e["pid"] for e in self._events("process") if e["kind"] == kind]
        return sorted({pid for pid in pids if is_running(pid)})


def coordinator_pids() -> list[int]:
    """Of the one coordinator, while it answers."""
    try:
        actor = ray.get_actor(chaos_run.WEIGHTS_NAME, NAMESPACE)
        return [ray.get(actor.stats.remote(), timeout=MAX_SECONDS_TO_ANSWER)["pid"]]
    except (ValueError, ray.exceptions.RayError):
        return []


def is_running(pid: int) -> bool:
    """Whether the process is one of Ray's, and neither dead nor stopped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return status not in "ZTt" and b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def train(
    folder: Path, killer: Killer, timeout_s: float, streaming: Mapping[str, Any], evaluates: bool
) -> Any:
    """The result of the disturbed run, in `folder`."""
    from ray import tune

    from rllib_llm.runs.callbacks import RestartHungTrials

    stop = str(killer.ledger / chaos_run.STOP)
    killer.start()
    (result,) = tune.Tuner(
        chaos_run.AccountedGRPO,
        param_space=chaos_run.make_config(
            timeout_s, chaos_run.WEIGHTS_NAME, streaming, evaluates=evaluates
        ),
        run_config=tune.RunConfig(
            name="run", storage_path=str(folder), verbose=0,
            stop=lambda trial_id, result: os.path.exists(stop),
            callbacks=[RestartHungTrials(timeout_s=4 * timeout_s)],
            failure_config=tune.FailureConfig(max_failures=-1),
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_frequency=chaos_run.CHECKPOINT_EVERY, num_to_keep=3,
                checkpoint_at_end=True,
            ),
        ),
    ).fit()  # fmt: skip
    return result


def same_as_undisturbed(
    checkpoint: Path, num_iterations: int, folder: Path, streaming: Mapping[str, Any]
) -> bool:
    """Whether the same training, undisturbed, comes to the same weights, bit for bit."""
    import torch
    from safetensors.torch import load_file

    from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT

    # Evaluation changes nothing; the number of samplers or of a learner's threads, round-off.
    config = chaos_run.make_config(timeout_s=None, streaming=streaming, evaluates=False)
    algorithm = config.build_algo()
    for _ in range(num_iterations):
        algorithm.train()
    expected = load_file(algorithm.export_model(folder / "undisturbed") / "model.safetensors")
    algorithm.stop()
    found = load_file(checkpoint / MODEL_IN_CHECKPOINT / "model.safetensors")
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole account of a run with as many kills as `arguments` say."""
    streaming = {}
    if arguments.staleness:
        streaming = {"max_staleness": arguments.staleness, "schedule": arguments.schedule}
    ledger = folder / "ledger"
    ledger.mkdir(parents=True)
    # Ray's processes inherit both.
    os.environ[chaos_run.LEDGER] = str(ledger)
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    nodes = Nodes(arguments.nodes) if arguments.nodes else None
    if nodes is None:
        ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False,
                 object_store_memory=256 * 1024**2)  # fmt: skip
    print(f"To end it early: touch {ledger / ENOUGH}", flush=True)
    killer = Killer(
        ledger, arguments.kills, arguments.seed, arguments.victims, nodes, arguments.at_once
    )
    start = time.time()
    try:
        result = train(folder, killer, arguments.timeout, streaming, arguments.evaluation)
        seconds, events = time.time() - start, chaos_run.read_ledgers(ledger)
        num_iterations = result.metrics["weights"]["version"]
        same = None
        if streaming.get("schedule") != "free":
            checkpoint = Path(result.checkpoint.path)
            same = same_as_undisturbed(checkpoint, num_iterations, folder, streaming)
    finally:
        ray.shutdown()
        if nodes is not None:
            nodes.shutdown()
    prompts = prompt_account(
        events, num_iterations, chaos_run.NUM_PROMPTS, chaos_run.NUM_COMPLETIONS
    )
    return {
        "seed": arguments.seed, "kills": len(killer.kills),
        "error": killer.error or str(result.error or ""),
        "iterations": num_iterations, "seconds": round(seconds), "prompts": prompts,
        "tokens": token_account(events),
        "same_weights_as_undisturbed": same, "time_lost": kill_account(events, killer.kills),
        "processes_started": Counter(e["kind"] for e in events if e["event"] == "process"),
        "faults_mended": _total_faults(events),
    }  # fmt: skip


def _total_faults(events: list[dict[str, Any]]) -> dict[str, float]:
    """Sums over the driver processes of what each reported last."""
    last = {e["pid"]: e["faults"] for e in events if e["event"] == "iteration"}
    totals: Counter[str] = Counter()
    for faults in last.values():
        totals.update(faults)
    return {name: round(value, 1) for name, value in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=20.0, help="of an answer, in seconds")
    parser.add_argument("--nodes", type=int, default=0, help="beside the head; 0: a local Ray")
    parser.add_argument("--victims", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--staleness", type=int, default=0, help="updates; above 0 groups stream")
    parser.add_argument("--schedule", choices=("lockstep", "free"), default="lockstep")
    parser.add_argument("--at-once", type=float, default=0.3)
    parser.add_argument("--no-evaluation", dest="evaluation", action="store_false")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        account = run(arguments, Path(folder))
    text = json.dumps(account, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
