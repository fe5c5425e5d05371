"""What happens to weights on their way when something is killed, and copies per node.

    python -m benchmarks.weights.faults [--mb 20] [--rounds 5] [--cases transfers coordinator ...]

One JSON line per case, seconds as medians over the rounds:

    transfers    three failed transfers: from the publication until the weights are in use
    coordinator  SIGKILL to the coordinator, then a publication: until it is in use
    learner      SIGKILL to the publishing process; another one restores a lower version and
                 publishes: from its start until that is in use
    lost         the bytes are gone: until they were put again and are in use
    nodes        three nodes (all on this machine), two receivers each: copies of the weights in
                 each node's store once older ones are freed, the nodes that hold one, and the
                 transfer's seconds on each node, all at once and in waves
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.exceptions import ObjectLostError

from benchmarks.weights.publish import (
    MIB,
    SYSTEM_CONFIG,
    Weights,
    bytes_in_store,
    payload_bytes,
    start_ray,
)
from rllib_llm.weights.background import BackgroundPublisher
from rllib_llm.weights.coordinator import CoordinatorClient
from rllib_llm.weights.flat_buffer import pack
from rllib_llm.weights.loading import ModuleLoader
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.receiver import WeightsFollower, WeightsReceiver, nodes_with_a_copy

CASES = ("transfers", "coordinator", "learner", "lost", "nodes")
LONG = 600.0


class Get:
    """`ray.get`, of which the next `failures` calls fail."""

    def __init__(self) -> None:
        self.failures = 0

    def __call__(self, ref, timeout: float) -> Any:
        if self.failures:
            self.failures -= 1
            raise ObjectLostError(ref.hex(), None, "injected")
        return ray.get(ref, timeout=timeout)


class Following:
    """A follower in this process, with what it needs."""

    def __init__(self, name: str, num_bytes: int, get: Any = ray.get):
        self.module, self.loader = Weights(num_bytes), ModuleLoader(alias=True)
        self.client = CoordinatorClient(name)
        self.follower = WeightsFollower(
            self.client,
            lambda flat: self.loader.load(self.module, flat),
            receiver=WeightsReceiver(get=get),
        )

    def swap_to(self, version: int) -> None:
        """Swaps until that version is in use."""
        while self.follower.in_use is None or self.follower.in_use.version != version:
            if not self.follower.swap():
                time.sleep(0.002)

    def close(self) -> None:
        self.follower.stop()
        self.client.close()


def transfers(num_bytes: int, rounds: int) -> dict:
    """Three failures of one transfer."""
    return _failed(num_bytes, rounds, failures=3)


def lost(num_bytes: int, rounds: int) -> dict:
    """One failure: reported, and answered with a new put."""
    return _failed(num_bytes, rounds, failures=1)


def _failed(num_bytes: int, rounds: int, failures: int) -> dict:
    get = Get()

    def fail(_: Following) -> None:
        get.failures = failures

    return _recovery("transfers", num_bytes, rounds, fail, get)


def coordinator(num_bytes: int, rounds: int) -> dict:
    """The coordinator is killed; Ray restarts it, empty."""

    def kill(following: Following) -> None:
        os.kill(following.client.stats()["pid"], signal.SIGKILL)

    return _recovery("coordinator", num_bytes, rounds, kill)


def _recovery(
    name: str,
    num_bytes: int,
    rounds: int,
    fault: Callable[[Following], None],
    get: Any = ray.get,
) -> dict:
    """Seconds from a fault until the version published right after it is in use."""
    start_ray(6 * num_bytes + 64 * MIB)
    following = Following(name, num_bytes, get)
    publisher = BackgroundPublisher(following.client)
    tensors = Weights(num_bytes).own_tensors()
    publisher.submit(tensors, 0)
    following.follower.require(timeout=LONG)
    following.follower.start()
    seconds = []
    for version in range(1, rounds + 1):
        fault(following)
        start = time.perf_counter()
        publisher.submit(tensors, version)
        following.swap_to(version)
        seconds.append(time.perf_counter() - start)
    publisher.stop()
    following.close()
    return _seconds(seconds) | {"republished": publisher.num_republished}


@ray.remote(num_cpus=0)
class Publishing:
    """A process that owns what it publishes."""

    def __init__(self, name: str, num_bytes: int):
        self.publisher = BackgroundPublisher(CoordinatorClient(name))
        self.tensors = Weights(num_bytes).own_tensors()

    def publish(self, version: int) -> int:
        self.publisher.submit(self.tensors, version)
        self.publisher.wait(LONG)
        return os.getpid()


def learner(num_bytes: int, rounds: int) -> dict:
    """The publishing process is killed and another one goes on from a lower version."""
    start_ray(6 * num_bytes + 64 * MIB)
    following = Following("learner", num_bytes)
    publishing = Publishing.remote("learner", num_bytes)
    version = 100
    pid = ray.get(publishing.publish.remote(version))
    following.follower.require(timeout=LONG)
    following.follower.start()
    seconds = []
    for _ in range(rounds):
        os.kill(pid, signal.SIGKILL)
        start = time.perf_counter()
        version -= 1
        publishing = Publishing.remote("learner", num_bytes)
        pid = ray.get(publishing.publish.remote(version))
        following.swap_to(version)
        seconds.append(time.perf_counter() - start)
    following.close()
    return _seconds(seconds)


@ray.remote(num_cpus=0)
class NodeReceiver:
    """A sampler's share of the work, on some node."""

    def __init__(self, num_bytes: int):
        self.module, self.loader = Weights(num_bytes), ModuleLoader(alias=True)
        self.receiver = WeightsReceiver()

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def receive(self, published: PublishedWeights) -> float:
        """Seconds until the bytes were on this node."""
        self.receiver.ensure(published, lambda flat: self.loader.load(self.module, flat))
        return self.receiver.metrics()["transfer_seconds"]


def nodes(num_bytes: int, rounds: int) -> dict:
    """Copies per node, on a cluster of three whose nodes are processes of this machine."""
    ray.shutdown()
    cluster = Cluster()
    for number in range(3):
        cluster.add_node(
            num_cpus=2,
            resources={f"node{number}": 10},
            object_store_memory=3 * num_bytes + 80 * MIB,
            include_dashboard=False,
            **({"_system_config": SYSTEM_CONFIG} if number == 0 else {}),
        )
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    receivers = [
        NodeReceiver.options(resources={f"node{number}": 1}).remote(num_bytes)
        for number in (0, 0, 1, 1, 2, 2)
    ]
    names = ray.get([receiver.node.remote() for receiver in receivers])
    flat = pack(Weights(num_bytes).own_tensors())
    seconds = {"at_once": [], "in_waves": []}
    for version in range(rounds):
        for how, in_turn in (("at_once", ()), ("in_waves", tuple(dict.fromkeys(names)))):
            ref = ray.put(flat)
            published = PublishedWeights(version, ref=(ref,), nodes=in_turn)
            arrived = ray.get([r.receive.remote(published) for r in receivers])
            seconds[how].append([round(arrived[number], 2) for number in (0, 2, 4)])
    holders = nodes_with_a_copy(ref)
    del ref, published
    last = PublishedWeights(rounds, ref=(ray.put(flat),))
    ray.get([receiver.receive.remote(last) for receiver in receivers])
    time.sleep(5)  # Ray frees in the background
    copies = [round(used / num_bytes, 2) for used in bytes_in_store().values()]
    ray.shutdown()
    cluster.shutdown()
    return {
        "receivers": len(receivers),
        "nodes_with_a_copy": len(holders),
        "copies": copies,
        "transfer_seconds_of_each_node": seconds,
    }


def _seconds(values: list[float]) -> dict:
    return {
        "seconds": round(statistics.median(values), 2),
        "all_seconds": [round(value, 2) for value in values],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_bytes = payload_bytes(arguments.mb)
    for case in arguments.cases:
        result = globals()[case](num_bytes, arguments.rounds)
        print(json.dumps({"case": case, "mb": arguments.mb, **result}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
